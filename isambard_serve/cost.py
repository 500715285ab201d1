"""What a recipe's points are expected to reach and to cost, before anything is run.

A point's requests come at once, have all the same length, and so run in waves: prompts first, as many tokens a step
as the engine takes, then one token each a step. Those that find no room in the KV cache wait for the next wave.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Literal

from isambard_serve import roofline
from isambard_serve.ceilings import Expected
from isambard_serve.kvpages import Pages, pages
from isambard_serve.modelconfig import BF16, ModelConfig
from isambard_serve.recipe import Recipe, seconds
from isambard_serve.records import Record
from isambard_serve.roofline import Rates, Shape, Step
from isambard_serve.search import NEAR
from isambard_serve.site import Site

GIB = 2**30

WORKSPACE_BYTES = 3.33 * GIB
"""What a GPU needs besides weights and KV cache: 2.78 GiB at the peak of a step of 8,192 tokens, 0.19 outside
PyTorch, 0.36 of CUDA graphs, as vLLM 0.26 logged for DeepSeek-V4-Flash's layers on an H200."""

_WORKSPACE_TOKENS = 8192

SEARCH = 2
"""What a search for the knee takes besides the point that is reported, in points: another beside it, and the scouts,
which together cost as much as one (``search``)."""

HOST_STEP_S = 1e-3
"""The fullest decode step below which nothing is foretold: the host takes as long to schedule and launch a step, and
that is not reckoned (a 1.9 ms step of a CUDA graph on an H200 leaves 4 % of it idle, the same step launched kernel
by kernel 87 %: docs/samples)."""

STEPS_IN_FLIGHT = 2
"""Steps whose pages are not given back yet: vLLM schedules the next before the last has ended (``config/vllm.py``:
``max_in_flight_tokens``)."""


class PointForecast(Record, frozen=True):
    """What one point is expected to reach. ``running``: sequences at once, where the KV cache holds no more.

    ``prefill_share``: of the time. ``buckets``: shares of the decode step's time.
    """

    concurrency: int
    running: int
    output_tok_s: float
    duration_s: float
    prefill_share: float
    buckets: dict[str, float]


class Forecast(Record, frozen=True):
    """What a recipe is expected to reach and cost at a site.

    ``knee``: the smallest concurrency within 2 % of the best throughput, which is ``output_tok_s`` or a little more.
    ``most``: sequences that run at once, more of which the KV cache does not hold (``most_by`` "kv"), or the engine
    does not take (``max-num-seqs``). ``bound_by``: the bucket that takes most of the largest point's decode steps.
    ``node_hours``: of the serve job, from the usual load time to the last point.
    """

    output_tok_s: float
    knee: int
    most: int
    most_by: Literal["kv", "max-num-seqs"]
    bound_by: str
    critical_batch: float | None
    kv_bytes: float
    weight_bytes: float
    node_hours: float
    points: tuple[PointForecast, ...]


@dataclass(frozen=True)
class Setting:
    """A model, as a recipe lays it out on a site's GPUs."""

    model: ModelConfig
    shape: Shape
    rates: Rates
    pages: Pages
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    isl: int
    osl: int

    @property
    def weight_bytes(self) -> float:
        """Weights of one GPU."""
        return self.model.weight_bytes(self.shape.tensor_parallel, self.shape.gpus)

    @property
    def workspace_bytes(self) -> float:
        """What is neither weights nor KV cache: it grows with a step's tokens, of which the experts see all ranks'."""
        experts = self.model.experts
        gathered = 0.0 if experts is None else (
            (self.shape.data_parallel - 1) * self.max_num_batched_tokens * experts.top_k
            * (2 * self.model.hidden + experts.intermediate) * BF16)
        return WORKSPACE_BYTES * self.max_num_batched_tokens / _WORKSPACE_TOKENS + gathered

    @property
    def kv_bytes(self) -> float:
        """Memory of one GPU that is left for the KV cache; 0 if the weights alone do not fit."""
        held = self.rates.memory_bytes * self.gpu_memory_utilization
        return max(0.0, held - self.weight_bytes - self.workspace_bytes)

    @property
    def kv_sequences(self) -> int:
        """Sequences of full length that the KV caches of all ranks hold, with the prompts in flight beside them."""
        prompts = max(1, self.max_num_batched_tokens // self.isl)
        passing = STEPS_IN_FLIGHT * prompts * max(0.0, self.pages.prefilling(self.isl) - self.pages.held(self.isl))
        return self.shape.data_parallel * max(0, int(
            (self.pages.blocks(self.kv_bytes) - passing) / self.pages.held(self.isl + self.osl)))

    @property
    def sequences(self) -> int:
        """Sequences that can run at once."""
        return min(self.kv_sequences, self.max_num_seqs * self.shape.data_parallel)

    def decode_s(self, running: float) -> dict[str, float]:
        """The mean decode step of ``running`` sequences, by bucket."""
        return roofline.expected(self.model, self.shape, self.rates,
                                 Step(decoding=running, context=self.isl + self.osl / 2))

    def least_ms(self, concurrency: int) -> dict[str, float]:
        """The least that each bucket of the mean decode step can take, where so many requests are under way."""
        step = Step(decoding=min(concurrency, self.sequences), context=self.isl + self.osl / 2)
        floors = roofline.floors(self.model, self.shape, self.rates, step)
        return {name: 1000 * floor for name, floor in floors.items() if floor}

    def prefill_s(self, sequences: float) -> float:
        """The prompts of ``sequences``, in full steps."""
        step = self.max_num_batched_tokens * self.shape.data_parallel
        tokens = sequences * self.isl
        times = roofline.expected(self.model, self.shape, self.rates,
                                  Step(prefill=min(step, tokens), prefill_context=self.isl / 2))
        return sum(times.values()) * max(1.0, tokens / step)

    def point(self, concurrency: int, prompts: int) -> PointForecast:
        """What ``prompts`` requests reach, ``concurrency`` at a time."""
        running = min(concurrency, self.sequences)
        waves = [(running, prompts // running), (prompts % running, 1 if prompts % running else 0)]
        prefill_s = sum(count * self.prefill_s(wave) for wave, count in waves if count)
        decode_s = sum(count * self.osl * sum(self.decode_s(wave).values()) for wave, count in waves if count)
        step = self.decode_s(running)
        total = sum(step.values())
        duration_s = prefill_s + decode_s
        return PointForecast(
            concurrency=concurrency, running=running, output_tok_s=prompts * self.osl / duration_s,
            duration_s=duration_s, prefill_share=prefill_s / duration_s,
            buckets={name: value / total for name, value in step.items() if value})

    def knee(self) -> int:
        """The smallest concurrency within :data:`search.NEAR` of the best: more at once is never slower here."""
        def reached(concurrency: int) -> float:
            return self.point(concurrency, concurrency).output_tok_s

        every = range(1, self.sequences + 1)
        return every[bisect.bisect_left(every, (1 - NEAR) * reached(self.sequences), key=reached)]


def rates(expected: Expected, gpus: int, gpu_gib: float | None) -> Rates | None:
    """A site's ceilings as the roofline wants them; None if it does not know them all.

    Where nothing is said of fp8, it is twice bf16: the chip's tensor cores do twice as much in half the bits.
    """
    if None in (expected.bf16_tflop_s, expected.copy_tb_s, expected.peer_gb_s, gpu_gib):
        return None
    bf16, copy, peer = (float(value or 0) for value in (
        expected.bf16_tflop_s, expected.copy_tb_s, expected.peer_gb_s))
    return Rates(bf16 * 1e12, float(expected.fp8_tflop_s or 2 * bf16) * 1e12, copy * 1e12,
                 max(1, gpus - 1) * peer * 1e9, float(gpu_gib or 0) * GIB)


def setting(recipe: Recipe, site: Site, model: ModelConfig) -> Setting | None:
    """The recipe at the site; None if the site does not say what its GPUs can do.

    What the recipe does not say is as vLLM has it (``engine/arg_utils.py``, ``config/cache.py``).
    """
    known = rates(site.ceilings, site.node.gpus, site.node.gpu_gib)
    if known is None:
        return None
    args = recipe.engine.args
    number = recipe.engine.number
    tensor_parallel = int(number("tensor-parallel-size", 1))
    backend = str(args.get("moe-backend", "auto")).lower()
    shape = Shape(tensor_parallel, int(number("data-parallel-size", 1)), backend)
    block = int(number("block-size", 256 if model.family == "deepseek_v4" else 16))
    scale = 0.5 if "fp8" in str(args.get("kv-cache-dtype", "")) else 1.0
    return Setting(
        model=model, shape=shape, rates=known, pages=pages(model, tensor_parallel, block, scale),
        max_num_seqs=int(number("max-num-seqs", 1024)),
        max_num_batched_tokens=int(number("max-num-batched-tokens", 8192)),
        gpu_memory_utilization=number("gpu-memory-utilization", 0.92),
        isl=recipe.bench.isl, osl=recipe.bench.osl)


def forecast(recipe: Recipe, site: Site, model: ModelConfig | None) -> Forecast | None:
    """What ``recipe`` is expected to reach and to cost; None where model or site are not known, or it does not fit.

    None too where the model is so small that the GPU's work is not what a step's time consists of.
    """
    if model is None:
        return None
    known = setting(recipe, site, model)
    if known is None or known.sequences == 0 or sum(known.decode_s(known.sequences).values()) < HOST_STEP_S:
        return None
    bench, knee = recipe.bench, known.knee()
    asked = (bench.profile_at,) if bench.profile_at else bench.concurrency
    searched = asked == "saturate"
    listed = (knee,) if asked == "saturate" else asked
    points = [known.point(each, each * bench.prompts_per_concurrency) for each in listed]
    best = max(points, key=lambda point: point.output_tok_s)
    measured_s = sum(point.duration_s for point in points) * (bench.repeats + SEARCH if searched else bench.repeats)
    busy_s = seconds(recipe.resources.load_time, recipe.name) + measured_s
    return Forecast(
        output_tok_s=best.output_tok_s, knee=knee, most=known.sequences,
        most_by="kv" if known.kv_sequences <= known.sequences else "max-num-seqs",
        bound_by=roofline.slowest(points[-1].buckets),
        critical_batch=roofline.critical_batch(model, known.shape, known.rates),
        kv_bytes=known.kv_bytes, weight_bytes=known.weight_bytes,
        node_hours=busy_s / 3600 * recipe.resources.gpus / site.node.gpus, points=tuple(points))


def words(found: Forecast) -> str:
    """``found`` in a line for people."""
    limit = "KV cache full" if found.most_by == "kv" else "max-num-seqs"
    last = found.points[-1]
    return (f"expected: {found.output_tok_s:,.0f} output tok/s, knee at concurrency {found.knee:,}; {found.most:,} run "
            f"at once ({limit}); {found.bound_by} takes most of a decode step ({last.buckets[found.bound_by]:.0%}), "
            f"prompts {last.prefill_share:.0%} of the time; {found.node_hours * 60:.0f} node-minutes in all")
