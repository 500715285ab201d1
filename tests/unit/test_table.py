"""Rows as a table: a number that may be wrong says so beside itself."""

from __future__ import annotations

import csv
import io

import msgspec
import pytest

from isambard_serve import table
from isambard_serve.records import Row
from tests.unit.helpers import RUN_ID, some_row, some_run

NOTHING = some_row(
    concurrency=2, output_tok_s=None, output_tok_s_per_gpu=None, total_tok_s=None, tok_s_per_user=None,
    median_ttft_ms=None, median_tpot_ms=None, p99_tpot_ms=None, kv_cache_usage_max=None, preemptions=None,
    duration_s=None, node_hours=None, output_tok_per_node_hour=None, valid=False, reasons=("bench_ended",),
    unknown=("completed", "tokens_out"), not_applicable=("throttled",),
    details={"bench_ended": "it ended with 1", "completed": "no number", "tokens_out": "none", "throttled": "no GPU"})


def test_a_valid_row_shows_its_numbers() -> None:
    heading, line = table.text([], [some_row(output_tok_s=5856.123)]).splitlines()
    assert "output tok/s" in heading
    assert line.split() == ["small", "1", "1", "5,856.12", "100.00", "50.00", "10.00", "20.00", "0.50", "yes"]


def test_a_row_that_may_be_wrong_says_why_and_what_is_not_known() -> None:
    _, _, line, *below = table.text([], [some_row(), NOTHING]).splitlines()
    assert line.split(maxsplit=9)[3:] == ["-"] * 6 + ["NO: bench_ended (not known: completed tokens_out)"]
    assert below == ["  NO: bench_ended - it ended with 1 (small c0002.r1)",
                     "  not known: completed - no number (small c0002.r1)",
                     "  not known: tokens_out - none (small c0002.r1)"]


def test_what_is_not_known_of_any_row_is_said_once() -> None:
    rows = [msgspec.structs.replace(NOTHING, concurrency=concurrency) for concurrency in (1, 2, 4)]
    rows[1] = msgspec.structs.replace(rows[1], unknown=("completed", "window"))
    text = table.text([], rows)
    assert text.count("(not known:") == 3
    assert "(not known: completed" not in text
    assert "  NO: bench_ended - it ended with 1 (all rows)" in text.splitlines()
    assert "  not known: completed - no number (all rows)" in text.splitlines()
    assert "  not known: tokens_out - none (small c0001.r1 and 1 more)" in text.splitlines()


def test_a_missing_number_is_a_dash_and_never_the_word_none() -> None:
    text = table.text([], [some_row(), NOTHING])
    assert "None" not in text
    assert "nan" not in text.lower()


@pytest.mark.parametrize(("changes", "line"), [
    ({}, "done, 2 of 2 points, 0.500 node-hours"),
    ({"state": "failed", "reason": "the engine died", "points_done": 1},
     "failed, 1 of 2 points, 0.500 node-hours - the engine died"),
    ({"state": "submitted", "node_hours": None, "points_done": 0}, "submitted, 0 of 2 points"),
    ({"points_invalid": 1}, "done, 2 of 2 points, 1 NOT VALID, 0.500 node-hours"),
    ({"points_done": 1, "points_planned": None}, "done, 1 point, 0.500 node-hours"),
    ({"points_done": 0, "points_planned": 1}, "done, 0 of 1 point, 0.500 node-hours"),
    ({"simulated": True}, "done, 2 of 2 points, 0.500 node-hours, simulated"),
])
def test_how_far_a_run_is_stands_in_one_line(changes: dict[str, object], line: str) -> None:
    run = msgspec.structs.replace(some_run(), **changes)
    assert table.progress(run) == line
    assert f"{RUN_ID}: {line}" in table.text([run], []).splitlines()


def test_below_a_run_that_failed_stands_how_to_read_its_log() -> None:
    failed = some_run("failed", run_id="20261129-181259-other-3f2a", reason="the engine died")
    lines = table.text([some_run(), failed, some_run("cancelled")], []).splitlines()
    assert lines == [
        f"{RUN_ID}: done, 2 of 2 points, 0.500 node-hours",
        f"{failed.run_id}: failed, 2 of 2 points, 0.500 node-hours - the engine died",
        f"  → isambard-serve logs {failed.run_id}",
        f"{RUN_ID}: cancelled, 2 of 2 points, 0.500 node-hours"]


def test_simulated_numbers_are_called_so_before_anything_else() -> None:
    assert table.text([some_run(), some_run(simulated=True)], [some_row()]).startswith("SIMULATED: ")
    assert "SIMULATED" not in table.text([some_run()], [some_row()])


def test_several_runs_are_compared_with_the_best_valid_row_of_the_first() -> None:
    first = [some_row(output_tok_s=50.0), some_row(output_tok_s=100.0), some_row(output_tok_s=400.0, valid=False)]
    second = [some_row(output_tok_s=250.0), NOTHING]
    groups = table.compared([first, [], second], [True, True, True])
    assert [[row.ratio for row in rows] for rows in groups] == [[0.5, 1.0, 4.0], [], [2.5, None]]
    assert [msgspec.structs.replace(row, ratio=None) for rows in groups for row in rows] == [*first, *second]
    assert "ratio" in table.text([], groups[2])
    assert "ratio" not in table.text([], table.compared([first], [True])[0])


@pytest.mark.parametrize("groups", [[], [[some_row()]], [[], [some_row()]], [[some_row(valid=False)], [some_row()]]])
def test_without_a_valid_row_to_compare_with_there_is_no_ratio(groups: list[list[Row]]) -> None:
    compared = table.compared(groups, [True] * len(groups))
    assert [len(rows) for rows in compared] == [len(rows) for rows in groups]
    assert {row.ratio for rows in compared for row in rows} <= {None}


def test_csv_has_a_column_for_each_field_of_a_row_and_lists_joined_by_spaces() -> None:
    text = table.csv([some_row(), NOTHING])
    first, second = csv.DictReader(io.StringIO(text))
    assert list(first) == [name for name in Row.__struct_fields__ if name != "schema"]
    assert (first["output_tok_s"], first["valid"], first["reasons"]) == ("100.0", "True", "")
    assert (second["output_tok_s"], second["ratio"], second["unknown"]) == ("", "", "completed tokens_out")
    assert (first["details"], second["not_applicable"]) == ("", "throttled")
    assert second["details"].startswith("bench_ended: it ended with 1; completed: no number; ")


def test_without_rows_the_columns_are_the_same() -> None:
    assert list(table.frame([]).columns) == list(table.frame([some_row()]).columns)
    assert table.csv([]) == table.frame([]).to_csv(index=False)
    assert table.text([], []) == ""


def test_a_binding_is_told_of_where_there_was_something_to_bind() -> None:
    shown = table.text([some_run(binding="WRONG: rank 1 roams"), some_run(binding="not applicable: no GPU")], [])
    assert "  binding: WRONG: rank 1 roams" in shown
    assert "not applicable" not in shown
