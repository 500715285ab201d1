"""Kernels in plain PyTorch on the CPU, right and wrong ones, through the kernel check: prints a verdict for each."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isambard_serve import kernelcheck
from isambard_serve.kernelbackends import Activations, Kernel, Routing, Weights, align


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


def main() -> None:
    """One JSON object: name → whether it passed, and its errors; and how rows are aligned."""
    shape = kernelcheck.Shape(experts=8, ranks=2, top_k=2, hidden=512, intermediate=256)
    verdicts = {}
    for backend in (Plain("right"), Plain("per token", 0), Plain("bf16", None), Plain("drops the scales"),
                    Plain("skips an expert"), Plain("missing")):
        result = kernelcheck.check(torch, backend, shape, [8, 64], device="cpu", timing=False)
        verdicts[backend.name] = {"passed": result.passed, "why": result.why,
                                  "errors": [batch.error for batch in result.batches]}
    ids = torch.tensor([[4, 5], [0, 4], [0, 7], [0, 7], [2, 3]])
    aligned = {name: tensor.tolist() for name, tensor in align(torch, Routing(ids, 2, 5), experts=4, tile=2).items()}
    print(json.dumps({"verdicts": verdicts, "aligned": aligned}))


if __name__ == "__main__":
    main()
