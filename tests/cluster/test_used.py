"""Used time from the site's accounting, and what its outage means."""

from __future__ import annotations

import os

import pytest

from tests.cluster.person import Person

QUICK = ("--set", "bench.concurrency=[1]")
LONG = ("--set", "bench.osl=500000", "--set", "engine.args.max-model-len=600000")


def test_used_node_hours_are_those_of_the_accounting_once_it_knows_them(accounted: Person) -> None:
    run_id = accounted.submits("tiny", *QUICK)
    accounted.waits_for(run_id, "done", timeout_s=60)

    def accounts() -> bool:
        return bool(accounted.run_of(run_id)["node_hours_by"] == "sacct")

    accounted.cluster.wait_until(accounts, 60, "the accounting")
    # By name: what sacct shows unasked depends on the time of day.
    jobs = ",".join(accounted.run_of(run_id)["jobs"].values())
    lines = accounted.cluster.run(["sacct", "-nPX", "-j", jobs, "--format=ElapsedRaw,AllocTRES"]).stdout.splitlines()
    seconds = [int(line.split("|")[0]) for line in lines]
    assert len(seconds) == 2
    assert all("gres/gpu=1" in line for line in lines)
    assert accounted.run_of(run_id)["node_hours"] == pytest.approx(sum(seconds) / 3600 / 4, abs=1e-6)


def test_a_run_that_died_in_an_outage_is_unknown_until_slurm_can_say(accounted: Person) -> None:
    run_id = accounted.submits("tiny", *QUICK, *LONG)
    accounted.waits_for(run_id, "measuring", timeout_s=60)
    cluster = accounted.cluster
    with cluster.outage("slurmdbd"), cluster.outage("slurmctld"):
        assert accounted.run_of(run_id)["state"] == "measuring"
        for process in accounted.job_of(run_id):
            process.kill()
        # More than a minute of silence, without waiting for it.
        for name in ("samples.jsonl", "events/serve.jsonl", "engine/engine.log"):
            os.utime(accounted.runs / run_id / name, (1, 1))
        run = accounted.waits_for(run_id, "unknown", timeout_s=60)  # once Slurm's last answer is too old to be used
        assert "no sign of life" in run["reason"]
        assert run["node_hours_by"] == "clock"
    # Slurm may take its time over a job whose end it has missed.
    assert accounted.waits_for(run_id, "stopping", "failed", timeout_s=60)["reason"].startswith("Slurm: ")
