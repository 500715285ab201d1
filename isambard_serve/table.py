"""Rows as a table: on the terminal, and as CSV."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

import msgspec

from isambard_serve.records import Repeats, Row, Run
from isambard_serve.run import point_name

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = {
    "recipe": "recipe",
    "concurrency": "concurrency",
    "repeat": "repeat",
    "output_tok_s": "output tok/s",
    "output_tok_s_per_gpu": "per GPU",
    "ratio": "ratio",
    "tok_s_per_user": "tok/s/user",
    "median_ttft_ms": "TTFT ms",
    "median_tpot_ms": "TPOT ms",
    "kv_cache_usage_max": "KV max",
    "valid": "valid",
}


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    """One line a row, a column for each field of :class:`~isambard_serve.records.Row`; lists joined by spaces."""
    import pandas as pd

    fields = _fields()
    table = pd.DataFrame([msgspec.to_builtins(row) for row in rows], columns=[field.name for field in fields])
    for field in fields:
        if field.type == float | None:
            # To pandas a column of nothing but None would not be one of numbers.
            table[field.name] = table[field.name].astype("float64")
    for column in ("reasons", "unknown", "not_applicable"):
        table[column] = table[column].map(" ".join)
    table["details"] = table["details"].map(
        lambda details: "; ".join(f"{code}: {why}" for code, why in details.items()))
    return table


def csv(rows: Sequence[Row]) -> str:
    """:func:`frame` as CSV: of no rows the heading alone, which need not wait for pandas."""
    return str(frame(rows).to_csv(index=False)) if rows else ",".join(field.name for field in _fields()) + "\n"


def _fields() -> list[msgspec.structs.FieldInfo]:
    return [field for field in msgspec.structs.fields(Row) if field.name != "schema"]


def compared(groups: Sequence[Sequence[Row]], alike: Sequence[bool]) -> list[list[Row]]:
    """The rows of ``groups``, each with its throughput's ratio to the best valid row of the first group.

    The ratio is None for a single group, where the first has no valid row, and in a group that is not ``alike``: one
    that had another load than the first.
    """
    best = max((row.output_tok_s or 0 for row in groups[0] if row.valid), default=0.0) if len(groups) > 1 else 0.0
    def ratio(row: Row) -> float | None:
        return row.output_tok_s / best if best and row.output_tok_s is not None else None

    return [[msgspec.structs.replace(row, ratio=ratio(row) if same else None) for row in rows]
            for rows, same in zip(groups, alike, strict=True)]


def text(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    """The table for the terminal. A row that may be wrong says why, and so does a run that did not end well."""
    lines = []
    if any(run.simulated for run in runs):
        lines.append("SIMULATED: these numbers come from a model of the engine. Nothing was measured.")
    if rows:
        shown = frame(rows)
        everywhere = set.intersection(*(set(row.unknown) for row in rows))
        shown["valid"] = [_verdict(row, everywhere) for row in rows]
        alone = shown["ratio"].isna().all()
        shown = shown[[name for name in _SHOWN if not (alone and name == "ratio")]].rename(columns=_SHOWN)
        lines.append(shown.to_string(index=False, na_rep="-", float_format=lambda value: f"{value:,.2f}"))
        lines += _explained(rows)
    for run in runs:
        lines.append(f"{run.run_id}: {progress(run)}")
        if run.binding and not run.binding.startswith("not applicable"):
            lines.append(f"  binding: {run.binding}")
        if run.url:
            lines.append(f"  {run.url}, key in {run.key_file}")
        if run.verdict:
            lines.append(f"  {run.recipe}: {run.verdict.text}")
            lines += [f"  c{each.concurrency}: median {each.output_tok_s_median:,.2f} tok/s of {each.valid}, "
                      f"spread {each.output_tok_s_spread:.1%}"
                      for each in run.verdict.medians if each.output_tok_s_spread is not None]
        if run.state == "failed":
            lines.append(f"  → isambard-serve logs {run.run_id}")
    return "\n".join(lines)


def medians(repeats: Sequence[Repeats]) -> pd.DataFrame:
    """One line a concurrency, a column for each field of :class:`~isambard_serve.records.Repeats`."""
    import pandas as pd

    return pd.DataFrame([msgspec.to_builtins(each) for each in repeats],
                        columns=[field.name for field in msgspec.structs.fields(Repeats)])


def progress(run: Run) -> str:
    """How far a run is, in one line."""
    parts: list[str] = [run.state]
    if run.points_planned != 0:
        of = "" if run.points_planned is None else f" of {run.points_planned}"
        whole = run.points_done if run.points_planned is None else run.points_planned
        parts.append(f"{run.points_done}{of} point{'s' if whole != 1 else ''}")
    if run.points_invalid:
        parts.append(f"{run.points_invalid} NOT VALID")
    if run.node_hours is not None:
        parts.append(f"{run.node_hours:.3f} node-hours")
    if run.simulated:
        parts.append("simulated")
    return ", ".join(parts) + (f" - {run.reason}" if run.reason else "")


def _verdict(row: Row, everywhere: Set[str]) -> str:
    """Whether ``row`` is valid; what is not known ``everywhere`` is said once, below the table."""
    parts = ["yes" if row.valid else f"NO: {' '.join(row.reasons)}"]
    unknown = [code for code in row.unknown if code not in everywhere]
    if unknown:
        parts.append(f"(not known: {' '.join(unknown)})")
    return " ".join(parts)


def _explained(rows: Sequence[Row]) -> list[str]:
    """For each rule that some row breaks or that is not known of it: what was found, in the first such row."""
    lines = []
    for what, field in (("NO", "reasons"), ("not known", "unknown")):
        for code in dict.fromkeys(code for row in rows for code in getattr(row, field)):
            found = [row for row in rows if code in getattr(row, field)]
            where = f"{found[0].recipe} {point_name(found[0].concurrency, found[0].repeat)}"
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            which = "all rows" if len(found) == len(rows) > 1 else where + more
            lines.append(f"  {what}: {code} - {found[0].details.get(code, '')} ({which})")
    return lines
