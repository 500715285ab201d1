"""Who measures, on real Slurm with the simulated engine: late, lost and superseded sweeps lose and double nothing.

Each way is tried TRIALS times: three here, more by `make soak`.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator

import psutil
import pytest

from tests.cluster.person import Person

TRIALS = int(os.environ.get("ISAMBARD_SERVE_TRIALS", "3"))
POINTS = (1, 2, 3, 4, 5)
QUICK = (
    "--set", f"bench.concurrency={list(POINTS)}", "--set", "bench.osl=1024",
    "--set", "resources.sweep_grace=2s", "--set", "resources.sweep_silence=5s",
)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(simulating: Person) -> Iterator[None]:
    yield
    simulating.cluster.cancel_all()


def _events(person: Person, run_id: str, writer: str) -> list[dict[str, str]]:
    path = person.runs / run_id / "events" / f"{writer}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _sweep_process(person: Person, run_id: str) -> psutil.Process | None:
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "submitit.core._submit" in command and str(person.runs / run_id / "submitit") in command:
            return process
    return None


def _assert_each_point_once(person: Person, run_id: str) -> None:
    run = person.waits_for(run_id, "done", "failed", timeout_s=120)
    assert run["state"] == "done", run
    told = [event["point"] for writer in ("sweep", "inside") for event in _events(person, run_id, writer)
            if event["event"] == "point"]
    assert sorted(told) == [f"c{concurrency:04d}.r1" for concurrency in POINTS]
    rows = person.asks("collect", run_id)["rows"]
    assert [(row["concurrency"], row["valid"]) for row in rows] == [(concurrency, True) for concurrency in POINTS]
    person.waits_for_an_empty_queue()


@pytest.fixture
def one_node_only(simulating: Person) -> Iterator[None]:
    """A cluster in which a sweep finds no place beside a serve job that has a whole node."""
    others = ("nid002", "nid003", "nid004")
    for node in others:
        simulating.cluster.admin(["scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test"])
    yield
    for node in others:  # refused for one that a test has resumed itself
        simulating.cluster.admin(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)


@pytest.mark.parametrize("trial", range(TRIALS))
@pytest.mark.usefixtures("one_node_only")
def test_the_points_of_a_sweep_that_never_starts_are_measured_from_inside(simulating: Person, trial: int) -> None:
    run_id = simulating.submits("tiny", *QUICK, "--set", "resources.gpus=4")
    _assert_each_point_once(simulating, run_id)
    assert not _events(simulating, run_id, "sweep")


@pytest.mark.parametrize("trial", range(TRIALS))
@pytest.mark.usefixtures("one_node_only")
def test_a_late_sweep_finds_the_points_taken_and_leaves(simulating: Person, trial: int) -> None:
    # Points that take long enough for Slurm to start the sweep meanwhile.
    longer = ("--set", "bench.prompts_per_concurrency=10")
    run_id = simulating.submits("tiny", *QUICK, *longer, "--set", "resources.gpus=4")
    simulating.cluster.wait_until(lambda: _events(simulating, run_id, "inside"), 60, "the takeover")
    simulating.cluster.admin(["scontrol", "update", "NodeName=nid002", "State=RESUME"])
    simulating.cluster.wait_until(lambda: _events(simulating, run_id, "sweep"), 60, "the late sweep")
    _assert_each_point_once(simulating, run_id)
    assert [event["event"] for event in _events(simulating, run_id, "sweep")] == ["waiting", "left"]


@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_sweep_killed_at_some_point_is_taken_over(simulating: Person, trial: int) -> None:
    run_id = simulating.submits("tiny", *QUICK)
    done = random.randrange(len(POINTS) - 1)  # noqa: S311 - a trial, not a secret
    simulating.cluster.wait_until(
        lambda: len([event for event in _events(simulating, run_id, "sweep") if event["event"] == "point"]) >= done
        and any(event["event"] == "measuring" for event in _events(simulating, run_id, "sweep")),
        60, f"point {done}")
    victim = _sweep_process(simulating, run_id)
    assert victim is not None
    victim.kill()
    _assert_each_point_once(simulating, run_id)
    assert _events(simulating, run_id, "inside")[-1]["event"] == "finished"


@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_sweep_that_was_stopped_for_a_while_sees_that_it_was_superseded_and_leaves(
        simulating: Person, trial: int) -> None:
    run_id = simulating.submits("tiny", *QUICK)
    simulating.cluster.wait_until(
        lambda: any(event["event"] == "point" for event in _events(simulating, run_id, "sweep")), 60, "a point")
    sleeper = _sweep_process(simulating, run_id)
    assert sleeper is not None
    sleeper.suspend()
    simulating.cluster.wait_until(lambda: _events(simulating, run_id, "inside"), 60, "the takeover")
    sleeper.resume()
    _assert_each_point_once(simulating, run_id)
    assert _events(simulating, run_id, "sweep")[-1]["event"] == "left"


def test_a_run_that_measures_inside_needs_no_second_job(simulating: Person) -> None:
    run_id = simulating.submits("tiny", *QUICK, "--placement", "inside")
    assert list(simulating.run_of(run_id)["jobs"]) == ["serve"]
    _assert_each_point_once(simulating, run_id)


def test_a_killed_watcher_is_a_failed_run_that_keeps_no_row_of_a_dead_engine(simulating: Person) -> None:
    run_id = simulating.submits("tiny", *QUICK)
    simulating.cluster.wait_until(
        lambda: any(event["event"] == "point" for event in _events(simulating, run_id, "sweep")), 60, "a point")
    simulating.job_of(run_id)[0].kill()
    run = simulating.waits_for(run_id, "failed", timeout_s=60)
    assert run["reason"].startswith("Slurm: ")
    simulating.waits_for_an_empty_queue()
    rows = simulating.asks("collect", run_id)["rows"]
    assert 1 <= len(rows) < len(POINTS)
    assert all(row["valid"] for row in rows)


def test_a_job_whose_id_was_never_heard_is_cancelled_too(simulating: Person) -> None:
    tools = simulating.cluster.home / "deaf"
    simulating.cluster.run(["mkdir", "-p", tools])
    simulating.cluster.run(["tee", tools / "sbatch"], input=_SUBMITS_AND_KILLS)
    simulating.cluster.run(["chmod", "+x", tools / "sbatch"])
    cut = simulating.does("submit", "tiny", *QUICK, check=False,
                          env={"PATH": f"{tools}:{simulating.cluster.environment['PATH']}"})
    assert cut.returncode == -9
    assert simulating.cluster.queue()
    simulating.does("cancel", "latest")
    simulating.waits_for_an_empty_queue()


_SUBMITS_AND_KILLS = """#!/bin/bash
# Slurm takes the job, and nobody hears its id.
/usr/bin/sbatch "$@"
kill -KILL "$PPID"
"""
