"""The rules that a row must pass to be believed. Each has a code that travels with the number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isambard_serve.plan import Point
from isambard_serve.records import Record

OSL_TOLERANCE = 0.005
"""How far the tokens that came out may be from requests × OSL."""


class Measured(Record, frozen=True):
    """What a row is judged by: the benchmark's own JSON (None: it left none), how its command ended, the point."""

    bench: dict[str, Any] | None
    returncode: int | None
    point: Point
    osl: int


def _number(measured: Measured, key: str) -> float | None:
    value = (measured.bench or {}).get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


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


RULES: Mapping[str, Callable[[Measured], bool | None]] = {
    "bench_ended": ended,
    "completed": completed,
    "none_failed": none_failed,
    "tokens_out": tokens_out,
}
"""Reason code → rule: True if verified, False if refuted, None if it cannot be judged."""


def judge(measured: Measured) -> tuple[list[str], list[str]]:
    """The codes of the rules that ``measured`` breaks, and of those that could not be judged."""
    verdicts = {code: rule(measured) for code, rule in RULES.items()}
    refuted = [code for code, verdict in verdicts.items() if verdict is False]
    unknown = [code for code, verdict in verdicts.items() if verdict is None]
    return refuted, unknown
