"""Ladders on real Slurm with the simulated engine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.cluster.person import Person

QUICK = ("--set", "bench.concurrency=[1, 2]", "--set", "bench.osl=512")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(simulating: Person) -> Iterator[None]:
    yield
    simulating.cluster.cancel_all()


def test_rungs_run_one_after_another_and_are_compared_with_the_first(simulating: Person) -> None:
    rungs = simulating.starts("tiny", "tiny", "tiny", *QUICK)
    for rung in rungs:
        simulating.waits_for(rung, "done", timeout_s=120)
    collected = simulating.asks("collect", "--ladder", rungs[1])
    assert [run["run_id"] for run in collected["runs"]] == rungs
    assert {run["ladder"] for run in collected["runs"]} == {rungs[0]}
    assert collected["simulated"]
    assert max(row["ratio"] for row in collected["rows"] if row["run_id"] == rungs[0]) == 1.0
    assert all(row["ratio"] is not None for row in collected["rows"])
    simulating.waits_for_an_empty_queue()
    jobs = [simulating.cluster.show(simulating.run_of(rung)["jobs"]["serve"]) for rung in rungs]
    for before, after in pairwise(jobs):
        assert before["EndTime"] <= after["StartTime"]


def test_cancelling_a_rung_in_the_middle_starts_nothing_and_ladder_empties_the_queue(simulating: Person) -> None:
    rungs = simulating.starts("tiny", "tiny", "tiny", *QUICK, "--set", "bench.osl=100000",
                              "--set", "engine.args.max-model-len=200000")
    first, second, third = (simulating.run_of(rung)["jobs"] for rung in rungs)
    simulating.waits_for(rungs[0], "measuring")
    simulating.asks("cancel", rungs[1])
    assert simulating.run_of(rungs[1])["state"] == "cancelled"
    # One pass of the scheduler later than whatever it would have started.
    probe = simulating.cluster.run(["sbatch", "--parsable", "--gpus=1", "--wrap=true"]).stdout.strip()
    simulating.cluster.wait_until(lambda: probe not in {job.job_id for job in simulating.cluster.queue()}, 60, "a job")
    queue = {job.job_id: job.state for job in simulating.cluster.queue() if job.state != "COMPLETING"}
    assert queue == {first["serve"]: "RUNNING", first["sweep"]: "RUNNING", third["serve"]: "PENDING",
                     third["sweep"]: "PENDING"}

    simulating.asks("cancel", "--ladder", second["serve"])
    simulating.waits_for_an_empty_queue()
    assert [simulating.run_of(rung)["state"] for rung in rungs] == ["cancelled"] * 3


def test_the_rung_behind_a_cancelled_one_still_has_its_turn(simulating: Person) -> None:
    rungs = simulating.starts("tiny", "tiny", "tiny", *QUICK)
    simulating.asks("cancel", rungs[1])
    simulating.waits_for(rungs[2], "done", timeout_s=120)
    assert simulating.run_of(rungs[0])["state"] == "done"
    simulating.waits_for_an_empty_queue()


_REFUSES_THE_THIRD = """#!/bin/bash
count=$(cat "$HOME/refusing/count" 2>/dev/null || echo 0)
echo $((count + 1)) > "$HOME/refusing/count"
[ "$count" -lt 2 ] || { echo "sbatch: error: no more today" >&2; exit 1; }
exec /usr/bin/sbatch "$@"
"""


def test_a_rung_that_slurm_refuses_takes_back_those_before_it(simulating: Person) -> None:
    tools = simulating.cluster.home / "refusing"
    simulating.cluster.run(["mkdir", "-p", tools])
    simulating.cluster.run(["tee", tools / "sbatch"], input=_REFUSES_THE_THIRD)
    simulating.cluster.run(["chmod", "+x", tools / "sbatch"])
    refused = simulating.does("submit", "tiny", "tiny", check=False,
                              env={"PATH": f"{tools}:{simulating.cluster.environment['PATH']}"})
    assert refused.returncode == 3
    assert "no more today" in refused.stderr
    simulating.waits_for_an_empty_queue()
    assert {run["state"] for run in simulating.asks("status")["runs"][:2]} == {"failed"}


def test_rungs_in_one_job_run_on_one_node_each_as_a_run_of_its_own(simulating: Person) -> None:
    # Long enough to be cancelled while it runs.
    some = ("--set", "bench.concurrency=[1, 2]", "--set", "bench.osl=8192", "--set", "engine.args.max-model-len=16384")
    rungs = simulating.starts("tiny", "tiny", "tiny", "tiny", *some, "--same-node")
    (job,) = {simulating.run_of(rung)["jobs"]["serve"] for rung in rungs}
    assert [queued.job_id for queued in simulating.cluster.queue()] == [job]
    simulating.asks("cancel", rungs[1])
    # The first dies, the second never starts, the third is cancelled while it runs.
    simulating.waits_for(rungs[0], "measuring")
    simulating.cluster.wait_until(lambda: "its job runs" in str(simulating.run_of(rungs[3])["reason"]), 30, "its word")
    simulating.engine_of(rungs[0])[0].kill()
    assert simulating.waits_for(rungs[0], "failed", timeout_s=60)
    simulating.waits_for(rungs[2], "loading", "ready", "measuring", timeout_s=60)
    assert simulating.run_of(job)["run_id"] == rungs[2]
    simulating.asks("cancel", rungs[2])
    simulating.waits_for(rungs[3], "done", timeout_s=120)
    simulating.waits_for_an_empty_queue()

    collected = simulating.asks("collect", "--ladder", job)
    assert [(run["run_id"], run["state"]) for run in collected["runs"]] == list(
        zip(rungs, ("failed", "cancelled", "cancelled", "done"), strict=True))
    assert {row["node"] for row in collected["rows"]} == {simulating.cluster.show(job)["NodeList"]}
    assert [row["valid"] for row in collected["rows"] if row["run_id"] == rungs[3]] == [True, True]
    assert not (simulating.runs / rungs[1] / "samples.jsonl").exists()


def test_cancelling_a_whole_ladder_in_one_job_ends_the_rung_that_runs_and_the_job(simulating: Person) -> None:
    long = ("--set", "bench.osl=100000", "--set", "engine.args.max-model-len=200000")
    rungs = simulating.starts("tiny", "tiny", *QUICK, *long, "--same-node")
    simulating.waits_for(rungs[0], "measuring")
    simulating.asks("cancel", "--ladder", rungs[1])
    simulating.waits_for_an_empty_queue()
    assert [simulating.run_of(rung)["state"] for rung in rungs] == ["cancelled"] * 2
