"""The result of a benchmark as ``vllm bench serve`` writes it (keys and order read off vLLM 0.32)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from isambard_serve.sim.load import Outcome, Pace


class Distribution:
    """Numbers, each with how often it occurs. Everything is 0 when there are none, as vLLM has it."""

    def __init__(self, values: Iterable[tuple[float, int]]) -> None:
        self._pairs = sorted(values)
        self._ranks = list(accumulate(count for _, count in self._pairs))
        self._count = self._ranks[-1] if self._ranks else 0

    @property
    def mean(self) -> float:
        """The arithmetic mean."""
        total = math.fsum(value * count for value, count in self._pairs)
        return total / self._count if self._count else 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation of a whole population."""
        mean = self.mean
        total = math.fsum((value - mean) ** 2 * count for value, count in self._pairs)
        return math.sqrt(total / self._count) if self._count else 0.0

    def percentile(self, percent: float) -> float:
        """The percentile, linearly between the two nearest numbers as numpy has it."""
        if not self._count:
            return 0.0
        place = (self._count - 1) * percent / 100
        below, share = int(place), place - int(place)
        low, _ = self._pairs[bisect_right(self._ranks, below)]
        high, _ = self._pairs[bisect_right(self._ranks, min(below + 1, self._count - 1))]
        return low + (high - low) * share


def _once(values: Iterable[float]) -> Distribution:
    return Distribution((value, 1) for value in values)


def result(asked: Mapping[str, Any], outcomes: Sequence[Outcome], pace: Pace, *, duration_s: float,
           input_tokens: int, metrics: Sequence[str], percentiles: Sequence[float],
           time_scale: float) -> dict[str, Any]:
    """The benchmark's JSON document.

    Args:
        asked: what the document begins with: date, model, load, metadata.
        outcomes: one for each prompt, in any order.
        input_tokens: length of each prompt.
        metrics: which of ``ttft``, ``tpot``, ``itl``, ``e2el`` get mean, median, deviation and percentiles.
        time_scale: virtual seconds per real second.
    """
    outcomes = sorted(outcomes, key=lambda outcome: outcome.index)
    good = [outcome for outcome in outcomes if outcome.error is None]
    tokens_out = sum(outcome.output_tokens for outcome in good)
    tokens_in = len(good) * input_tokens

    def per_s(amount: int) -> float:
        return amount / duration_s if duration_s > 0 else 0.0

    document = {
        "simulated": True,
        "time_scale": time_scale,
        **asked,
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": per_s(len(good)),
        "request_goodput": None,
        "output_throughput": per_s(tokens_out),
        "total_token_throughput": per_s(tokens_in + tokens_out),
        "latencies": [0.0 if outcome.error else outcome.end_s - outcome.sent_s for outcome in outcomes],
        "queue_times": [outcome.sent_s for outcome in outcomes],
        "max_output_tokens_per_s": pace.peak_tok_s,
        "max_concurrent_requests": _most_at_once(good),
        "rtfx": 0.0,
    }
    times = {
        "ttft": _once(outcome.first_token_s - outcome.sent_s for outcome in good),
        "tpot": _once((outcome.end_s - outcome.first_token_s) / (outcome.output_tokens - 1)
                      for outcome in good if outcome.output_tokens > 1),
        "itl": Distribution(pace.gaps),
        "e2el": _once(outcome.end_s - outcome.sent_s for outcome in good),
    }
    for name, spread in times.items():
        if name not in metrics:
            continue
        document[f"mean_{name}_ms"] = spread.mean * 1000
        document[f"median_{name}_ms"] = spread.percentile(50) * 1000
        document[f"std_{name}_ms"] = spread.deviation * 1000
        for percent in percentiles:
            document[f"p{percent:g}_{name}_ms"] = spread.percentile(percent) * 1000
    return document


def _most_at_once(outcomes: Iterable[Outcome]) -> int:
    """Most requests that were open within one second, counted as vLLM does: a request counts in each it touches."""
    changes: Counter[int] = Counter()
    for outcome in outcomes:
        changes[int(outcome.sent_s)] += 1
        changes[int(outcome.end_s) + 1] -= 1
    return max(accumulate(changes[second] for second in sorted(changes)), default=0)


def table(document: Mapping[str, Any]) -> str:
    """What ``vllm bench serve`` prints."""
    lines = [f"{' Serving Benchmark Result ':=^50}"]
    for label, key in (
        ("Successful requests:", "completed"), ("Failed requests:", "failed"),
        ("Maximum request concurrency:", "max_concurrency"), ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"), ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Total token throughput (tok/s):", "total_token_throughput"),
        ("Median TTFT (ms):", "median_ttft_ms"), ("Median TPOT (ms):", "median_tpot_ms"),
        ("Median ITL (ms):", "median_itl_ms"),
    ):
        if document.get(key) is not None:
            value = document[key]
            lines.append(f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}")
    return "\n".join([*lines, "=" * 50])
