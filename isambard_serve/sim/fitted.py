"""How long one step of the engine takes and how many tokens its KV cache holds: a few constants, fitted.

The model is the least that tells the published story of DeepSeek-V4-Flash on one node of four GH200 (random
1024/1024 tokens, prompts = 2 × concurrency): 5,856 output tok/s for TP4 with its KV cache full at concurrency 2048,
12,802 for DP4 at 2752, and about 40 % more with Humming's expert kernels. **Constants marked "fitted" were chosen so
that a simulated run gives these three figures; they are not measurements, and predict nothing about other shapes.**

A step costs a fixed time, plus for each token the experts' work (shared by all GPUs, whatever the layout), plus for
each token of the busiest DP rank what a rank computes alone. With TP one "rank" holds all tokens, since the single
latent KV head of this model is copied to every GPU; with DP it holds its share. That difference is the story.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 2**30
_FITTED_GPUS = 4


@dataclass(frozen=True)
class Model:
    """What a model costs.

    Attributes:
        name: how the log calls its architecture.
        fixed_s: seconds of a step that do not depend on what is in it: launches, latencies, reading weights.
        expert_token_s: MoE backend → seconds per token of the step on four GPUs; empty for a dense model.
        rank_token_s: seconds per token of the busiest DP rank.
        context_token_s: seconds per token of context on the busiest DP rank.
        max_model_len: tokens that a sequence may have if ``--max-model-len`` does not say.
        block_size: tokens of a KV block if ``--block-size`` does not say.
        kv_bytes_per_token: bytes of KV cache per token of context, on each GPU that holds it.
        expert_gib: weights that all GPUs share, in GiB.
        dense_gib: weights that each DP rank holds (its TP group shares them), in GiB.
        workspace_gib: memory of each GPU that is neither weights nor KV cache, in GiB.
        workspace_per_rank_gib: more of it for each DP rank but the first.
    """

    name: str
    fixed_s: float
    expert_token_s: Mapping[str, float]
    rank_token_s: float
    context_token_s: float
    max_model_len: int
    block_size: int
    kv_bytes_per_token: float
    expert_gib: float
    dense_gib: float
    workspace_gib: float
    workspace_per_rank_gib: float


DEEPSEEK_V4_FLASH = Model(
    name="DeepseekV4ForCausalLM",
    fixed_s=0.035,                                              # fitted
    expert_token_s={"marlin": 18.4e-6, "humming": 7.3e-6},      # fitted
    rank_token_s=53.7e-6,                                       # fitted
    context_token_s=12_800 / 4e12,                              # kv_bytes_per_token at the datasheet's 4 TB/s of HBM
    max_model_len=1_048_576,                                    # the model's config: max_position_embeddings
    block_size=256,                                             # vLLM accepts no other for this model
    kv_bytes_per_token=12_800,                                  # fitted
    # The model's config: 43 layers × 256 experts × 3 × 4096 × 2048 weights of 4 bits, one 8-bit scale for 32.
    expert_gib=43 * 256 * 3 * 4096 * 2048 * (0.5 + 1 / 32) / GIB,
    dense_gib=7.0,                                              # 284 B parameters less the experts' 277 B, in fp8
    workspace_gib=4.0,                                          # fitted
    # Fitted: by its weights alone, DP4 would fill its KV cache at nearly three times the published concurrency.
    workspace_per_rank_gib=9.7,
)
"""DeepSeek-V4-Flash on GH200."""

GENERIC = Model(name="GenericForCausalLM", fixed_s=0.004, expert_token_s={}, rank_token_s=20e-6, context_token_s=1e-9,
                max_model_len=32_768, block_size=16, kv_bytes_per_token=65_536, expert_gib=0.0, dense_gib=1.0,
                workspace_gib=4.0, workspace_per_rank_gib=0.0)
"""Any other model: small, quick, and nobody's. A round number each."""

GPU_GIB = 96.0
"""HBM of one GH200 in GiB, by the published description of the node."""


@dataclass(frozen=True)
class Shape:
    """A model laid out over GPUs: ``tensor_parallel`` × ``data_parallel`` of them.

    Attributes:
        moe_backend: whose expert kernels run, in lower case; one that the model does not know costs as its first.
        gpu_memory_utilization: the share of each GPU's memory that the engine may take, 0 to 1.
    """

    model: Model
    tensor_parallel: int = 1
    data_parallel: int = 1
    moe_backend: str = ""
    gpu_memory_utilization: float = 0.92

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return self.tensor_parallel * self.data_parallel


def model_for(name: str) -> Model:
    """The model that ``name``, a path or a hub's name, stands for."""
    return DEEPSEEK_V4_FLASH if "deepseek-v4" in name.lower() else GENERIC


def step_time_s(shape: Shape, batch: int, busiest: int, context: int) -> float:
    """Seconds that one step takes.

    Args:
        batch: tokens in the step over all DP ranks, decoded and prefilled alike.
        busiest: tokens on the DP rank that has most.
        context: tokens of KV cache that the fullest rank's decoding sequences read.
    """
    model = shape.model
    costs = model.expert_token_s
    expert_s = costs.get(shape.moe_backend, next(iter(costs.values()), 0.0)) * _FITTED_GPUS / shape.gpus
    return model.fixed_s + batch * expert_s + busiest * model.rank_token_s + context * model.context_token_s


def kv_tokens(shape: Shape) -> int:
    """Tokens that the KV cache of one DP rank holds; 0 if the weights alone do not fit."""
    model = shape.model
    free_gib = (GPU_GIB * shape.gpu_memory_utilization - model.expert_gib / shape.gpus
                - model.dense_gib / shape.tensor_parallel
                - model.workspace_gib - model.workspace_per_rank_gib * (shape.data_parallel - 1))
    return max(0, int(free_gib * GIB / model.kv_bytes_per_token))
