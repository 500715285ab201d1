"""A breakdown for people: a table for the terminal, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from isambard_serve.errors import UsageError
from isambard_serve.records import Bucket, RankTrace, Trace
from isambard_serve.trace.buckets import IDLE, UNMATCHED

if TYPE_CHECKING:
    from rich.table import Table

_FOUND = {
    "marks": "found by the program's marks",
    "graphs": "found by their CUDA graphs",
    "repetition": "found by the kernels that come back",
    "nothing": "NO STEP WAS FOUND: all that was recorded counts as one",
}


def text(trace: Trace) -> str:
    """The table, a line a bucket, those that take most first; below it, what else is to be known."""
    from rich.console import Console

    out = StringIO()
    Console(file=out, width=100, markup=False).print(_table(trace))
    lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
    return "\n".join([*lines, "", *_notes(trace)])


def _table(trace: Trace) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    buckets = _ordered(trace)
    table = Table("bucket", box=SIMPLE_HEAD, show_edge=False)
    cells = [[bucket.name, f"{bucket.ms:,.3f}", f"{bucket.share:.1%}",
              "" if bucket.launches is None else f"{bucket.launches:,.1f}"] for bucket in buckets]
    titles = ["ms", "share", "launches"]
    if any(bucket.floor_ms is not None for bucket in buckets):
        titles += ["least ms", "× the least"]
        for row, bucket in zip(cells, buckets, strict=True):
            known = bucket.floor_ms is not None
            row += [f"{bucket.floor_ms:,.3f}" if known else "-",
                    f"{bucket.ms / bucket.floor_ms:,.1f}" if bucket.floor_ms else "-"]
    if len(trace.ranks) > 1:
        titles += ["least to most on a rank"]
        for row in cells:
            each = [_ms(rank, row[0]) for rank in trace.ranks]
            row.append(f"{min(each):,.3f} - {max(each):,.3f}")
    for title in titles:
        table.add_column(title, justify="right")
    for row in cells:
        table.add_row(*row)
    return table


def _ordered(trace: Trace) -> list[Bucket]:
    """The buckets that hold anything, those that take most first, then what no pattern matches, then idle time."""
    unmatched_ms = sum(rank.unmatched_ms for rank in trace.ranks) / len(trace.ranks)
    launches = sum(rank.launches for rank in trace.ranks) / len(trace.ranks)
    matched = sum(bucket.launches or 0.0 for bucket in trace.buckets)
    unmatched = Bucket(name=UNMATCHED, ms=unmatched_ms, share=unmatched_ms / trace.step_ms if trace.step_ms else 0.0,
                       launches=launches - matched, floor_ms=None)
    held = sorted((bucket for bucket in trace.buckets if bucket.launches), key=lambda bucket: -bucket.ms)
    idle = [bucket for bucket in trace.buckets if bucket.name == IDLE]
    return [*held, *([unmatched] if any(rank.unmatched for rank in trace.ranks) else []), *idle]


def _ms(rank: RankTrace, name: str) -> float:
    return rank.unmatched_ms if name == UNMATCHED else next(each.ms for each in rank.buckets if each.name == name)


def _notes(trace: Trace) -> list[str]:
    ranks = trace.ranks
    gpus = ", ".join(sorted({rank.gpu for rank in ranks if rank.gpu})) or "a GPU that the trace does not name"
    launches = sum(rank.launches for rank in ranks) / len(ranks)
    lines = [f"{trace.steps} steady steps of {trace.step_ms:,.3f} ms with {launches:,.0f} kernels each, on "
             f"{len(ranks)} × {gpus}; {', '.join(sorted({_FOUND[rank.found_by] for rank in ranks}))}"]
    left_out = max(rank.left_out for rank in ranks)
    if left_out:
        lines.append(f"{left_out} more left out: other launches, or another time")
    for name in ranks[0].hidden_ms:
        hidden = sum(rank.hidden_ms[name] for rank in ranks) / len(ranks)
        whole = hidden + next(bucket.ms for bucket in trace.buckets if bucket.name == name)
        if whole:
            lines.append(f"{name}: {whole:,.3f} ms a step, {hidden / whole:.1%} of it behind other kernels")
    if len(ranks) > 1:
        most, least = (choose(ranks, key=lambda rank: rank.busy_ms) for choose in (max, min))
        lines.append(f"busiest is rank {most.rank} with {most.busy_ms:,.3f} ms, idlest rank {least.rank} with "
                     f"{least.busy_ms:,.3f} ms")
    return lines + _unmatched(trace)


def _unmatched(trace: Trace) -> list[str]:
    worst = max(trace.ranks, key=lambda rank: rank.unmatched_ms)
    if not worst.unmatched:
        return []
    return [f"no pattern matches {trace.unmatched_share:.1%} of the busy time; most of it on rank {worst.rank}:",
            *(f"  {kernel.ms:,.3f} ms, {kernel.launches:,.1f} launches: {_printable(kernel.name[:120])}"
              for kernel in worst.unmatched),
            "  → give them a bucket with --buckets FILE"]


def picture(trace: Trace, path: Path) -> None:
    """Draws the step on one scale: what each bucket takes now in grey, and the least that it could take in solid.

    Raises:
        UsageError: matplotlib is not installed, or cannot write such a file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("pictures need matplotlib", where="--plot",
                         remedy="pip install 'isambard-serve[plot]'") from error
    buckets = _ordered(trace)[::-1]
    figure = Figure(figsize=(8, 1.2 + 0.4 * len(buckets)), layout="constrained")
    axes = figure.subplots()
    names = [bucket.name for bucket in buckets]
    axes.barh(names, [bucket.ms for bucket in buckets], color="lightgrey", label="now")
    known = [bucket for bucket in buckets if bucket.floor_ms is not None]
    axes.barh([bucket.name for bucket in known], [bucket.floor_ms or 0.0 for bucket in known], color="black",
              label="least possible")
    for place, bucket in enumerate(buckets):
        axes.annotate(f" {bucket.ms:,.2f}", (max(bucket.ms, bucket.floor_ms or 0.0), place), va="center")
    axes.set_xlabel(f"ms of a step of {trace.step_ms:,.2f} ms, mean over {_count(trace.ranks)}")
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    if known:
        figure.legend(loc="outside upper right", ncols=2, frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be written: {error}", where=str(path), remedy="try FILE.png or FILE.svg") from error


def _printable(name: str) -> str:
    """A kernel's name without what would steer the terminal."""
    return "".join(character if character.isprintable() else "?" for character in name)


def _count(ranks: Sequence[RankTrace]) -> str:
    return "one rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
