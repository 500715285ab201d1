"""What a run came to, in words: how fast it was, beside what it is compared with, and what it was short of.

A pure function of the kept rows, and of what a search found where there was one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isambard_serve.outcome import Found
from isambard_serve.records import Repeats, Row, RunVerdict
from isambard_serve.search import FULL, NEAR, Saturation

BOUND: dict[Saturation | None, str] = {
    "kv": "KV-bound at c{}",
    "waiting": "full at c{}: requests wait",
    "preemptions": "KV-bound at c{}, with preemptions",
    "plateau": "levels off at c{}",
    "max_num_seqs": "bound by max-num-seqs at c{}",
    None: "best at c{}",
}
"""What the engine was short of at the concurrency that is put in; None: nothing was seen."""


def repeats(rows: Iterable[Row]) -> list[Repeats]:
    """One entry for each concurrency of one run's ``rows``: its valid repeats as one."""
    import statistics

    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.concurrency, []).append(row)
    found = []
    for concurrency, group in sorted(groups.items()):
        rates = [row.output_tok_s for row in group if row.valid and row.output_tok_s is not None]
        median = statistics.median(rates) if rates else None
        found.append(Repeats(
            recipe=group[0].recipe, concurrency=concurrency, measured=len(group), valid=len(rates),
            output_tok_s_median=median,
            output_tok_s_spread=(max(rates) - min(rates)) / median if median and len(rates) > 1 else None))
    return found


def knee(medians: Iterable[Repeats]) -> Repeats | None:
    """The smallest concurrency within 2 % of the best valid throughput; None if there is none."""
    valid = [each for each in medians if each.output_tok_s_median]
    best = max((each.output_tok_s_median or 0.0 for each in valid), default=0.0)
    return next((each for each in valid if (each.output_tok_s_median or 0.0) >= (1 - NEAR) * best), None)


def of(rows: Sequence[Row], found: Found | None = None, base: Sequence[Row] | None = None) -> RunVerdict | None:
    """The verdict on a run; None while it has no row.

    Args:
        rows: the run's own.
        found: what its search found, if it searched.
        base: the rows of the run that it is compared with; None if that is nobody, or itself.
    """
    if not rows:
        return None
    medians = tuple(repeats(rows))
    here = knee(medians)
    if here is None or here.output_tok_s_median is None:
        codes = dict.fromkeys(code for row in rows for code in row.reasons)
        return RunVerdict(text=f"no valid point: {', '.join(codes)}", concurrency=None, output_tok_s=None, ratio=None,
                          over=None, bound=None, medians=medians)
    there = knee(repeats(base)) if base else None
    ratio = here.output_tok_s_median / there.output_tok_s_median if there and there.output_tok_s_median else None
    over = base[0].recipe if base else None
    bound = found.saturation if found else _bound(rows, here.concurrency)
    speed = f"{here.output_tok_s_median:,.0f} tok/s" if ratio is None else f"{ratio:.1f}× {over}"
    if here.output_tok_s_spread is not None:
        speed += f" (median of {here.valid}, spread {here.output_tok_s_spread:.1%})"
    parts = [speed, BOUND[bound].format(here.concurrency)]
    if over and ratio is None:
        parts.append(f"{over} has no valid point")
    if found and "budget" in found.reason:
        parts.append(found.reason)
    return RunVerdict(text="; ".join(parts), concurrency=here.concurrency, output_tok_s=here.output_tok_s_median,
                      ratio=ratio, over=over, bound=bound, medians=medians)


def _bound(rows: Sequence[Row], concurrency: int) -> Saturation | None:
    """What the rows alone show that the engine was short of at ``concurrency``."""
    here = [row for row in rows if row.concurrency == concurrency and row.valid]
    if any(row.preemptions for row in here):
        return "preemptions"
    return "kv" if any((row.kv_cache_usage_max or 0.0) >= FULL for row in here) else None
