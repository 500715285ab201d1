"""What a run is doing: from its files, and from Slurm no oftener than the site allows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from isambard_serve import local, status, table
from isambard_serve.audit import Audit
from isambard_serve.errors import HostError
from isambard_serve.plan import Plan
from isambard_serve.records import Event, Jobs, Run, SubmittedJob
from isambard_serve.run import RunDir, write_whole
from isambard_serve.slurm import JobState, Slurm
from tests.unit.helpers import (
    RUN_ID,
    RUNG_IDS,
    FakeSlurm,
    Shown,
    keep_row,
    ladder_plans,
    note,
    pretend_site,
    ready,
    said,
    small_plan,
    some_row,
    submitted,
    written_run,
)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return small_plan(tmp_path / "runs")


@pytest.fixture
def run(plan: Plan) -> RunDir:
    """A run that was submitted."""
    run = written_run(plan)
    write_whole(run.jobs, msgspec.json.encode(submitted()))
    run.record("submit", "submitted")
    return run


def test_a_run_is_told_from_its_files_alone_when_slurm_is_not_to_be_asked(run: RunDir) -> None:
    read = status.read(run)
    assert read == Run(run_id=RUN_ID, recipe="small", ladder=None, site="pretend", simulated=False, state="submitted",
                       reason=None, jobs={"serve": "101", "sweep": "102"}, node_hours=None, node_hours_by="clock",
                       directory=str(run.path), points_done=0, points_planned=2, points_invalid=0, binding=None,
                       url=None, key_file=None, verdict=None)


def test_where_people_are_served_is_told_while_they_are(tmp_path: Path) -> None:
    served = written_run(small_plan(tmp_path / "served", placement="none", points=()))
    ready(served, "http://10.253.0.1:4711")
    told = status.read(served)
    assert (told.state, told.url, told.key_file) == ("ready", "http://10.253.0.1:4711", str(served.key))
    assert f"  http://10.253.0.1:4711, key in {served.key}" in table.text([told], []).splitlines()
    served.record("serve", "done")
    assert status.read(served).url is None


def test_a_benchmarks_own_engine_is_not_offered_to_people(run: RunDir) -> None:
    ready(run)
    assert (status.read(run).state, status.read(run).url) == ("ready", None)


def test_how_the_binding_came_out_is_told_in_one_line(run: RunDir) -> None:
    write_whole(run.binding, msgspec.json.encode(Audit(verdict=False, findings=("rank 1 roams", "rank 2 roams"))))
    assert status.read(run).binding == "WRONG: rank 1 roams (and 1 more: binding.json)"
    write_whole(run.binding, "damaged")
    assert status.read(run).binding is None


def test_kept_points_are_counted(run: RunDir) -> None:
    keep_row(run, some_row(concurrency=1))
    (run.points / "c0002.r1").mkdir()
    assert status.read(run).points_done == 1


def test_slurm_says_why_a_run_waits(run: RunDir) -> None:
    fake = FakeSlurm(squeue="101|PENDING|Priority\n102|PENDING|Dependency\n")
    read = status.read(run, Slurm({}, fake))
    assert (read.state, read.reason) == ("submitted", "Slurm: PENDING (Priority)")


def test_slurm_is_not_asked_about_a_run_that_has_ended(run: RunDir) -> None:
    run.record("serve", "done", reason="2 points")
    (run.path.parent / ".jobs").mkdir()
    fake = FakeSlurm()
    assert status.read(run, Slurm({}, fake)).state == "done"
    assert "squeue" not in fake.commands()


def test_an_ended_runs_node_hours_are_the_accountings_once_it_knows_all_jobs(run: RunDir) -> None:
    (run.path.parent / ".jobs").mkdir()
    run.record("serve", "done")
    fake = FakeSlurm(sacct="101|COMPLETED|7200|2026-11-29T19:12:58|gres/gpu=1\n102|RUNNING|7200|Unknown|gres/gpu=1\n")
    assert status.read(run, Slurm({}, fake)).node_hours_by == "clock"
    fake.answers["sacct"] = ("101|COMPLETED|7200|2026-11-29T19:12:58|gres/gpu=1\n"
                             "102|COMPLETED|3600|2026-11-29T19:12:58|gres/gpu=1\n")
    assert status.read(run, Slurm({}, fake)).node_hours_by == "clock"
    os.utime(run.path.parent / ".jobs" / "sacct-asked", (0, 0))
    for slurm in (Slurm({}, fake), None):
        read = status.read(run, slurm)
        assert (read.node_hours_by, read.node_hours) == ("sacct", 0.75)
    assert fake.commands() == ["sacct", "sacct"]


@pytest.mark.parametrize("answer", [
    HostError("sacct gave no answer within 60 s"), said(stderr="accounting storage is disabled", returncode=1),
    "", "101|COMPLETED|7200|2026-11-29T19:12:58|gres/gpu=1\n"])
def test_as_long_as_the_accounting_does_not_know_all_jobs_the_runs_own_clock_counts(
        run: RunDir, answer: object) -> None:
    (run.path.parent / ".jobs").mkdir()
    now = time.time()
    note(run, Event(time=now - 3600, writer="serve", event="started"))
    note(run, Event(time=now, writer="serve", event="done"))
    fake = FakeSlurm(sacct=answer)
    for _ in range(3):
        read = status.read(run, Slurm({}, fake))
        assert (read.node_hours_by, read.node_hours) == ("clock", 0.25)
    assert fake.commands() == ["sacct"]
    assert not run.used.exists()


def test_a_run_that_goes_on_is_not_looked_up_in_the_accounting(run: RunDir) -> None:
    run.record("serve", "loading")
    fake = FakeSlurm(squeue="101|RUNNING|None\n102|PENDING|Dependency\n")
    assert status.read(run, Slurm({}, fake)).node_hours_by == "clock"
    assert fake.commands() == ["squeue"]


def test_a_run_of_which_nothing_was_ever_accepted_is_told_too(plan: Plan) -> None:
    run = written_run(plan)
    run.record("submit", "failed", reason="not submitted: no credit")
    fake = FakeSlurm()
    assert status.read(run, Slurm({}, fake)).state == "failed"
    # Without a job there is nothing to ask for; sacct would tell of all the jobs of the day.
    assert fake.calls == []


def test_a_rung_names_the_first_of_its_ladder(tmp_path: Path) -> None:
    runs = [written_run(plan) for plan in ladder_plans(tmp_path)]
    assert {status.read(run).ladder for run in runs} == {RUNG_IDS[0]}


def test_jobs_of_this_machine_are_looked_for_without_slurm(tmp_path: Path, child: Shown) -> None:
    run = written_run(small_plan(tmp_path, site=pretend_site(scheduler="local")))
    process = child("sleep", "60")
    job = local.job_id(process.pid)
    run.write_jobs(Jobs(jobs=(SubmittedJob(role="serve", job_id=job, time=1.0),), complete=True))
    run.record("serve", "loading")
    assert status.read(run).state == "loading"
    process.kill()
    process.wait()
    read = status.read(run)
    assert (read.state, read.reason) == ("failed", "FAILED (its process has ended)")
    assert read.node_hours_by == "clock"


def test_the_last_word_of_a_process_that_has_just_ended_counts(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written_run(small_plan(tmp_path, site=pretend_site(scheduler="local")))
    run.write_jobs(Jobs(jobs=(SubmittedJob(role="serve", job_id="local-1-1", time=1.0),), complete=True))
    run.record("serve", "measuring")

    def states(_: object, job_ids: Iterable[str]) -> dict[str, JobState]:
        run.record("serve", "done", reason="2 points")
        return {job: JobState(state="FAILED") for job in job_ids}

    monkeypatch.setattr(local.Local, "states", states)
    assert status.read(run).state == "done"


def test_slurm_is_asked_once_an_interval_however_often_a_run_is_read(run: RunDir) -> None:
    fake = FakeSlurm(squeue="101|RUNNING|None\n102|RUNNING|None\n")
    for _ in range(3):
        status.read(run, Slurm({}, fake))
    assert fake.commands() == ["squeue"]
    assert (run.path.parent / ".jobs" / "slurm.json").exists()


def test_slurms_end_of_a_job_that_said_nothing_is_the_runs_end(run: RunDir) -> None:
    run.record("serve", "loading")
    fake = FakeSlurm(squeue="", sacct="101|NODE_FAIL|0:0\n102|CANCELLED by 0|0:0\n")
    read = status.read(run, Slurm({}, fake))
    assert (read.state, read.reason) == ("failed", "Slurm: NODE_FAIL (0:0)")


def test_a_run_that_fell_silent_in_an_outage_is_unknown_until_it_shows_life(run: RunDir) -> None:
    run.record("serve", "loading")
    long_ago = time.time() - 3600
    os.utime(run.events / "serve.jsonl", (long_ago, long_ago))
    slurm = Slurm({}, FakeSlurm())
    assert status.read(run, slurm).state == "unknown"
    run.engine_log.write_text("still loading")
    assert status.read(run, slurm).state == "loading"


def test_node_hours_are_what_the_serve_job_has_held_of_its_node(run: RunDir) -> None:
    now = time.time()
    note(run, Event(time=now - 7200, writer="serve", event="started"))
    assert status.read(run).node_hours == pytest.approx(2 / 4, abs=0.01)
    note(run, Event(time=now - 3600, writer="serve", event="done"))
    assert status.read(run).node_hours == pytest.approx(1 / 4, abs=0.001)


def test_following_gives_what_is_there_and_what_comes_until_the_run_has_ended(run: RunDir) -> None:
    run.engine_log.write_bytes(b"one\n")
    seen = []
    for block in status.follow(run.engine_log, run, None, tick_s=0):
        seen.append(block)
        if len(seen) == 1:
            with open(run.engine_log, "ab") as log:
                log.write(b"two\n")
            run.record("serve", "done")
    assert b"".join(seen) == b"one\ntwo\n"


def test_following_waits_for_a_log_that_is_not_there_yet(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(_: float) -> None:
        run.engine_log.write_bytes(b"late\n")
        run.record("serve", "failed")

    monkeypatch.setattr("time.sleep", meanwhile)
    assert b"".join(status.follow(run.engine_log, run, None)) == b"late\n"


def test_following_a_cancelled_run_goes_on_to_its_last_words(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.record("serve", "loading")
    run.record("cancel", "cancelled")

    def meanwhile(_: float) -> None:
        run.engine_log.write_bytes(b"shut down\n")
        run.record("serve", "cancelled")

    monkeypatch.setattr("time.sleep", meanwhile)
    assert b"".join(status.follow(run.engine_log, run, None)) == b"shut down\n"


def test_following_waits_no_longer_than_a_while_for_last_words(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.record("serve", "loading")
    run.record("cancel", "cancelled")
    monkeypatch.setattr(status, "LAST_WORDS_S", 0.0)
    assert list(status.follow(run.engine_log, run, None)) == []


def test_following_ends_when_nobody_can_say_how_the_run_is(run: RunDir) -> None:
    write_whole(run.jobs, b"{}")
    run.engine_log.write_bytes(b"x")
    assert list(status.follow(run.engine_log, run, None)) == [b"x"]


def test_waiting_tells_each_change_once_and_returns_the_ended_run(
        run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: Iterator[Callable[[], object]] = iter([
        lambda: None,
        lambda: run.record("serve", "started"),
        lambda: run.record("serve", "note"),
        lambda: keep_row(run, some_row(concurrency=1)),
        lambda: run.record("serve", "done", reason="all"),
    ])
    monkeypatch.setattr("time.sleep", lambda _: next(steps)())
    told: list[tuple[str, int]] = []
    ended = status.wait(run, None, lambda now: told.append((now.state, now.points_done)))
    assert told == [("submitted", 0), ("started", 0), ("started", 1), ("done", 1)]
    assert (ended.state, ended.reason) == ("done", "all")


def test_a_search_has_no_number_of_points_to_come(tmp_path: Path) -> None:
    searching = small_plan(tmp_path / "runs", {"bench": {"isl": 8, "osl": 4, "concurrency": "saturate"}})
    assert status.read(written_run(searching)).points_planned is None
