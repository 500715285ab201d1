"""The rules that a row must pass to be believed. Each has a code that travels with the number.

A rule is a pure function of what was measured: True if it is verified, False if it is refuted, None if what was
recorded does not tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isambard_serve.plan import Point
from isambard_serve.records import Record, Sample

OSL_TOLERANCE = 0.005
"""How far the tokens that came out may be from requests × OSL."""

PREFIX_HITS = 0.01
"""The share of prompt tokens that the prefix cache may answer: random prompts share nothing."""

RECOMPUTED = 0.02
"""The share of tokens that preempted requests may have computed twice."""

WAVES = 2
"""How often each of the concurrent requests must have been replaced: one wave is mostly ramp."""


class Measured(Record, frozen=True):
    """What a row is judged by.

    ``bench`` is the benchmark's own JSON (None: it left none), ``returncode`` how its command ended (None: it had
    to be ended), ``window`` the engine's samples from before the first request to after the last.
    """

    bench: dict[str, Any] | None
    returncode: int | None
    point: Point
    isl: int
    osl: int
    min_window_s: float
    window: Sequence[Sample] = ()


def _number(measured: Measured, key: str) -> float | None:
    value = (measured.bench or {}).get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _numbers(measured: Measured, key: str) -> list[float]:
    value = (measured.bench or {}).get(key)
    return [float(item) for item in value] if isinstance(value, list) else []


def increase(window: Sequence[Sample], counter: str) -> float | None:
    """How far ``counter`` went up in ``window``; None if it was not read at both ends."""
    if len(window) < 2:
        return None
    first, last = getattr(window[0], counter), getattr(window[-1], counter)
    return None if first is None or last is None else last - first


def ended(measured: Measured) -> bool | None:
    """``bench_ended``: the benchmark ended by itself, with exit code 0, and left its result."""
    return measured.returncode == 0 and measured.bench is not None


def completed(measured: Measured) -> bool | None:
    """``completed``: every request was answered. (The benchmark exits 0 also when every one of them failed.)"""
    number = _number(measured, "completed")
    return None if number is None else number == measured.point.prompts


def none_failed(measured: Measured) -> bool | None:
    """``none_failed``: no request failed."""
    number = _number(measured, "failed")
    return None if number is None else number == 0


def tokens_out(measured: Measured) -> bool | None:
    """``tokens_out``: as many tokens came out as requests × OSL, within 0.5 %."""
    number = _number(measured, "total_output_tokens")
    wanted = measured.point.prompts * measured.osl
    return None if number is None else abs(number - wanted) <= OSL_TOLERANCE * wanted


def in_flight(measured: Measured) -> bool | None:
    """``in_flight``: as many requests were under way at once as the point's concurrency.

    Counted from when the benchmark sent each request (``queue_times``) and how long it took (``latencies``); its
    own ``max_concurrent_requests`` counts per second and is too high for short runs.
    """
    sent, took = _numbers(measured, "queue_times"), _numbers(measured, "latencies")
    if not sent or len(sent) != len(took):
        return None
    # A request that ends as another begins makes room for it: ends come first.
    changes = sorted([(begin, 1) for begin in sent] +
                     [(begin + length, -1) for begin, length in zip(sent, took, strict=True)])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most >= min(measured.point.concurrency, measured.point.prompts)


def window(measured: Measured) -> bool | None:
    """``window``: it was measured for long enough: 60 s (or the recipe's ``min_window``), and two waves of requests."""
    duration_s = _number(measured, "duration")
    if duration_s is None:
        return None
    return duration_s >= measured.min_window_s and measured.point.prompts >= WAVES * measured.point.concurrency


def prefix_hits(measured: Measured) -> bool | None:
    """``prefix_hits``: the prefix cache answered less than 1 % of the prompt tokens."""
    queries = increase(measured.window, "prefix_cache_queries_total")
    hits = increase(measured.window, "prefix_cache_hits_total")
    return None if not queries or hits is None else hits < PREFIX_HITS * queries


def recomputed(measured: Measured) -> bool | None:
    """``recomputed``: preempted requests computed less than 2 % of the tokens again.

    The engine counts preemptions, not tokens. A preempted request repeats its prompt at least, and its prompt and
    output at most; between the two bounds the rule cannot tell.
    """
    preemptions = increase(measured.window, "preemptions_total")
    if preemptions is None:
        return None
    allowed = RECOMPUTED * measured.point.prompts * (measured.isl + measured.osl)
    if preemptions * (measured.isl + measured.osl) < allowed:
        return True
    return False if preemptions * measured.isl >= allowed else None


RULES: Mapping[str, Callable[[Measured], bool | None]] = {
    "bench_ended": ended,
    "completed": completed,
    "none_failed": none_failed,
    "tokens_out": tokens_out,
    "in_flight": in_flight,
    "window": window,
    "prefix_hits": prefix_hits,
    "recomputed": recomputed,
}
"""Reason code → rule."""


def judge(measured: Measured) -> tuple[list[str], list[str]]:
    """The codes of the rules that ``measured`` breaks, and of those that could not be judged."""
    verdicts = {code: rule(measured) for code, rule in RULES.items()}
    refuted = [code for code, verdict in verdicts.items() if verdict is False]
    unknown = [code for code, verdict in verdicts.items() if verdict is None]
    return refuted, unknown
