"""Kernels in plain PyTorch on the CPU, right and wrong ones, through the kernel check: prints a verdict for each."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from isambard_serve import kernelcheck
from isambard_serve.kernelbackends import Activations, Kernel, Marlin, Routing, Weights, align


@dataclass
class Plain:
    """A product in fp32, with one fault of choice."""

    name: str
    group: int | None = 128
    arithmetic: str = "W4A8"

    def version(self) -> str | None:
        """It is no package."""

    def prepare(self, torch: Any, weights: Weights, rows: Sequence[int]) -> Kernel:
        """Nothing to compile."""
        if self.name == "missing":
            raise ImportError("no module named missing")

        def kernel(activations: Activations, routing: Routing, out: Any) -> Callable[[], object]:
            def launch() -> None:
                values = activations.values.float()
                if activations.scales is not None and self.name != "drops the scales":
                    groups = values.unflatten(1, (activations.scales.shape[1], -1))
                    values = (groups * activations.scales[..., None]).flatten(1)
                flat = routing.ids.flatten()
                for expert in range(len(weights.packed) - (self.name == "skips an expert")):
                    chosen = (flat == expert).nonzero().flatten()
                    matrix = kernelcheck.dequantised(torch, weights, expert).float()
                    out[chosen] = (values[chosen // routing.choices] @ matrix.T).bfloat16()
            return launch

        return kernel


def marlins_call(shape: kernelcheck.Shape) -> dict[str, Any]:
    """What Marlin's product is called with, by this vLLM's signatures, which reject what they do not know."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    with mock.patch.object(ops, "gptq_marlin_repack", autospec=True) as repack, \
            mock.patch.object(ops, "moe_wna16_marlin_gemm", autospec=True) as product, \
            mock.patch.object(marlin_utils, "marlin_make_workspace_new", autospec=True):
        repack.side_effect = lambda b_q_weight, **_: b_q_weight
        weights = kernelcheck.random_weights(torch, torch.Generator("cpu"), shape.local, 512, 256)
        kernel = Marlin().prepare(torch, weights, [5])
        activations, _ = kernelcheck.random_activations(torch, torch.Generator("cpu"), 2, 256, None)
        kernel(activations, Routing(torch.tensor([[0, 4], [0, 1]]), 2, 5), torch.empty(4, 512))()
    called = product.call_args.kwargs
    return {name: list(value.shape) if isinstance(value, torch.Tensor) else value for name, value in called.items()
            if name in ("b_qweight", "b_scales", "sorted_token_ids", "moe_block_size", "top_k", "size_m", "size_n",
                        "size_k")}


def main() -> None:
    """One JSON object: name → whether it passed, and its errors; how rows are aligned; and Marlin's call."""
    shape = kernelcheck.Shape(experts=8, ranks=2, top_k=2, hidden=512, intermediate=256)
    verdicts = {}
    for backend in (Plain("right"), Plain("per token", 0), Plain("bf16", None), Plain("drops the scales"),
                    Plain("skips an expert"), Plain("missing"), Marlin()):
        result = kernelcheck.check(torch, backend, shape, [8, 64], device="cpu", timing=False)
        verdicts[backend.name] = {"passed": result.passed, "why": result.why,
                                  "errors": [batch.error for batch in result.batches]}
    ids = torch.tensor([[4, 5], [0, 4], [0, 7], [0, 7], [2, 3]])
    aligned = {name: tensor.tolist() for name, tensor in align(torch, Routing(ids, 2, 5), experts=4, tile=2).items()}
    print(json.dumps({"verdicts": verdicts, "aligned": aligned, "marlin": marlins_call(shape)}))


if __name__ == "__main__":
    main()
