"""The run directory: files appear whole, names cannot leave it, and any job id leads to its run."""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path

import msgspec
import pytest

from isambard_serve import run as runs
from isambard_serve.errors import ServeError, UsageError
from isambard_serve.records import Event, Jobs, Row
from isambard_serve.run import RunDir, Runs
from tests.unit.helpers import (
    RUN_ID,
    RUNG_IDS,
    keep_facts,
    keep_row,
    ladder_plans,
    note,
    small_plan,
    some_facts,
    some_row,
    submitted,
    written_run,
)


def test_a_run_id_tells_the_time_in_utc_and_the_recipe_and_is_never_the_same() -> None:
    first, second = (runs.new_id("dp4-humming", now=1795975978) for _ in range(2))
    assert first.startswith("20261129-181258-dp4-humming-")
    assert first != second
    assert runs.checked_id(first) == first


@pytest.mark.parametrize("name", [
    "", ".", "..", "../x", "/etc", f"../{RUN_ID}", f"{RUN_ID}/..", f"{RUN_ID}\n", "20261129-181258-a/b-3f2a",
    "20261129-181258-../x-3f2a", "20261129-181258--3f2a", "20261129-181258-x-3F2A", "20261129-181258-x", "-rf",
    "20261129-181258-a b-3f2a", "20261129-181258-a\x00-3f2a", "２0261129-181258-x-3f2a",
])
def test_what_has_not_the_form_of_a_run_id_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is no run id\n.*20261129-181258-RECIPE-3f2a"):
        runs.checked_id(name)
    with pytest.raises(UsageError):
        Runs(tmp_path, "s").directory(name)


def test_points_sort_by_name_as_by_concurrency() -> None:
    assert [runs.point_name(4, 1), runs.point_name(512, 2), runs.point_name(2752, 10)] == [
        "c0004.r1", "c0512.r2", "c2752.r10"]


def test_a_file_is_replaced_whole_and_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    runs.write_whole(path, "new é")
    assert path.read_text(encoding="utf-8") == "new é"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    runs.write_whole(path, b"\x00", mode=0o700)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert not list(tmp_path.glob(".*"))


def test_a_write_that_fails_leaves_the_old_file_and_no_temporary_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "f").write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        runs.write_whole(folder / "f", "new")
    assert caught.value.filename == str(folder / "f")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"f": "old"}


def test_lines_are_appended_and_a_torn_last_one_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    events = [Event(time=float(n), writer="serve", event="note", reason="two\nlines\r\u2028") for n in range(3)]
    for event in events:
        runs.append_line(path, event)
    assert runs.read_lines(path, Event) == events
    whole = path.read_bytes()
    for cut in (1, 5, len(whole) // 3 - 1):
        path.write_bytes(whole[:-cut])
        assert runs.read_lines(path, Event) == events[:-1]
    path.write_bytes(whole[:10])
    assert runs.read_lines(path, Event) == []


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert runs.read_lines(tmp_path / "none", Event) == []


def test_a_run_directory_is_made_once_and_for_the_owner_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / RUN_ID)
    run.create()
    for folder in (run.path, run.submitit, run.events, run.engine, run.points, run.claims):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with pytest.raises(UsageError, match="this run exists already"):
        run.create()
    assert run.run_id == RUN_ID


def test_events_of_all_writers_are_told_by_time(tmp_path: Path) -> None:
    run = written_run(small_plan(tmp_path))
    note(run, Event(time=3, writer="serve", event="ready"))
    note(run, Event(time=1, writer="submit", event="submitted"))
    note(run, Event(time=2, writer="sweep", event="waiting"))
    assert [event.event for event in run.read_events()] == ["submitted", "waiting", "ready"]
    assert [event.event for event in run.read_events(["serve"])] == ["ready"]


def test_an_event_is_stamped_with_the_time(tmp_path: Path) -> None:
    run = written_run(small_plan(tmp_path))
    before = time.time()
    run.record("serve", "started", job_id="5", reason="why", point="c0001.r1")
    (event,) = run.read_events()
    assert before <= event.time <= time.time()
    assert event == Event(time=event.time, writer="serve", event="started", job_id="5", reason="why", point="c0001.r1")


def test_job_ids_are_those_of_the_submission_in_the_order_of_submission(tmp_path: Path) -> None:
    run = written_run(small_plan(tmp_path))
    assert (run.read_jobs(), run.job_ids()) == (Jobs(), {})
    runs.write_whole(run.jobs, msgspec.json.encode(submitted()))
    assert list(run.job_ids().items()) == [("serve", "101"), ("sweep", "102")]


def test_a_run_that_was_sent_by_hand_has_the_job_ids_that_its_jobs_wrote(tmp_path: Path) -> None:
    run = written_run(small_plan(tmp_path))
    run.record("sweep", "waiting", job_id="302")
    assert run.job_ids() == {"sweep": "302"}
    run.record("serve", "started", job_id="301")
    run.record("serve", "note")
    assert run.job_ids() == {"serve": "301", "sweep": "302"}


def test_a_submission_that_was_cut_off_is_completed_by_what_its_job_wrote(tmp_path: Path) -> None:
    run = written_run(small_plan(tmp_path))
    runs.write_whole(run.jobs, msgspec.json.encode(submitted(serve=None, sweep=None, complete=False)))
    assert run.job_ids() == {}
    run.record("serve", "started", job_id="301")
    assert run.job_ids() == {"serve": "301"}


def test_each_log_has_its_place(tmp_path: Path) -> None:
    run = written_run(small_plan(tmp_path))
    assert run.log("engine") == run.path / "engine" / "engine.log"
    assert run.log("serve") == run.path / "serve.log"
    assert not run.log("sweep").exists()
    for number, name in enumerate(("301_0_log.out", "302_0_log.out")):
        (run.submitit / name).touch()
        os.utime(run.submitit / name, (number, number))
    assert run.log("sweep") == run.submitit / "302_0_log.out"


def test_rows_are_read_by_concurrency_and_repeat_and_half_written_ones_are_not(tmp_path: Path) -> None:
    run = written_run(small_plan(tmp_path))
    for concurrency, repeat in ((2048, 1), (16, 2), (16, 1)):
        keep_row(run, some_row(concurrency=concurrency, repeat=repeat))
    (run.points / "c0016.r1" / ".row.json.0000.tmp").write_text("{")
    (run.points / "c9999.r1").mkdir()
    assert [(row.concurrency, row.repeat) for row in run.read_rows()] == [(16, 1), (16, 2), (2048, 1)]


def test_a_points_copy_under_another_name_is_no_second_measurement(tmp_path: Path) -> None:
    run = written_run(small_plan(tmp_path))
    keep_row(run, some_row(concurrency=2))
    for name in ("c0002.r1 (copy)", "c0004.r1"):
        shutil.copytree(run.points / "c0002.r1", run.points / name)
    assert [row.concurrency for row in run.read_rows()] == [2]
    assert sorted(path.parent.name for path in run.kept()) == ["c0002.r1", "c0004.r1"]  # the second counts as not valid


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run_id": "x"}'])
def test_a_damaged_row_is_left_out_and_hides_no_other(tmp_path: Path, content: str) -> None:
    run = written_run(small_plan(tmp_path))
    for concurrency in (1, 2):
        keep_row(run, some_row(concurrency=concurrency))
    (run.points / "c0001.r1" / "row.json").write_text(content)
    assert [row.concurrency for row in run.read_rows()] == [2]


def test_a_newest_run_whose_plan_is_damaged_is_the_latest_all_the_same(tmp_path: Path) -> None:
    run = written_run(small_plan(tmp_path))
    run.plan.write_text("{")
    assert Runs(tmp_path, "s").find("latest").path == run.path


def test_a_run_is_found_by_its_id_by_any_job_id_and_by_its_path(tmp_path: Path, isolated: Path) -> None:
    run = written_run(small_plan(tmp_path / "runs"))
    all_runs = Runs(tmp_path / "runs", "pretend")
    all_runs.remember("101", RUN_ID)
    all_runs.remember("102", RUN_ID)
    for name in (RUN_ID, "101", "102", str(run.path), f"../runs/{RUN_ID}"):
        assert all_runs.find(name).path == run.path
    assert stat.S_IMODE((tmp_path / "runs" / ".jobs").stat().st_mode) == 0o700


def test_the_same_job_id_at_another_site_is_another_job(tmp_path: Path) -> None:
    written_run(small_plan(tmp_path))
    Runs(tmp_path, "pretend").remember("101", RUN_ID)
    with pytest.raises(UsageError, match="no run has the job 101"):
        Runs(tmp_path, "elsewhere").find("101")


@pytest.mark.parametrize("name", ["7", "..", "../x", RUN_ID, "-x", "no such run"])
def test_a_run_that_is_not_there_is_an_error_with_a_remedy(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        Runs(tmp_path / "runs", "pretend").find(name)
    assert caught.value.remedy


def test_the_newest_runs_are_listed_first_and_nothing_else_is(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    assert Runs(folder, "s").newest(3) == []
    ids = [f"2026112{day}-181258-small-3f2a" for day in range(1, 6)]
    for run_id in ids:
        RunDir(folder / run_id).create()
        (folder / run_id / "plan.json").write_text("{}")
    RunDir(folder / "20261129-181258-cut-off-3f2a").create()
    (folder / ".jobs").mkdir()
    (folder / "notes.txt").touch()
    assert [run.run_id for run in Runs(folder, "s").newest(3)] == ids[:-4:-1]


def test_runs_of_the_same_second_are_listed_from_the_one_written_last(tmp_path: Path) -> None:
    later = "20261129-181259-a-3f2a"
    for number, run_id in enumerate([later, *(f"20261129-181258-{name}-3f2a" for name in "cab")]):
        run = RunDir(tmp_path / run_id)
        run.create()
        run.plan.write_text("{}")
        os.utime(run.plan, ns=(number, number))
    assert [run.run_id[16] for run in Runs(tmp_path, "s").newest(9)] == ["a", "b", "a", "c"]
    assert [run.run_id[16] for run in Runs(tmp_path, "s").newest(2)] == ["a", "b"]
    assert Runs(tmp_path, "s").newest(1)[0].run_id == later


def test_all_runs_are_counted_and_nothing_else_is(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    assert Runs(folder, "s").count() == 0
    for plan in ladder_plans(folder):
        written_run(plan)
    (folder / ".jobs").mkdir()
    (folder / "notes.txt").touch()
    assert Runs(folder, "s").count() == 3


@pytest.mark.parametrize("made", [False, True])
def test_without_a_run_there_is_no_latest_and_how_to_begin_is_said(tmp_path: Path, *, made: bool) -> None:
    folder = tmp_path / "runs"
    if made:
        folder.mkdir()
    with pytest.raises(UsageError, match="there are no runs yet") as caught:
        Runs(folder, "s").find("latest")
    assert caught.value.where == str(folder)
    assert caught.value.remedy == "isambard-serve submit RECIPE"


def test_the_newest_run_is_the_latest(tmp_path: Path) -> None:
    for plan in ladder_plans(tmp_path):
        written_run(plan).record("serve", "done")
    alone = written_run(small_plan(tmp_path))
    assert Runs(tmp_path, "s").find("latest").path == alone.path


def test_of_a_ladder_the_rung_that_runs_or_ran_last_is_the_latest(tmp_path: Path) -> None:
    all_runs = Runs(tmp_path, "s")
    rungs = [written_run(plan) for plan in ladder_plans(tmp_path)]
    for rung in rungs:
        rung.record("submit", "submitted")
    assert all_runs.find("latest").run_id == RUNG_IDS[0]
    rungs[0].record("serve", "started")
    assert all_runs.find("latest").run_id == RUNG_IDS[0]
    rungs[0].record("serve", "done")
    rungs[1].record("serve", "started")
    assert all_runs.find("latest").run_id == RUNG_IDS[1]
    # Cancelled before its turn: it never ran.
    rungs[2].record("cancel", "cancelled")
    rungs[1].record("serve", "done")
    assert all_runs.find("latest").run_id == RUNG_IDS[1]
    assert [rung.run_id for rung in all_runs.ladder("latest")] == list(RUNG_IDS[:3])


def test_a_job_of_this_machine_leads_to_its_run(tmp_path: Path) -> None:
    run = written_run(small_plan(tmp_path))
    Runs(tmp_path, "s").remember("local-123-1795975978", RUN_ID)
    assert Runs(tmp_path, "s").find("local-123-1795975978").path == run.path
    with pytest.raises(UsageError, match="no run has the job local-123-0"):
        Runs(tmp_path, "s").find("local-123-0")


def test_a_rung_leads_to_its_whole_ladder_in_order_and_any_other_run_to_itself(tmp_path: Path) -> None:
    for plan in ladder_plans(tmp_path):
        written_run(plan)
    alone = written_run(small_plan(tmp_path))
    all_runs = Runs(tmp_path, "s")
    for name in RUNG_IDS[:3]:
        assert tuple(run.run_id for run in all_runs.ladder(name)) == RUNG_IDS[:3]
    assert [run.path for run in all_runs.ladder(RUN_ID)] == [alone.path]


def test_a_line_that_was_torn_by_a_full_disk_takes_only_the_next_one_with_it(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    first, torn, spoilt, last = (msgspec.json.encode(Event(time=float(n), writer="serve", event="note", reason="é"))
                                 for n in range(4))
    for cut in range(1, len(torn)):
        path.write_bytes(first + b"\n" + torn[:cut] + spoilt + b"\n" + last + b"\n")
        assert [event.time for event in runs.read_lines(path, Event)] == [0, 3]


def test_a_line_of_another_kind_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text('{"time": 1, "writer": "nobody", "event": "x"}\n[]\n{"time": 2, "writer": "serve", "event": "x"}\n')
    assert [event.time for event in runs.read_lines(path, Event)] == [2]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run_id": "x"}', b'{"run_id": "\xff',
                                     b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}"])
def test_a_record_that_cannot_be_understood_is_an_error_that_names_its_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "row.json"
    path.write_bytes(content)
    with pytest.raises(ServeError, match="cannot be understood") as caught:
        runs.read_record(path, Row)
    assert caught.value.where == str(path)
    assert caught.value.remedy
    with pytest.raises(FileNotFoundError):
        runs.read_record(tmp_path / "none", Row)
    path.write_bytes(content + b"\n")
    assert runs.read_lines(path, Row) == []


def test_what_is_written_once_is_never_changed(isolated: Path) -> None:
    path = isolated / "f"
    runs.write_once(path, "first")
    with pytest.raises(FileExistsError):
        runs.write_once(path, "second")
    assert path.read_text() == "first"
    assert [each.name for each in isolated.iterdir()] == ["f"]


def test_the_engines_facts_are_read_by_rank_and_damaged_or_half_written_ones_are_not(tmp_path: Path) -> None:
    run = written_run(small_plan(tmp_path))
    assert run.read_facts() == []
    ranks = [some_facts(pid=pid, data_parallel_rank=dp, rank=rank) for pid, dp, rank in ((9, 1, 0), (10, 0, 1))]
    for facts in (*ranks, some_facts(pid=8, rank=None, data_parallel_rank=None, roles=("api_server",))):
        keep_facts(run, facts)
    (run.facts / "11.json").write_text("{")
    (run.facts / "12.json.1.tmp").write_text("")
    assert [facts.pid for facts in run.read_facts()] == [8, 10, 9]
