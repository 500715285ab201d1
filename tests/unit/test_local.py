"""Jobs without Slurm: processes that are told apart even when a pid is used again."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from isambard_serve import local
from isambard_serve.local import Local
from tests.support.waiting import wait_until

Start = Callable[..., "subprocess.Popen[bytes]"]


def test_a_job_runs_as_long_as_its_process(child: Start) -> None:
    process = child("sleep", "60")
    job = local.job_id(process.pid)
    assert Local().states([job])[job].state == "RUNNING"
    process.kill()
    wait_until(lambda: Local().states([job])[job].ended, 10, "the end of the job", interval_s=0.005)


def test_a_process_with_the_same_pid_is_not_the_same_job(child: Start) -> None:
    process = child("sleep", "60")
    _, pid, started = local.job_id(process.pid).split("-")
    earlier = f"local-{pid}-{int(started) - 60}"
    assert Local().states([earlier])[earlier].ended
    Local().cancel([earlier])
    assert process.poll() is None


@pytest.mark.parametrize("job", ["101", "local-x-1", "local-1", "local-999999999-1", ""])
def test_what_names_no_process_has_ended(job: str) -> None:
    assert Local().states([job])[job].ended
    Local().cancel([job])


def test_a_cancelled_job_is_asked_to_end_and_killed_if_it_does_not(
        child: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "KILL_AFTER_S", 2.0)
    trapped = tmp_path / "trapped"
    asked = tmp_path / "asked"
    willing = child("bash", "-c", f"trap 'touch {asked}; exit' TERM; touch {trapped}1; while :; do sleep 0.01; done")
    stubborn = child("bash", "-c", f"trap '' TERM; touch {trapped}2; while :; do sleep 0.01; done")
    wait_until(lambda: len(list(tmp_path.glob("trapped*"))) == 2, 10, "the traps", interval_s=0.005)
    jobs = [local.job_id(process.pid) for process in (willing, stubborn)]
    Local().cancel(jobs)
    assert asked.exists()
    wait_until(lambda: all(state.ended for state in Local().states(jobs).values()), 10, "both to end", interval_s=0.005)
