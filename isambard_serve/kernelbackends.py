"""The experts' kernels that can be checked, behind one face. Each is the package that the engine itself calls."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Weights:
    """One product's weights: fp4 (e2m1) codes, two a byte, the lower half first, and an e8m0 exponent for each 32.

    Attributes:
        packed: (experts, n, k / 2) bytes.
        scales: (experts, n, k / 32) bytes: 2^(byte − 127).
    """

    n: int
    k: int
    packed: Any
    scales: Any


@dataclass(frozen=True)
class Activations:
    """Rows to be multiplied, as a kernel gets them.

    Attributes:
        values: (rows, k), in bf16 or fp8 (e4m3).
        scales: (rows, k / group) in fp32; None with bf16.
    """

    values: Any
    scales: Any | None


@dataclass(frozen=True)
class Routing:
    """Which rows meet which experts.

    Attributes:
        ids: (tokens, top_k) experts, over all ranks; this rank's are the first.
        choices: rows of the output for each row of the input: top_k for w13, 1 for w2, whose rows are spread out
            already.
        rows: how many outputs are this rank's, as the engine estimates it from the batch.
    """

    ids: Any
    choices: int
    rows: int


class Kernel(Protocol):
    """One product, compiled."""

    def __call__(self, activations: Activations, routing: Routing, out: Any) -> Callable[[], object]:
        """What enqueues it on the current stream: it writes ``out``, (tokens × top_k, n) in bf16, where the expert is
        this rank's.
        """


class Backend(Protocol):
    """A way to compute the experts' products.

    Attributes:
        group: elements that share a scale of the activations (0: all of a row); None: activations stay bf16.
    """

    name: str
    arithmetic: str
    group: int | None

    def version(self) -> str | None:
        """The version of the package that brings it; None where it is not installed."""

    def prepare(self, torch: Any, weights: Weights, rows: Sequence[int]) -> Kernel:
        """The product with ``weights``, compiled for these numbers of rows.

        Raises:
            ImportError: its package is not here.
        """


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class Humming:
    """humming-kernels' indexed product, called as vLLM calls it (model_executor/layers/fused_moe/experts/
    fused_humming_moe.py), but for the activations' scales: they are given, so that the reference has the same ones.

    Args:
        input_quant: ``VLLM_HUMMING_INPUT_QUANT_CONFIG``; None keeps the activations in bf16.
    """

    name = "humming"

    def __init__(self, input_quant: Mapping[str, Any] | None) -> None:
        self._input_quant = dict(input_quant) if input_quant else None
        self.group = int(self._input_quant.get("input_scale_group_size", 0)) if self._input_quant else None
        self.arithmetic = "W4A16" if self.group is None else f"W4A8, scales per {self.group or 'token'}"

    def version(self) -> str | None:
        """Of humming-kernels."""
        return _version("humming-kernels")

    def prepare(self, torch: Any, weights: Weights, rows: Sequence[int]) -> Kernel:
        """The layer, with the tiles that its heuristics choose for ``rows``."""
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config

        layer = HummingLayer(
            shape_n=weights.n, shape_k=weights.k, num_experts=len(weights.packed), torch_dtype=torch.bfloat16,
            weight_config={"b_dtype": "float4e2m1", "bs_dtype": "float8e8m0", "weight_scale_group_size": 32},
            input_config=dict(self._input_quant) if self._input_quant else None,
        ).cuda()
        layer.load_from_tensors({"weight": weights.packed.view(torch.int32),
                                 "weight_scale": weights.scales.view(torch.float8_e8m0fnu)})
        layer.transform()
        table = get_heuristics_config(layer.humming_metas[""], gemm_type="indexed")
        # humming's launcher looks one row up before it looks for those it is given.
        tiles = [entry for entry in table if any(entry[0] < count <= entry[1] for count in (1, *rows))]
        compute = json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"})
        tuning = json.dumps(tiles)

        def kernel(activations: Activations, routing: Routing, out: Any) -> Callable[[], object]:
            tile = next(entry[2]["block_shape"][0] for entry in tiles if entry[0] < routing.rows <= entry[1])
            aligned = align(torch, routing, len(weights.packed), tile)
            return lambda: layer(
                activations.values, input_scale=activations.scales, outputs=out, **aligned, top_k=routing.choices,
                valid_shape_m=routing.rows, compute_config=compute, tuning_config=tuning)

        return kernel


class Marlin:
    """vLLM's own Marlin product, called as vLLM calls it (``fused_marlin_moe`` in model_executor/layers/fused_moe/
    experts/marlin_moe.py; weights as quantization/utils/marlin_utils_fp4.py repacks them). Activations stay in bf16.
    """

    name = "marlin"
    arithmetic = "W4A16"
    group: int | None = None

    def version(self) -> str | None:
        """Of vLLM."""
        return _version("vllm")

    def prepare(self, torch: Any, weights: Weights, rows: Sequence[int]) -> Kernel:  # noqa: ARG002 - for any
        """The repacked weights; the kernels come compiled, for an older GPU, and the driver compiles them again."""
        from vllm import _custom_ops as ops
        from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4
        from vllm.scalar_type import scalar_types

        device, experts = weights.packed.device, len(weights.packed)
        size = {"size_n": weights.n, "size_k": weights.k}
        order = torch.empty(0, dtype=torch.int32, device=device)    # as they stand
        packed = torch.stack([
            _called(ops.gptq_marlin_repack, b_q_weight=codes.view(torch.int32).T.contiguous(), perm=order, num_bits=4,
                    **size) for codes in weights.packed])
        scales = torch.stack([
            marlin_utils_fp4.mxfp4_marlin_process_scales(marlin_utils.marlin_permute_scales(
                s=exponents.view(torch.float8_e8m0fnu).to(torch.bfloat16).T, group_size=32, **size))
            for exponents in weights.scales])
        workspace = marlin_utils.marlin_make_workspace_new(device, 4)

        def kernel(activations: Activations, routing: Routing, out: Any) -> Callable[[], object]:
            tile = next((tile for tile in (8, 16, 32, 48) if routing.rows / experts / tile < 0.9), 64)
            aligned = align(torch, routing, experts, tile)
            shares = torch.ones(routing.ids.numel(), dtype=torch.float32, device=device)
            return lambda: _called(
                ops.moe_wna16_marlin_gemm, input=activations.values, output=out, b_qweight=packed, b_bias=None,
                b_scales=scales, a_scales=None, global_scale=None, b_qzeros=None, g_idx=None, perm=None,
                workspace=workspace, sorted_token_ids=aligned["sorted_ids"], expert_ids=aligned["expert_ids"],
                num_tokens_past_padded=aligned["num_tokens_padded"], topk_weights=shares, moe_block_size=tile,
                top_k=routing.choices, mul_topk_weights=False, b_q_type=scalar_types.float4_e2m1f,
                size_m=len(activations.values), is_k_full=True, use_atomic_add=False, use_fp32_reduce=True,
                is_zp_float=False, **size)

        return kernel


def _called(function: Callable[..., Any], **arguments: Any) -> Any:
    """``function`` with those of ``arguments`` that it takes: vLLM 0.32 has dropped ``perm``, ``g_idx`` and
    ``is_k_full``, which in 0.26 stand for an order of the weights that these do not have.
    """
    taken = inspect.signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in taken})


def align(torch: Any, routing: Routing, experts: int, tile: int) -> dict[str, Any]:
    """The rows of each of the first ``experts`` side by side, filled up to whole tiles with a number that is no row.

    As vLLM's ``moe_align_block_size`` gives them when it ignores other ranks' experts.
    """
    flat = routing.ids.flatten()
    sorted_ids, expert_ids = [], []
    for expert in range(experts):
        rows = (flat == expert).nonzero().flatten()
        blocks = -(-len(rows) // tile)
        sorted_ids.append(torch.nn.functional.pad(rows, (0, blocks * tile - len(rows)), value=flat.numel()))
        expert_ids += [expert] * blocks
    in_order = torch.cat(sorted_ids).to(torch.int32)
    return {
        "sorted_ids": in_order,
        "expert_ids": torch.tensor(expert_ids, dtype=torch.int32, device=flat.device),
        "num_tokens_padded": torch.tensor([len(in_order)], dtype=torch.int32, device=flat.device),
    }


BACKENDS: dict[str, Callable[[Mapping[str, Any] | None], list[Backend]]] = {
    "humming": lambda input_quant: [Humming(input_quant), Humming(None), Marlin()],
    "marlin": lambda input_quant: [Marlin(), Humming(input_quant)],
}
"""What a recipe can name, and what is checked for it: first itself, then what it is compared with."""
