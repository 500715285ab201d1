"""What a step of the engine must do at least, bucket by bucket, and how long that takes at a node's ceilings.

For each bucket: floating-point operations and bytes of the busiest GPU, from the model's config, the parallel shape
and what is in the step. A bucket cannot be quicker than its operations at the arithmetic's ceiling, nor than its
bytes at the memory's or the links': the greater is its *floor* (the roofline of Williams, Waterman and Patterson,
CACM 52(4), 2009). Real kernels take longer; one factor, :data:`EFFICIENCY`, says how much on the whole.

The buckets are those of ``trace``. ``copies`` and ``idle`` have no floor: nothing need be copied, and no GPU be idle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from isambard_serve.modelconfig import BF16, FP8, Attention, Matrix, ModelConfig

MOE, DENSE, ATTENTION, KV, COMMS, ACT, NORM, SAMPLING, COPIES, IDLE = BUCKETS = (
    "MoE GEMM", "dense GEMM", "attention", "KV/indexer", "comms", "act+quant", "norm/elementwise", "sampling",
    "copies", "idle")
"""What a step's time goes to."""

EFFICIENCY = 0.2673
"""Floors over real time. Fitted to one published figure, 5,856 output tok/s of tp4 at concurrency 2048, and nothing
else; docs/roofline.md says what it then predicts of the other rungs, and where that is wrong."""

HUMMING_OVER_MARLIN = ((64, 1.51), (256, 1.72), (1024, 1.9), (2048, 2.03), (4096, 3.09), (8192, 2.86))
"""How much sooner Humming's W4A8 kernels (0.1.20, activation scales in groups of 128) are done than vLLM's Marlin, by
tokens of the step over all ranks: both timed on an H200 at the shapes of DeepSeek-V4-Flash, 64 experts a rank, by
``kernelcheck`` (docs/samples/h200-kernels-humming-0.1.20.json)."""

_FP32 = 4.0


@dataclass(frozen=True)
class Rates:
    """A node's ceilings: operations and bytes per second of one GPU, and its memory.

    Attributes:
        link_byte_s: what a GPU sends to all its peers together, one direction.
    """

    bf16_flop_s: float
    fp8_flop_s: float
    hbm_byte_s: float
    link_byte_s: float
    memory_bytes: float


@dataclass(frozen=True)
class Shape:
    """A model laid out over ``tensor_parallel`` × ``data_parallel`` GPUs; they share the experts in any case."""

    tensor_parallel: int = 1
    data_parallel: int = 1
    moe_backend: str = ""

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return self.tensor_parallel * self.data_parallel


@dataclass(frozen=True)
class Step:
    """What is in one step, over all DP ranks: sequences that decode a token each, and tokens of prompts.

    Attributes:
        context: tokens behind each decoding sequence; ``prefill_context``: behind each prompt's token, on average.
    """

    decoding: float = 0.0
    context: float = 0.0
    prefill: float = 0.0
    prefill_context: float = 0.0

    @property
    def tokens(self) -> float:
        """Tokens of the step."""
        return self.decoding + self.prefill


@dataclass
class Work:
    """What one GPU does in a bucket: operations by arithmetic, bytes of its memory, bytes that it sends."""

    bf16_flop: float = 0.0
    fp8_flop: float = 0.0
    memory_bytes: float = 0.0
    link_bytes: float = 0.0

    def floor_s(self, rates: Rates) -> float:
        """The least time that it takes."""
        return max(self.bf16_flop / rates.bf16_flop_s + self.fp8_flop / rates.fp8_flop_s,
                   self.memory_bytes / rates.hbm_byte_s, self.link_bytes / rates.link_byte_s)


@dataclass(frozen=True)
class _Rank:
    """How much of a step the busiest GPU has."""

    model: ModelConfig
    shape: Shape
    step: Step
    decoding: float = field(init=False)
    prefill: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "decoding", self.step.decoding / self.shape.data_parallel)
        object.__setattr__(self, "prefill", self.step.prefill / self.shape.data_parallel)

    @property
    def tokens(self) -> float:
        return self.decoding + self.prefill


def work(model: ModelConfig, shape: Shape, step: Step) -> dict[str, Work]:
    """What the busiest GPU does in one step, by bucket."""
    rank = _Rank(model, shape, step)
    return {MOE: _moe(rank), DENSE: _dense(rank), ATTENTION: _attention(rank), KV: _indexer(rank),
            COMMS: _comms(rank), ACT: _activation(rank), NORM: _norm(rank), SAMPLING: _sampling(rank),
            COPIES: Work(), IDLE: Work()}


def floors(model: ModelConfig, shape: Shape, rates: Rates, step: Step) -> dict[str, float]:
    """The least seconds of each bucket in one step, with the kernels' own arithmetic."""
    return {name: each.floor_s(rates) for name, each in work(model, shape, step).items()}


def expected(model: ModelConfig, shape: Shape, rates: Rates, step: Step) -> dict[str, float]:
    """The seconds that each bucket is expected to take: its floor at :data:`EFFICIENCY`.

    Humming's experts are expected to take Marlin's time over what was measured between the two: how near its roof a
    kernel comes differs between them.
    """
    marlin = shape if shape.moe_backend != "humming" else Shape(shape.tensor_parallel, shape.data_parallel, "marlin")
    times = {name: floor / EFFICIENCY for name, floor in floors(model, marlin, rates, step).items()}
    if shape.moe_backend == "humming":
        times[MOE] /= humming_over_marlin(step.tokens)
    return times


def humming_over_marlin(tokens: float) -> float:
    """:data:`HUMMING_OVER_MARLIN` between its points, over the logarithm of the tokens; beyond them as at its ends."""
    points = HUMMING_OVER_MARLIN
    if tokens <= points[0][0]:
        return points[0][1]
    for (before, low), (after, high) in itertools.pairwise(points):
        if tokens <= after:
            return low + (high - low) * math.log(tokens / before) / math.log(after / before)
    return points[-1][1]


def critical_batch(model: ModelConfig, shape: Shape, rates: Rates) -> float | None:
    """Tokens of a step from which the experts are bound by arithmetic, no longer by reading weights; None: no experts.

    Published by pen and paper for this model and node: about 1,300 in bf16 (583 TFLOP/s over 4 TB/s).
    """
    if model.experts is None:
        return None
    experts = model.experts
    flop_s = rates.fp8_flop_s if _experts_in_fp8(model, shape) else rates.bf16_flop_s
    return experts.experts * experts.weight_bytes * flop_s / (2 * experts.top_k * rates.hbm_byte_s)


def _experts_in_fp8(model: ModelConfig, shape: Shape) -> bool:
    """Humming multiplies fp4 weights in fp8, Marlin in bf16; experts in fp8 are multiplied in it by whatever kernel."""
    return model.experts is not None and (shape.moe_backend == "humming" or model.experts.weight_bytes == FP8)


def _moe(rank: _Rank) -> Work:
    """2 operations a weight for each token-expert pair; the weights of those experts that are met are read once.

    A token meets ``top_k`` of the experts, any alike likely.
    """
    experts = rank.model.experts
    if experts is None:
        return Work()
    weights = 3 * rank.model.hidden * experts.intermediate * experts.layers
    flop = 2 * rank.step.tokens * experts.top_k * weights / rank.shape.gpus
    met = 1 - (1 - experts.top_k / experts.experts) ** rank.step.tokens
    read = experts.experts * weights * experts.weight_bytes * met / rank.shape.gpus
    return Work(fp8_flop=flop, memory_bytes=read) if _experts_in_fp8(rank.model, rank.shape) else Work(
        bf16_flop=flop, memory_bytes=read)


def _dense(rank: _Rank) -> Work:
    """2 operations a weight and token; every weight is read once a step."""
    total = Work()
    for matrix in rank.model.matrices:
        tokens = rank.tokens if matrix.every_token else rank.decoding
        flop = 2 * tokens * _own(matrix, rank.shape)
        if matrix.arithmetic == "fp8":
            total.fp8_flop += flop
        else:
            total.bf16_flop += flop
        total.memory_bytes += _own(matrix, rank.shape) * matrix.weight_bytes
    return total


def _own(matrix: Matrix, shape: Shape) -> float:
    """Weights of ``matrix`` on one GPU."""
    return matrix.weights / (shape.tensor_parallel if matrix.sharded else 1)


def _heads(attention: Attention, shape: Shape) -> float:
    return max(attention.heads / shape.tensor_parallel, attention.least_heads)


def _attention(rank: _Rank) -> Work:
    """2 operations for each head, entry and dimension, twice (queries with keys, weights with values).

    A decoding token reads all entries that it looks at; the tokens of a prompt read theirs together, once.
    """
    total = Work()
    for each in rank.model.attention:
        heads = _heads(each, rank.shape)
        per_entry = 2 * heads * (each.qk + each.v) * each.layers
        looked = rank.decoding * each.entries(rank.step.context)
        total.bf16_flop += per_entry * (looked + rank.prefill * each.entries(rank.step.prefill_context))
        share = 1 if each.shared else rank.shape.tensor_parallel
        total.memory_bytes += (looked + rank.prefill) * each.entry_bytes * each.layers / share
    return total


def _indexer(rank: _Rank) -> Work:
    """The indexer scores each entry behind a token, in fp8: 2 operations for each of its heads and dimensions."""
    total = Work()
    for each in rank.model.attention:
        if each.index_heads:
            scored = rank.decoding * rank.step.context / each.ratio
            prompts = rank.prefill * rank.step.prefill_context / each.ratio
            total.fp8_flop += 2 * each.index_heads * each.index_dim * each.layers * (scored + prompts)
            total.memory_bytes += scored * each.index_bytes * each.layers
    return total


def _comms(rank: _Rank) -> Work:
    """Tensor parallelism sums the hidden state over its GPUs twice a layer; data parallelism gathers all tokens for
    the experts and sends their results back (vLLM's ``allgather_reducescatter``). A sum is both at once.
    """
    model, shape = rank.model, rank.shape
    hidden = model.hidden * BF16
    sent = 0.0
    if shape.tensor_parallel > 1:
        apart = (shape.tensor_parallel - 1) / shape.tensor_parallel
        sent += 2 * 2 * apart * rank.tokens * hidden * model.layers
        sent += apart * rank.decoding * model.vocabulary * BF16                     # the logits
    if shape.data_parallel > 1 and model.experts is not None:
        apart = (shape.data_parallel - 1) / shape.data_parallel
        routing = model.experts.experts * BF16
        sent += apart * rank.step.tokens * (2 * hidden + routing) * model.experts.layers
    return Work(link_bytes=sent)


def _activation(rank: _Rank) -> Work:
    """Between the experts' products, gate and up are read and their product written; what comes down is read, and
    summed over a token's experts. What goes into fp8 products is read in bf16 and written in fp8.
    """
    model = rank.model
    total = 0.0
    if model.experts is not None:
        pairs = rank.step.tokens * model.experts.top_k / rank.shape.gpus
        total += pairs * (3 * model.experts.intermediate + 2 * model.hidden) * BF16 * model.experts.layers
    quantised = sum(each.k * each.count for each in model.matrices if each.arithmetic == "fp8")
    return Work(memory_bytes=total + rank.tokens * quantised * (BF16 + FP8))


def _norm(rank: _Rank) -> Work:
    """Twice a layer the residual streams are read and written, a layer's output read and its input written; queries,
    keys and what attention gives are normalised or rotated: read and written once each, at the width that it computes.
    """
    model = rank.model
    streams = 2 * (2 * model.streams * model.hidden + 2 * model.hidden) * BF16
    (width, *_) = sorted({_heads(each, rank.shape) / each.heads for each in model.attention}, reverse=True)
    return Work(memory_bytes=rank.tokens * model.layers * (streams + 4 * model.head_width * width * BF16))


def _sampling(rank: _Rank) -> Work:
    """The logits of each sequence, read once in fp32; under tensor parallelism every GPU samples them all."""
    return Work(memory_bytes=rank.decoding * rank.model.vocabulary * _FP32)


def slowest(times: Mapping[str, float]) -> str:
    """The bucket that takes most."""
    return max(times, key=lambda name: times[name])
