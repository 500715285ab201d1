"""The table of buckets: what it says of kernels that engines really run, and how a user extends it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from isambard_serve.errors import UsageError
from isambard_serve.trace import buckets

Write = Callable[[str, str], Path]

NATIVE = "void at::native::{}<4, at::native::{}, std::array<char*, 2ul> >(int, at::native::{}, std::array<char*, 2ul>)"


def native(kind: str, what: str) -> str:
    """One of torch's own kernels."""
    return NATIVE.format(kind, what, what)


@pytest.mark.parametrize(("kernel", "bucket"), [
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "comms"),
    ("ncclSymkDevKernel_AllGather_LLMC(ncclSymkDevWorkArgs)", "comms"),
    ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 4>(vllm::RankData*)", "comms"),
    ("void deep_ep::internode_ll::dispatch<true, false, 4096>(void*)", "comms"),
    ("void humming<MmaOpClass, Shape<0u, 4096u, 4096u>, TuningConfig>(KernelTensorParamType<...>)", "MoE GEMM"),
    ("fused_moe_kernel", "MoE GEMM"),
    ("void marlin_moe_wna16::Marlin<1125899906909960l, 128, 8, 8>(int4 const*)", "MoE GEMM"),
    ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, 64u, (deep_gemm::GemmType)1, float>(float*)", "MoE GEMM"),
    ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, 64u, (deep_gemm::GemmType)0, float>(float*)", "dense GEMM"),
    ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<GroupProblemShape<Shape<int>>>>", "MoE GEMM"),
    ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int>>>", "dense GEMM"),
    ("nvjet_sm90_tst_128x64_64x8_1x2_h_bz_NNT", "dense GEMM"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams<float>)", "dense GEMM"),
    ("_w8a8_triton_block_scaled_mm", "dense GEMM"),
    ("cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16_knob_35_kernel0_0", "attention"),
    ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<CollectiveMainloop>>>", "attention"),
    ("void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<Params>(Params)", "attention"),
    ("kernel_unified_attention", "attention"),
    ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<(PosEncodingMode)0, 2u>(Params)", "attention"),
    ("_fwd_grouped_kernel_stage1", "attention"),
    ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(__nv_bfloat16 const*)", "KV/indexer"),
    ("void vllm::concat_and_cache_mla_kernel<__nv_bfloat16>(__nv_bfloat16 const*)", "KV/indexer"),
    ("void vllm::indexer_k_quant_and_cache_kernel<float>(float const*)", "KV/indexer"),
    ("void deep_gemm::sm90_fp8_paged_mqa_logits<64u, 128u>(unsigned int)", "KV/indexer"),
    ("_fused_kv_compress_norm_rope_insert_sparse_attn", "KV/indexer"),
    ("_compute_global_topk_indices_and_lens_kernel", "KV/indexer"),
    ("_compute_slot_mappings_kernel", "KV/indexer"),
    ("void process_input_kernel<Config, TuningConfig, (ProcessInputQuantizationPhase)0>(void const*)", "act+quant"),
    ("_per_token_group_quant_fp8", "act+quant"),
    ("_silu_mul_per_token_group_quant_fp8_colmajor", "act+quant"),
    ("void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>, true>(int)", "act+quant"),
    (native("vectorized_elementwise_kernel", "float8_copy_kernel_cuda(at::TensorIteratorBase&)"), "act+quant"),
    (native("elementwise_kernel", "(anonymous namespace)::silu_kernel(at::TensorIteratorBase&)"), "act+quant"),
    (native("vectorized_elementwise_kernel", "CUDAFunctor_add<c10::BFloat16>"), "norm/elementwise"),
    (native("reduce_kernel", "ReduceOp<float, at::native::MeanOps<float, float, float, float>>"), "norm/elementwise"),
    (native("reduce_kernel", "ReduceOp<c10::BFloat16, at::native::ArgMaxOps<float>>"), "sampling"),
    (native("sbtopk::gatherTopK", "TensorInfo<float const, unsigned int>"), "norm/elementwise"),
    ("void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*)", "norm/elementwise"),
    ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norm/elementwise"),
    ("mhc_pre_big_fuse_tilelang_kernel", "norm/elementwise"),
    ("void vllm::moe::moe_align_block_size_kernel<int>(int const*)", "norm/elementwise"),
    ("_gumbel_sample_kernel", "sampling"),
    ("_topk_topp_kernel", "sampling"),
    ("Memcpy DtoH (Device -> Pinned)", "copies"),
    ("Memset (Device)", "copies"),
    # vLLM 0.26 and DeepSeek-V4-Flash on an H200: the grouped output projection, a batch of dense products …
    ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<8u, 128u, (deep_gemm::GemmType)4, cutlass::bfloat16_t>(float*)",
     "dense GEMM"),
    # … what stores the latent KV and its compressed form, and prepares it …
    ("void vllm::deepseek_v4_fused_ops::fusedDeepseekV4QNormRopeKVRopeQuantInsertKernel<c10::BFloat16, 64>(int)",
     "KV/indexer"),
    ("kernel_cutlass_kernel_vllmmodelsdeepseek_v4nvidiaopssparse_attn_compress_cutedslSparseAttnCompressC128Block8",
     "KV/indexer"),
    ("_save_partial_states_kernel", "KV/indexer"),
    ("_compute_swa_indices_and_lens_kernel", "KV/indexer"),
    ("_build_c128a_topk_metadata_kernel", "KV/indexer"),
    # … FlashMLA's plan of its own work …
    ("smxx::decode::get_mla_metadata_kernel(GetDecodeSchedMetaParams)", "attention"),
    # … the sampler, and the model runner's own bookkeeping.
    ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>(float*, float const*, int)",
     "sampling"),
    ("_post_update_kernel", "sampling"),
    ("_prepare_pos_seq_lens_kernel", "KV/indexer"),
    ("_apply_write_kernel", "KV/indexer"),
    ("_who_knows", "unmatched"),
])
def test_the_shipped_table_puts_kernels_where_they_belong(kernel: str, bucket: str) -> None:
    table = buckets.load()
    assert (*table.names, "unmatched")[table.place(kernel)] == bucket


def test_the_shipped_table_has_the_buckets_that_the_tool_promises() -> None:
    table = buckets.load()
    assert set(table.names) == {"MoE GEMM", "dense GEMM", "attention", "KV/indexer", "comms", "act+quant",
                                "norm/elementwise", "sampling", "copies"}
    assert {name for name, behind in zip(table.names, table.background, strict=True) if behind} == {"comms", "copies"}


def test_a_users_patterns_are_tried_first_and_a_bucket_of_the_same_name_is_added_to(write: Write) -> None:
    table = buckets.load(write("own.yaml", """\
buckets:
  - name: my experts
    kernels: ["^fused_moe_kernel$"]
  - name: comms
    kernels: ["^_who_knows$", "NVJET"]
    background: false
"""))
    names = (*table.names, "unmatched")
    assert names[table.place("fused_moe_kernel")] == "my experts"
    assert names[table.place("fused_moe_kernel_gptq_awq")] == "MoE GEMM"
    assert names[table.place("_who_knows")] == names[table.place("nvjet_x")] == names[table.place("nccl")] == "comms"
    assert table.names[:-1] == buckets.load().names
    assert not table.background[table.names.index("comms")]
    assert table.background[table.names.index("copies")]


@pytest.mark.parametrize(("text", "complaint"), [
    ("buckets: [{name: a, kernels: ['(']}]", r"own\.yaml: a: '\(' is no regular expression"),
    ("buckets: [{name: a, kernels: ['k{99999999999999999999}']}]", "is no regular expression"),
    (f"buckets: [{{name: a, kernels: ['{'(' * 5000}{')' * 5000}']}}]", "is no regular expression"),
    ("buckets: [{name: '', kernels: [x]}]", "'' is no name that can be shown"),
    ('buckets: [{name: "a\\e[31m", kernels: [x]}]', "is no name that can be shown"),
    ("buckets: [{name: a, kernels: [x]}, {name: a, kernels: [y]}]", "a: stands twice in one file"),
    ("buckets: [{name: idle, kernels: [x]}]", "idle: is the name of what is in no bucket"),
    ("buckets: [{name: unmatched, kernels: [x]}]", "unmatched: is the name of what is in no bucket"),
    ("buckets: [{name: a, kernel: [x]}]", "has an unknown key"),
    ("buckets: [{name: a}]", "lacks the required key"),
    ("a: [x]", "has an unknown key"),
    ("", "lacks the required key"),
])
def test_a_table_that_cannot_be_meant_is_refused(text: str, complaint: str, write: Write) -> None:
    with pytest.raises(UsageError, match=complaint):
        buckets.load(write("own.yaml", text))
    with pytest.raises(UsageError, match="cannot be read"):
        buckets.load(Path("nowhere.yaml"))
