"""What a DP rank counts, under vLLM's names and with its buckets (read off vLLM 0.32's ``/metrics``)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isambard_serve.sim.scheduler import Request

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
                  160, 640, 2560)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FEW = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


class Histogram:
    """A Prometheus histogram. ``bounds`` are its buckets' upper bounds, without the infinite one."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Counts ``value``, ``times`` times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulated(self) -> list[int]:
        """How many observations each bucket and those below it hold; the last is the count of all."""
        return list(accumulate(self._counts))


class RankStatistics:
    """Counters (from the engine's start) and histograms of one rank. Seconds are virtual ones."""

    def __init__(self) -> None:
        self.preemptions = 0
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.requests: Counter[str] = Counter()
        self.iteration_tokens = Histogram(_ITERATION)
        self.prompt_length = Histogram(_TOKENS)
        self.generation_length = Histogram(_TOKENS)
        self.max_tokens = Histogram(_TOKENS)
        self.choices = Histogram(_FEW)
        self.time_to_first_token = Histogram(_FIRST_TOKEN_S)
        self.inter_token_latency = Histogram(_PER_TOKEN_S)
        self.time_per_output_token = Histogram(_PER_TOKEN_S)
        self.e2e_latency = Histogram(_REQUEST_S)
        self.queue_time = Histogram(_REQUEST_S)
        self.inference_time = Histogram(_REQUEST_S)
        self.prefill_time = Histogram(_REQUEST_S)
        self.decode_time = Histogram(_REQUEST_S)
        self.request_preemptions = Histogram(_PREEMPTIONS)
        self.prefill_computed = Histogram(_TOKENS)

    def stepped(self, step_s: float, *, decoded: int, prefilled: int, prefill_tokens: int) -> None:
        """Counts one step of ``step_s`` seconds: ``decoded`` sequences decoded, ``prefilled`` got their first token."""
        self.generation_tokens += decoded + prefilled
        if decoded:
            self.inter_token_latency.observe(step_s, decoded)
        if decoded or prefill_tokens:
            self.iteration_tokens.observe(decoded + prefilled + prefill_tokens)

    def ended(self, request: Request) -> None:
        """Counts a request that has ended."""
        self.requests[request.reason or ""] += 1
        end_s, scheduled_s, first_token_s = request.end_s, request.scheduled_s, request.first_token_s
        if request.reason == "abort" or end_s is None or scheduled_s is None or first_token_s is None:
            return
        self.prompt_length.observe(request.prompt_tokens)
        self.generation_length.observe(request.generated)
        self.max_tokens.observe(request.output_tokens)
        self.choices.observe(1)
        self.e2e_latency.observe(end_s - request.arrival_s)
        self.queue_time.observe(scheduled_s - request.arrival_s)
        self.inference_time.observe(end_s - scheduled_s)
        self.prefill_time.observe(first_token_s - scheduled_s)
        self.decode_time.observe(end_s - first_token_s)
        if request.generated > 1:
            self.time_per_output_token.observe((end_s - first_token_s) / (request.generated - 1))
        self.request_preemptions.observe(request.preemptions)
        self.prefill_computed.observe(request.prompt_tokens - request.cached_tokens)
