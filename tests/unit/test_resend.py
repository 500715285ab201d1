"""Sending a serve job again: once, to another node, and whatever waited for it waits for the new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from isambard_serve import resend
from isambard_serve.errors import HostError, ServeError
from isambard_serve.plan import Plan
from isambard_serve.records import Jobs
from isambard_serve.run import RunDir, Runs, read_record
from isambard_serve.slurm import Slurm
from tests.unit.helpers import FakeSlurm, ladder_plans, said, small_plan, submitted, written_run

PENDING = "102|PENDING|Dependency\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = written_run(small_plan(tmp_path / "runs", {"resources": {"load_time": "10m"}}))
    made.write_jobs(submitted())
    return made


def sent(run: RunDir, fake: FakeSlurm, node: str = "nid003") -> str:
    """Send the run again."""
    fake._next_id = 201
    return resend.resend(run, read_record(run.plan, Plan), node, f"node {node} is bad", Slurm({}, fake))


def test_it_goes_to_another_node_and_its_sweep_waits_for_it_instead(run: RunDir) -> None:
    fake = FakeSlurm(squeue=PENDING)
    assert sent(run, fake) == "201"
    assert fake.calls[:2] == [
        ("sbatch", "--parsable", "--exclude=nid[001-002],nid003", str(run.serve_script)),
        ("scontrol", "update", "JobId=102", "Dependency=after:201+10")]
    assert "scancel" not in fake.commands()
    assert run.job_ids() == {"serve": "201", "sweep": "102"}
    assert run.read_jobs().complete
    assert Runs(run.path.parent, "pretend").find("201").path == run.path
    (event,) = run.read_events()
    assert (event.event, event.job_id) == ("resent", "201")
    assert event.reason == "node nid003 is bad; sent again to another node than nid003"


@pytest.mark.parametrize("queue", ["102|RUNNING|None\n", ""])
def test_a_sweep_that_has_begun_to_wait_is_cancelled_rather_than_hold_its_gpu(run: RunDir, queue: str) -> None:
    fake = FakeSlurm(squeue=queue)
    sent(run, fake)
    assert fake.calls[-1] == ("scancel", "102")


def test_what_cannot_be_redirected_does_not_undo_the_new_job(run: RunDir) -> None:
    assert sent(run, FakeSlurm(scontrol=HostError("no answer"))) == "201"
    assert [event.event for event in run.read_events()] == ["resent"]


def test_it_is_sent_again_once(run: RunDir) -> None:
    sent(run, FakeSlurm(squeue=PENDING))
    fake = FakeSlurm()
    with pytest.raises(ServeError, match="node nid004 is bad; it was the second node"):
        sent(run, fake, "nid004")
    assert fake.calls == []


def test_without_slurm_there_is_no_other_node(tmp_path: Path) -> None:
    run = written_run(small_plan(tmp_path / "runs", scheduler="local"))
    with pytest.raises(ServeError, match="there is no other node"):
        sent(run, FakeSlurm())


def test_a_refusal_leaves_the_record_as_it_was(run: RunDir) -> None:
    with pytest.raises(HostError, match="Slurm refused the job: no submission from here"):
        sent(run, FakeSlurm(sbatch=said(stderr="no submission from here", returncode=1)))
    assert run.read_jobs() == submitted()
    assert run.read_events() == []


def test_a_run_whose_jobs_nobody_has_noted_cannot_be_sent_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resend, "SUBMITTED_S", 0.0)
    for jobs in (Jobs(), submitted(sweep=None, complete=False)):
        run.write_jobs(jobs)
        fake = FakeSlurm()
        with pytest.raises(ServeError, match="nobody has noted all of its jobs"):
            sent(run, fake)
        assert fake.calls == []


def test_the_next_rung_of_a_ladder_waits_for_the_new_job(tmp_path: Path) -> None:
    first, second, _ = (written_run(plan) for plan in ladder_plans(tmp_path / "runs"))
    first.write_jobs(submitted())
    second.write_jobs(submitted("103", "104"))
    fake = FakeSlurm(squeue=PENDING)
    sent(first, fake)
    assert ("scontrol", "update", "JobId=103", "Dependency=afterany:201") in fake.calls
