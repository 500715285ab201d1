"""A serve job that lands on a bad node starts no engine there: it is sent again, once, and that node is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.person import Person
from tests.cluster.pretend import PretendCluster

# The first node that it runs on has memory errors.
NVIDIA_SMI = """#!/bin/bash
cd "$(dirname "$0")"
[ -e bad ] || echo "$SLURMD_NODENAME" > bad
errors=0
[ "$(cat bad)" != "$SLURMD_NODENAME" ] || errors=3
for gpu in 0 1 2 3; do
  case $* in
    *--query-gpu=index*) echo "$gpu, GH200, GPU-$gpu, 000000${gpu}9:01:00.0" ;;
    *--query-gpu=uuid*) echo "GPU-$gpu, Default, 4 MiB, 97871 MiB, 0 %, 40, 1980 MHz, 1980 MHz, Not Active, $errors" ;;
  esac
done
"""
QUICK = ("--set", "bench.concurrency=[1]", "--set", "resources.sweep_grace=1s")


@pytest.fixture
def worn(cluster: PretendCluster, installed: Path) -> Iterator[tuple[Person, dict[str, str]]]:
    """Somebody on a cluster of which one node is bad, and the variables that let nvidia-smi say so."""
    container = f"{{runtime: none, command: [{installed}/python, -m, isambard_serve.sim]}}"
    tools = cluster.home / "smi"
    cluster.run(["mkdir", "-p", tools])
    cluster.run(["tee", tools / "nvidia-smi"], input=NVIDIA_SMI)
    cluster.run(["chmod", "+x", tools / "nvidia-smi"])
    yield Person.with_site(cluster, installed, "worn", container), {"PATH": f"{tools}:{cluster.environment['PATH']}"}
    cluster.cancel_all()


def test_a_run_on_a_bad_node_goes_on_on_another_one_and_the_node_is_left_out_from_then_on(
    worn: tuple[Person, dict[str, str]]
) -> None:
    person, env = worn
    first = json.loads(person.does("submit", "tiny", *QUICK, "--json", env=env).stdout)["runs"][0]
    run_id = first["run_id"]
    run = person.waits_for(run_id, "done", "failed", timeout_s=120)
    assert run["state"] == "done", run
    bad = (person.cluster.home / "smi/bad").read_text().strip()
    events = [json.loads(line) for line in (person.runs / run_id / "events/serve.jsonl").read_text().splitlines()]
    (resent,) = [event for event in events if event["event"] == "resent"]
    assert f"node {bad} is bad: GPU GPU-" in resent["reason"]
    assert "3 memory errors that could not be corrected" in resent["reason"]
    assert run["jobs"]["serve"] == resent["job_id"] != first["jobs"]["serve"]
    assert json.loads((person.runs / run_id / "node.json").read_text())["node"] != bad
    assert len(person.asks("collect", run_id)["rows"]) == 1
    person.waits_for_an_empty_queue()

    later = person.does("submit", "tiny", "--dry-run")
    assert f"note: {bad} is left out, where run {run_id} found: GPU GPU-" in later.stderr
    assert f"#SBATCH --exclude={bad}\n" in later.stdout
