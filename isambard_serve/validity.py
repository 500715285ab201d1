"""The rules that a row must pass to be believed. Each has a code that travels with the number.

A rule is a pure function of what was measured: it is verified, refuted, or unknown if what was recorded does not
tell; where it means nothing it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isambard_serve import enginerules, loadrules
from isambard_serve.evidence import Measured, Verdict
from isambard_serve.records import Record

RULES: Mapping[str, Callable[[Measured], Verdict]] = {
    "bench_ended": loadrules.ended,
    "completed": loadrules.completed,
    "none_failed": loadrules.none_failed,
    "tokens_out": loadrules.tokens_out,
    "in_flight": loadrules.in_flight,
    "littles_law": loadrules.littles_law,
    "window": loadrules.window,
    "prefix_hits": loadrules.prefix_hits,
    "alone": loadrules.alone,
    "recomputed": loadrules.recomputed,
    "client": loadrules.client,
    "expected": enginerules.expected,
    "environment": enginerules.environment,
    "binding": enginerules.binding,
    "compiled": enginerules.compiled,
    "throttled": enginerules.throttled,
    "outputs": enginerules.outputs,
}
"""Reason code → rule."""


class Judgement(Record, frozen=True):
    """The codes of the rules that a row breaks, that could not be judged, and that do not apply; and why."""

    reasons: tuple[str, ...]
    unknown: tuple[str, ...]
    not_applicable: tuple[str, ...]
    details: dict[str, str]


def judge(measured: Measured) -> Judgement:
    """All rules' verdicts on ``measured``."""
    verdicts = {code: rule(measured) for code, rule in RULES.items()}

    def codes(outcome: str) -> tuple[str, ...]:
        return tuple(code for code, each in verdicts.items() if each.outcome == outcome)

    return Judgement(
        reasons=codes("refuted"), unknown=codes("unknown"), not_applicable=codes("not_applicable"),
        details={code: each.why for code, each in verdicts.items() if each.outcome != "verified"})
