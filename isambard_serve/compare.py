"""Two runs side by side: how much faster, by what, and whether they answer alike."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from isambard_serve import difference, outputs
from isambard_serve.difference import Change
from isambard_serve.errors import ServeError
from isambard_serve.outputs import Parting
from isambard_serve.records import Outputs, Record, Row
from isambard_serve.run import RunDir, load_of, point_name, read_record


class Factors(Record, frozen=True):
    """Why one throughput is another's multiple: so many times as many requests under way, each so many times as fast.

    ``throughput`` = ``under_way`` × ``speed``: output tok/s is the mean number of requests that decode × the tok/s of
    each (1000 / median TPOT). The first factor is the quotient of the two others, and holds all else too: time in
    which requests wait for their first token, ramps.
    """

    throughput: float
    speed: float
    under_way: float


class Comparison(Record, frozen=True):
    """The second run against the first, by the best valid row of each (None: it has none).

    ``factors`` is None without both rows, or where the load was another; ``partings`` if a run has no answers.
    ``same`` is the share of prompts that both answer alike to the last token, ``agree`` that of tokens before the
    first one that differs.
    """

    first: str
    second: str
    simulated: bool
    rows: tuple[Row | None, Row | None]
    factors: Factors | None
    changes: tuple[Change, ...]
    same: float | None
    agree: float | None
    partings: tuple[Parting, ...] | None


def runs(first: RunDir, second: RunDir) -> Comparison:
    """Compares two runs.

    Raises:
        ServeError: the lock of a run's recipe cannot be read.
    """
    best = (_best(first.read_rows()), _best(second.read_rows()))
    one, other = _answers(first), _answers(second)
    partings = None if one is None or other is None else outputs.partings(one, other)
    return Comparison(
        first=first.run_id, second=second.run_id,
        simulated=any(row.simulated for row in best if row),
        rows=best,
        factors=_factors(*best) if load_of(first) == load_of(second) else None,
        changes=tuple(change for change in difference.between(str(first.lock), str(second.lock))
                      if change.key != "description"),
        same=_share(sum(not each.parted for each in partings), len(partings)) if partings else None,
        agree=_share(sum(each.agree for each in partings), sum(each.length for each in partings)) if partings else None,
        partings=None if partings is None else tuple(partings),
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def _best(rows: Sequence[Row]) -> Row | None:
    return max((row for row in rows if row.valid and row.output_tok_s), key=lambda row: row.output_tok_s or 0,
               default=None)


def _answers(run: RunDir) -> Outputs | None:
    with contextlib.suppress(FileNotFoundError, ServeError):
        return read_record(run.outputs, Outputs)
    return None


def _factors(first: Row | None, second: Row | None) -> Factors | None:
    if not (first and second and first.output_tok_s and second.output_tok_s and first.tok_s_per_user
            and second.tok_s_per_user):
        return None
    throughput = second.output_tok_s / first.output_tok_s
    speed = second.tok_s_per_user / first.tok_s_per_user
    return Factors(throughput=throughput, speed=speed, under_way=throughput / speed)


def text(comparison: Comparison, shown: int = 3) -> str:
    """The comparison for the terminal, with the first ``shown`` answers that part."""
    lines = ["SIMULATED: these numbers come from a model of the engine. Nothing was measured."] * comparison.simulated
    for name, row in zip((comparison.first, comparison.second), comparison.rows, strict=True):
        lines.append(f"{name}: {_headline(row)}")
    if comparison.factors:
        factors = comparison.factors
        lines.append(f"{factors.throughput:.2f}x the output tok/s = {factors.under_way:.2f}x the requests that decode "
                     f"at once x {factors.speed:.2f}x the speed of each")
    elif all(row and row.tok_s_per_user for row in comparison.rows):
        lines.append("no ratio: the load was another (bench.isl, bench.osl), or one of the two is simulated")
    for change in comparison.changes:
        lines += [f"  {line}" for line in change.lines()]
    return "\n".join([*lines, *_parted(comparison, shown)])


def _headline(row: Row | None) -> str:
    if row is None:
        return "no valid row"
    kv = "" if row.kv_cache_usage_max is None else f", KV cache {row.kv_cache_usage_max:.0%}"
    speed = "" if row.tok_s_per_user is None else f", {row.tok_s_per_user:,.1f} tok/s per user"
    return f"{row.output_tok_s:,.0f} output tok/s at {point_name(row.concurrency, row.repeat)}{speed}{kv}"


def _parted(comparison: Comparison, shown: int) -> list[str]:
    if comparison.partings is None or comparison.same is None or comparison.agree is None:
        return ["answers: a run has none to the fixed prompts"]
    parted = [each for each in comparison.partings if each.parted]
    count = len(comparison.partings)
    lines = [f"answers: {count - len(parted)} of {count} are the same to the last token; {comparison.agree:.0%} of the "
             "tokens come before the first that differs"]
    for each in parted[:shown]:
        lines += [f"  {each.prompt!r} parts at token {each.agree + 1} of {each.length}:",
                  f"    - {each.first!r}", f"    + {each.second!r}"]
    if len(parted) > shown:
        lines.append(f"  and {len(parted) - shown} more: --json has them all")
    return lines
