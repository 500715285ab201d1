"""The whole way on real Slurm and real vLLM (its CPU build), held together by commands only."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import msgspec
import pytest

from tests.cluster.person import Person


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(person: Person) -> Iterator[None]:
    yield
    person.cluster.cancel_all()


def test_tiny_comes_back_as_a_valid_row_for_each_point(person: Person) -> None:
    run_id = person.submits("tiny")
    submitted = person.run_of(run_id)
    serve_job, sweep_job = submitted["jobs"]["serve"], submitted["jobs"]["sweep"]
    rendered = person.does("render", "tiny", "--run-id", run_id).stdout
    assert rendered == (person.runs / run_id / "serve.sbatch").read_text()
    assert (
        person.does("render", "tiny", "--run-id", run_id, "--script", "sweep.sbatch").stdout
        == (person.runs / run_id / "sweep.sbatch").read_text()
    )

    log = person.does("logs", "-f", serve_job).stdout
    assert "Initializing a V1 LLM engine" in log

    run = person.waits_for(sweep_job, "done", "failed")
    assert run["state"] == "done", run
    person.waits_for_an_empty_queue()
    collected = person.asks("collect", serve_job)
    assert [run["run_id"] for run in collected["runs"]] == [run_id]
    assert [(row["concurrency"], row["valid"], row["reasons"]) for row in collected["rows"]] == [
        (1, True, []),
        (4, True, []),
        (8, True, []),
    ]
    for row in collected["rows"]:
        bench = json.loads(
            (
                person.cluster.home / "results" / run_id / "points" / f"c{row['concurrency']:04d}.r1" / "bench.json"
            ).read_text()
        )
        assert bench["total_output_tokens"] == 2 * row["concurrency"] * 64
        assert row["output_tok_s"] == bench["output_throughput"] > 0


def test_a_collection_while_the_run_goes_on_and_one_after_it_agree_with_the_run(person: Person) -> None:
    run_id = person.submits("tiny", "--set", "bench.concurrency=[1, 2]")
    person.waits_for(run_id, "ready", "measuring", "done")
    during = person.asks("collect", run_id)
    assert during["runs"][0]["state"] in ("ready", "measuring", "done")
    person.waits_for(run_id, "done")
    after = person.asks("collect", run_id)
    assert [row["valid"] for row in after["rows"]] == [True, True]
    here = person.cluster.home / "results" / run_id
    there = person.runs / run_id
    secrets = {"api.key"}
    names = {path.relative_to(there) for path in there.rglob("*") if path.is_file()}
    for name in names:
        assert (name.name in secrets) != (here / name).exists()
        assert name.name in secrets or (here / name).read_bytes() == (there / name).read_bytes()


@pytest.mark.parametrize("victim", ["the main process", "VLLM::EngineCore"])
def test_the_engine_killed_in_the_middle_is_a_failed_run_with_its_kept_points(person: Person, victim: str) -> None:
    points = list(range(1, 13))     # more than can be measured until it is killed
    run_id = person.submits("tiny", "--set", f"bench.concurrency={points}")
    person.cluster.wait_until(lambda: person.run_of(run_id)["points_done"] >= 1, 240, "the first point")
    engine = person.engine_of(run_id)
    target = (
        engine[0]
        if victim == "the main process"
        else next(process for process in engine if " ".join(process.cmdline()).startswith(victim))
    )
    killed = time.time()
    target.kill()

    run = person.waits_for(run_id, "failed", timeout_s=30)
    events = msgspec.json.Decoder().decode_lines((person.runs / run_id / "events/serve.jsonl").read_bytes())
    told = next(event for event in events if event["event"] == "failed")
    print(f"{victim}: failed {told['time'] - killed:.2f} s after the kill: {told['reason']}")
    assert "died" in run["reason"] or "signal SIGKILL" in run["reason"]
    person.waits_for_an_empty_queue()
    rows = person.asks("collect", run_id)["rows"]
    assert 1 <= len(rows) < len(points)
    assert [row["reasons"] for row in rows] == [[]] * len(rows)


_KILLS_ITS_PARENT = """#!/bin/bash
# Stands before the real sbatch: the second submission never happens, and its submitter is killed.
case "$*" in *sweep.sbatch) kill -KILL "$PPID"; exit 1;; esac
exec /usr/bin/sbatch "$@"
"""


def test_a_submitter_killed_between_the_two_jobs_leaves_nothing_running_for_longer_than_idle_timeout(
    person: Person,
) -> None:
    tools = person.cluster.home / "tools"
    person.cluster.run(["mkdir", "-p", tools])
    person.cluster.run(["tee", tools / "sbatch"], input=_KILLS_ITS_PARENT)
    person.cluster.run(["chmod", "+x", tools / "sbatch"])
    cut = person.does(
        "submit",
        "tiny",
        "--set",
        "resources.idle_timeout=5s",
        check=False,
        env={"PATH": f"{tools}:{person.cluster.environment['PATH']}"},
    )
    assert cut.returncode == -9
    run = person.asks("status")["runs"][0]
    assert list(run["jobs"]) == ["serve"]
    assert "cut off" in run["reason"]

    run = person.waits_for(run["run_id"], "failed")
    assert "idle_timeout" in run["reason"]
    person.waits_for_an_empty_queue()


def test_a_rendered_run_directory_can_be_sent_by_hand(person: Person) -> None:
    directory = person.does("render", "tiny", "--set", "bench.concurrency=[2]", "-o", "mine").stdout.strip()
    # What the shell has set for other jobs must not change this one.
    person.cluster.run([f"{directory}/send.sh"], env={"SBATCH_TIMELIMIT": "1", "SBATCH_GPUS": "2"})
    run = person.waits_for(directory, "done", "failed")
    assert run["state"] == "done", run
    assert person.asks("collect", directory)["rows"][0]["valid"]


def test_cancel_ends_both_jobs_and_keeps_the_run(person: Person) -> None:
    run_id = person.submits("tiny")
    person.waits_for(run_id, "loading")
    assert person.asks("cancel", run_id)["runs"][0]["state"] == "cancelled"
    person.waits_for_an_empty_queue()
    assert person.run_of(run_id)["state"] == "cancelled"
    assert "has ended already" in person.does("cancel", run_id).stderr


def test_a_sweep_set_free_by_a_cancelled_serve_job_leaves_by_itself(person: Person) -> None:
    for node in ("nid001", "nid002", "nid003"):
        person.cluster.admin(["scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test"])
    blocker = person.cluster.run(["sbatch", "--parsable", "--gpus=3", "--wrap=sleep 600"]).stdout.strip()
    try:
        run_id = person.submits("tiny", "--set", "resources.gpus=2")
        jobs = person.run_of(run_id)["jobs"]
        person.cluster.run(["scancel", jobs["serve"]])
        person.cluster.wait_until(
            lambda: [job.job_id for job in person.cluster.queue()] == [blocker], 60, "the sweep to leave"
        )
        assert "CANCELLED" in (person.runs / run_id / "events/sweep.jsonl").read_text()
        assert person.waits_for(run_id, "cancelled", timeout_s=20)
    finally:
        person.cluster.run(["scancel", blocker])
        for node in ("nid001", "nid002", "nid003"):
            person.cluster.admin(["scontrol", "update", f"NodeName={node}", "State=RESUME"])
