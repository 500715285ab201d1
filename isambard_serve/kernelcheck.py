"""Whether the experts' kernels compute what they should, and how fast: at the recipe's shapes, on this GPU.

``python -m isambard_serve.kernelcheck --out kernels.json``. A wrong kernel may be as quick, and its text reads well at
a glance: humming-kernels 0.1.10 leaves out the scales of groups of activations, and nothing complains. Here weights
are random fp4 codes, activations have 128-groups whose sizes differ by 2^±6, and the reference is computed in
float64 from the very numbers that the kernel is given. What remains is rounding to bf16, 1.7e-3; a kernel that
drops the scales is off by 0.88 at best.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from isambard_serve.errors import ServeError
from isambard_serve.kernelbackends import BACKENDS, Activations, Backend, Routing, Weights
from isambard_serve.probe import say, torch_with_gpu
from isambard_serve.records import Record
from isambard_serve.run import write_whole

THRESHOLD = 5e-3
"""The largest relative error that passes: three times that of rounding the output to bf16."""

SPREAD = 6
"""Groups of activations differ in size by 2^±SPREAD."""
GROUP = 128
"""Elements of such a group: what the model was trained with (DeepSeek-V3 report, section 3.3: 1 × 128 tiles)."""

BATCHES = (64, 256, 1024, 2048, 4096, 8192)
"""Tokens of a step over all ranks."""

TIMED_S = 0.02
REST_S = 0.3
"""How long a kernel is timed, or as long as one replay of the graph takes, and after how long a rest. A chip that is
kept busy for long comes to its power cap, and then to other clocks than the next chip's."""
_REPEATS = 20


class Shape(Record, frozen=True):
    """The experts of a mixture-of-experts layer; ``ranks`` share them evenly, and the first one is checked.

    The defaults are DeepSeek-V4-Flash's on four GPUs (its config: n_routed_experts, num_experts_per_tok,
    hidden_size, moe_intermediate_size).
    """

    experts: int = 256
    ranks: int = 4
    top_k: int = 6
    hidden: int = 4096
    intermediate: int = 2048

    @property
    def local(self) -> int:
        """Experts of one rank."""
        return self.experts // self.ranks


class GemmResult(Record, frozen=True):
    """One product of a layer: ``w13`` (gate and up) or ``w2`` (down).

    ``error`` is ‖out − reference‖ / ‖reference‖ over the rank's rows; None: it left rows unwritten, or wrote what is
    no number. ``us``: microseconds, None if it could not be timed.
    """

    gemm: str
    error: float | None
    us: float | None


class BatchResult(Record, frozen=True):
    """A layer's products for ``batch`` tokens over all ranks, of which ``rows`` token-expert pairs are this rank's."""

    batch: int
    rows: int
    gemms: tuple[GemmResult, ...]

    @property
    def error(self) -> float | None:
        """The larger error; None if any is."""
        errors = [gemm.error for gemm in self.gemms]
        return None if None in errors else max(error for error in errors if error is not None)

    @property
    def us(self) -> float | None:
        """Microseconds of all products; None if any is."""
        times = [gemm.us for gemm in self.gemms]
        return None if None in times else sum(us for us in times if us is not None)


class Result(Record, frozen=True):
    """What one backend did. ``passed`` None: it could not be run here, for the reason ``why``."""

    backend: str
    arithmetic: str
    version: str | None
    passed: bool | None
    batches: tuple[BatchResult, ...] = ()
    why: str | None = None


class KernelCheck(Record, frozen=True):
    """``kernels.json``: the backend that was asked for, and others beside it."""

    gpu: str
    torch: str
    time: float
    shape: Shape
    threshold: float
    result: Result
    beside: tuple[Result, ...]
    schema: str = "isambard-serve/kernelcheck/1"


def covers(found: KernelCheck, backend: str, input_quant: Mapping[str, Any] | None) -> bool:
    """Whether ``found`` says that such kernels passed, of whatever shape."""
    asked = BACKENDS[backend](input_quant)[0]
    return found.result.passed is True and (found.result.backend, found.result.arithmetic) == (
        asked.name, asked.arithmetic)


# e2m1: sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, section 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def random_weights(torch: Any, generator: Any, experts: int, n: int, k: int) -> Weights:
    """All codes alike likely; exponents within 2^-8 … 2^-3, the range that a checkpoint's blocks have."""
    device = generator.device
    packed = torch.randint(256, (experts, n, k // 2), generator=generator, device=device, dtype=torch.uint8)
    scales = torch.randint(119, 125, (experts, n, k // 32), generator=generator, device=device, dtype=torch.uint8)
    return Weights(n, k, packed, scales)


def dequantised(torch: Any, weights: Weights, expert: int) -> Any:
    """The weights of one expert, (n, k) in float64: exact."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float64, device=weights.packed.device)
    packed = weights.packed[expert].long()
    values = torch.stack((table[packed & 15], table[packed >> 4]), dim=-1).flatten(-2)
    return values * torch.exp2(weights.scales[expert].double() - 127).repeat_interleave(32, dim=-1)


def random_activations(torch: Any, generator: Any, rows: int, k: int, group: int | None) -> tuple[Activations, Any]:
    """Rows whose 128-groups differ in size by orders of magnitude, and their exact values in float64."""
    device = generator.device
    sizes = torch.randint(-SPREAD, SPREAD + 1, (rows, k // GROUP, 1), generator=generator, device=device)
    values = torch.randn((rows, k // GROUP, GROUP), generator=generator, device=device) * torch.exp2(sizes.float())
    values = values.flatten(1)
    if group is None:
        rounded = values.to(torch.bfloat16)
        return Activations(rounded, None), rounded.double()
    groups = values.unflatten(1, (-1, group or k))
    scales = groups.abs().amax(dim=-1) / torch.finfo(torch.float8_e4m3fn).max
    codes = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    exact = (codes.double() * scales.double()[..., None]).flatten(1)
    return Activations(codes.flatten(1), scales.contiguous()), exact


def relative_error(torch: Any, weights: Weights, exact: Any, routing: Routing, out: Any) -> float | None:
    """‖out − reference‖ / ‖reference‖ over this rank's rows; None if any of them is not finite.

    Raises:
        ValueError: no row is this rank's.
    """
    flat = routing.ids.flatten()
    missed, size = 0.0, 0.0
    for expert in range(len(weights.packed)):
        rows = (flat == expert).nonzero().flatten()
        if not len(rows):
            continue
        reference = exact[rows // routing.choices] @ dequantised(torch, weights, expert).T
        missed += float((out[rows].double() - reference).square().sum())
        size += float(reference.square().sum())
    if not size:
        raise ValueError("no row of the batch is this rank's")
    error = (missed / size) ** 0.5
    return error if error < float("inf") else None     # also when it is NaN


def timed_us(torch: Any, launch: Callable[[], object]) -> float:
    """Microseconds of one ``launch`` on the GPU, launched from a graph as an engine's steps are.

    Replays are queued one behind the other: where the host waits for each, the gap before the next is measured too.
    They begin after a rest, at the clocks that the chip has then.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_REPEATS):
            launch()
    _replayed_ms(torch, graph, 1)
    replays = math.ceil(TIMED_S * 1000 / _replayed_ms(torch, graph, 1))
    time.sleep(REST_S)
    return _replayed_ms(torch, graph, replays) * 1000 / (replays * _REPEATS)


def _replayed_ms(torch: Any, graph: Any, replays: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def check(torch: Any, backend: Backend, shape: Shape, batches: Sequence[int], *, device: str = "cuda",
          timing: bool = True) -> Result:
    """Runs ``backend`` on random numbers and judges it; what cannot be run is no verdict, and says why."""
    try:
        found = tuple(_check(torch, backend, shape, batches, device, timing))
    except (ImportError, RuntimeError, AssertionError, ValueError, TypeError, AttributeError, OSError) as error:
        why = f"{type(error).__name__}: {str(error).strip() or 'no reason given'}"
        return Result(backend=backend.name, arithmetic=backend.arithmetic, version=backend.version(), passed=None,
                      why=why[:2000])
    passed = all(batch.error is not None and batch.error < THRESHOLD for batch in found)
    return Result(backend=backend.name, arithmetic=backend.arithmetic, version=backend.version(), passed=passed,
                  batches=found)


def _check(torch: Any, backend: Backend, shape: Shape, batches: Sequence[int], device: str, timing: bool
           ) -> list[BatchResult]:
    generator = torch.Generator(device=device).manual_seed(20260)
    rows = {batch: -(-batch * shape.top_k // shape.ranks) for batch in batches}
    gemms: dict[int, list[GemmResult]] = {batch: [] for batch in batches}
    for name, n, k in (("w13", 2 * shape.intermediate, shape.hidden), ("w2", shape.hidden, shape.intermediate)):
        weights = random_weights(torch, generator, shape.local, n, k)
        kernel = backend.prepare(torch, weights, sorted(rows.values()))
        for batch in batches:
            ids = torch.rand((batch, shape.experts), generator=generator, device=device).topk(shape.top_k).indices
            choices = shape.top_k if name == "w13" else 1
            activations, exact = random_activations(torch, generator, batch * shape.top_k // choices, k, backend.group)
            routing = Routing(ids, choices, rows[batch])
            # Not a number: a row that is not written cannot pass for one that is.
            out = torch.full((batch * shape.top_k, n), float("nan"), dtype=torch.bfloat16, device=device)
            launch = kernel(activations, routing, out)
            launch()
            error = relative_error(torch, weights, exact, routing, out)
            us = round(timed_us(torch, launch), 1) if timing else None
            gemms[batch].append(GemmResult(gemm=name, error=error, us=us))
    return [BatchResult(batch=batch, rows=rows[batch], gemms=tuple(found)) for batch, found in gemms.items()]


def text(found: KernelCheck) -> str:
    """``found`` for people."""
    lines = [f"{found.gpu}, torch {found.torch}: {found.shape.local} of {found.shape.experts} experts, "
             f"top {found.shape.top_k}, hidden {found.shape.hidden}, intermediate {found.shape.intermediate}"]
    for result in (found.result, *found.beside):
        verdict = {True: "passed", False: "FAILED", None: f"not judged: {result.why}"}[result.passed]
        lines.append(f"{result.backend} {result.version or ''} {result.arithmetic}: {verdict}")
        for batch in result.batches:
            error = "not finite" if batch.error is None else f"{batch.error:.2e}"
            us = "not timed" if batch.us is None else f"{batch.us:8.0f} µs"
            lines.append(f"  {batch.batch:>6} tokens  error {error:>10}  {us}")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """``python -m isambard_serve.kernelcheck``: exit code 0 if the backend passed, 1 if not or not judged."""
    shape = Shape()
    parser = argparse.ArgumentParser(prog="isambard_serve.kernelcheck",
                                     description="Check the experts' kernels against a float64 reference.")
    parser.add_argument("--out", type=Path, default=Path("kernels.json"), help="where the record goes")
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="humming", help="what the recipe names")
    parser.add_argument("--input-quant", type=json.loads, help="activations' arithmetic, as in "
                        "VLLM_HUMMING_INPUT_QUANT_CONFIG",
                        default={"dtype": "float8e4m3", "input_scale_group_size": GROUP})
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="tokens over all ranks")
    for name in Shape.__struct_fields__:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(shape, name))
    given = parser.parse_args(words)
    shape = Shape(**{name: getattr(given, name) for name in Shape.__struct_fields__})
    try:
        torch = torch_with_gpu()
    except ServeError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    results = []
    for backend in BACKENDS[given.backend](given.input_quant):
        say(f"{backend.name} {backend.arithmetic}")
        results.append(check(torch, backend, shape, given.batches))
        torch.cuda.empty_cache()
    found = KernelCheck(gpu=torch.cuda.get_device_name(), torch=str(torch.__version__), time=time.time(), shape=shape,
                        threshold=THRESHOLD, result=results[0], beside=tuple(results[1:]))
    write_whole(given.out, msgspec.json.format(msgspec.json.encode(found), indent=2), mode=0o644)
    print(text(found))  # noqa: T201
    return 0 if found.result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
