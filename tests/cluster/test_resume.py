"""Runs that were lost in the middle of a point, on real Slurm with the simulated engine, and what resumes them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psutil
import pytest

from tests.cluster.person import Person

POINTS = (1, 2, 3)
WHOLE_NODES = ("--set", f"bench.concurrency={list(POINTS)}", "--set", "bench.osl=1024", "--set", "resources.gpus=4",
               "--set", "engine.args.max-model-len=4096")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(simulating: Person) -> Iterator[None]:
    yield
    simulating.cluster.cancel_all()


def _time_is_up(person: Person, job: str, _: str) -> None:
    person.cluster.admin(["scontrol", "update", f"JobId={job}", "EndTime=now+1"])


def _node_goes_down(person: Person, _: str, node: str) -> None:
    person.cluster.admin(["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test"])


def _cancelled_behind_our_back(person: Person, job: str, _: str) -> None:
    person.cluster.run(["scancel", job])


WAYS: dict[str, tuple[Callable[[Person, str, str], None], str]] = {
    "TIMEOUT": (_time_is_up, "failed"),
    "NODE_FAIL": (_node_goes_down, "failed"),
    "CANCELLED": (_cancelled_behind_our_back, "cancelled"),
}
"""What Slurm calls it → how it comes about, and what the run is then."""


def _read(person: Person, run_id: str, name: str) -> Any:
    return json.loads((person.runs / run_id / name).read_text())


def _told(person: Person, run_id: str) -> list[str]:
    """The points that were measured in the run itself, by its events."""
    return [json.loads(line)["point"] for writer in ("sweep", "inside")
            for path in [person.runs / run_id / "events" / f"{writer}.jsonl"] if path.exists()
            for line in path.read_text().splitlines() if json.loads(line)["event"] == "point"]


def test_a_run_that_was_lost_in_a_point_is_resumed_and_repeats_no_valid_one(simulating: Person) -> None:
    cluster = simulating.cluster
    lost: dict[str, str] = {}
    kept: dict[str, list[str]] = {}
    for way in WAYS:
        # One after another: a run that waited for its turn here would be done by then.
        run_id = lost[way] = simulating.submits("tiny", *WHOLE_NODES)
        cluster.wait_until(partial(_told, simulating, run_id), 120, f"a point of {way}")
        # Whatever point it is in, it does not get out of it.
        processes = simulating.job_of(run_id)
        processes[1].suspend()
        job, node = simulating.run_of(run_id)["jobs"]["serve"], _read(simulating, run_id, "node.json")["node"]
        WAYS[way][0](simulating, job, node)
        if way == "NODE_FAIL":  # and with it all that ran there
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    for way, run_id in lost.items():
        run = simulating.waits_for(run_id, WAYS[way][1], timeout_s=90)
        assert way in run["reason"] or way == "CANCELLED", run
        kept[way] = _told(simulating, run_id)
        assert 1 <= len(kept[way]) < len(POINTS)
    down = _read(simulating, lost["NODE_FAIL"], "node.json")["node"]
    cluster.admin(["scontrol", "update", f"NodeName={down}", "State=RESUME"], check=False)  # it may be back by itself
    simulating.waits_for_an_empty_queue()

    resumed = {way: simulating.submits("--resume", run_id) for way, run_id in lost.items()}
    for way, run_id in resumed.items():
        assert simulating.waits_for(run_id, "done", "failed", timeout_s=120)["state"] == "done"
        assert sorted([*kept[way], *_told(simulating, run_id)]) == [f"c{each:04d}.r1" for each in POINTS]
        rows = simulating.asks("collect", run_id)["rows"]
        assert [(row["concurrency"], row["valid"]) for row in rows] == [(each, True) for each in POINTS]
        for row in rows:
            # Each row says who measured it and where, and so does the benchmark's own result beside it.
            point = f"c{row['concurrency']:04d}.r1"
            assert row["run_id"] == (lost[way] if point in kept[way] else run_id)
            assert row["node"] == _read(simulating, row["run_id"], "node.json")["node"]
            assert _read(simulating, run_id, f"points/{point}/bench.json")["run_id"] == row["run_id"]
