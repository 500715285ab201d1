"""A ladder on one node: one job for all rungs, each of which stays a run of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from isambard_serve import ladder, launch, resend, state, status
from isambard_serve.errors import HostError, ServeError, UsageError
from isambard_serve.plan import Plan
from isambard_serve.run import RunDir, Runs
from isambard_serve.slurm import JobState, Slurm
from tests.support.waiting import wait_until
from tests.unit.helpers import RUNG_IDS, FakeSlurm, ladder_plans, said, small_plan, small_recipe, written_run


@pytest.fixture
def plans(tmp_path: Path) -> list[Plan]:
    return ladder_plans(tmp_path / "runs", same_node=True)


def submitted(plans: list[Plan], fake: FakeSlurm) -> list[RunDir]:
    return launch.submit([(plan, small_recipe()) for plan in plans], Slurm({}, fake))


def test_one_job_is_sent_which_is_the_serve_job_of_every_rung(plans: list[Plan]) -> None:
    fake = FakeSlurm()
    runs = submitted(plans, fake)
    assert fake.calls == [("sbatch", "--parsable", f"{plans[0].run_dir}/ladder.sbatch")]
    assert [run.job_ids() for run in runs] == [{"serve": "101"}] * 3
    assert all(run.read_jobs().complete for run in runs)
    assert Runs(runs[0].path.parent, "pretend").find("101").run_id == RUNG_IDS[0]
    assert [plan.placement for plan in plans] == ["inside"] * 3


def test_its_time_is_the_sum_of_theirs_and_the_rest_is_what_they_share(plans: list[Plan]) -> None:
    asked = ladder.directives(plans)
    assert asked["time"] == "03:00:00"
    assert asked["output"] == f"{plans[0].run_dir}/ladder.log"
    assert {**plans[0].serve_directives, "time": 0, "output": 0} == {**asked, "time": 0, "output": 0}


def test_rungs_of_different_sizes_are_refused_before_anything_is_written(plans: list[Plan]) -> None:
    plans[1] = msgspec.structs.replace(plans[1], recipe="half", gpus=2)
    with pytest.raises(UsageError, match=r"different numbers of GPUs \(small 1, half 2\)"):
        submitted(plans, FakeSlurm())
    assert not Path(plans[0].run_dir).exists()


def test_one_recipe_is_no_ladder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one recipe"):
        ladder.check([small_plan(tmp_path)])


def test_a_job_that_slurm_refuses_leaves_no_rung_submitted(plans: list[Plan]) -> None:
    with pytest.raises(HostError, match="no credit"):
        submitted(plans, FakeSlurm(sbatch=said(stderr="no credit", returncode=1)))
    for plan in plans:
        assert RunDir(Path(plan.run_dir)).read_events()[-1].event == "failed"


def test_a_cancelled_rung_leaves_the_job_to_the_others_and_the_last_one_ends_it(plans: list[Plan]) -> None:
    fake = FakeSlurm()
    runs = submitted(plans, fake)
    runs[0].record("serve", "done")
    del fake.calls[:]
    launch.cancel(runs[2], Slurm({}, fake))
    assert fake.calls == []
    assert [event.event for event in runs[2].read_events(["cancel"])] == ["cancelled"]
    launch.end_jobs(runs[0], Slurm({}, fake))
    assert fake.calls == []
    launch.cancel(runs[1], Slurm({}, fake))
    assert fake.calls == [("scancel", "101")]


def test_cancelling_the_whole_ladder_ends_its_job_once(plans: list[Plan]) -> None:
    fake = FakeSlurm()
    runs = submitted(plans, fake)
    del fake.calls[:]
    launch.cancel_ladder(runs, Slurm({}, fake))
    assert fake.calls == [("scancel", "101")]


def test_a_job_whose_id_was_never_heard_is_cancelled_by_its_name(plans: list[Plan]) -> None:
    fake = FakeSlurm()
    runs = submitted(plans, fake)
    for run in runs:
        jobs = run.read_jobs()
        run.write_jobs(msgspec.structs.replace(jobs, jobs=(msgspec.structs.replace(jobs.jobs[0], job_id=None),)))
    del fake.calls[:]
    launch.cancel_ladder(runs, Slurm({}, fake))
    assert fake.calls == [("scancel", "--me", f"--name={RUNG_IDS[0]}")]


def test_a_rung_whose_turn_has_not_come_says_so_and_one_that_never_came_has_failed(plans: list[Plan]) -> None:
    run = submitted(plans, FakeSlurm())[1]
    running, over = {"101": JobState("RUNNING")}, {"101": JobState("TIMEOUT")}
    assert state.fold(run.read_events(), run.read_jobs(), running, None) == (
        "submitted", "its job runs; the run itself has not begun")
    assert state.fold(run.read_events(), run.read_jobs(), over, None) == ("failed", "Slurm: TIMEOUT")


def test_what_a_rung_has_held_is_read_off_its_own_clock(plans: list[Plan]) -> None:
    fake = FakeSlurm()
    run = submitted(plans, fake)[0]
    run.record("serve", "started", job_id="101")
    run.record("serve", "done")
    assert status.read(run, Slurm({}, fake)).node_hours_by == "clock"
    assert "sacct" not in fake.commands()


def test_a_bad_node_before_the_first_rung_sends_the_whole_ladder_again(plans: list[Plan]) -> None:
    runs = submitted(plans, FakeSlurm())
    fake = FakeSlurm()
    fake._next_id = 201
    resend.resend(runs[0], plans[0], "nid003", "node nid003 is bad", Slurm({}, fake))
    assert fake.calls == [("sbatch", "--parsable", "--exclude=nid[001-002],nid003", str(runs[0].ladder_script))]
    assert [run.job_ids() for run in runs] == [{"serve": "201"}] * 3
    with pytest.raises(ServeError, match="the second node"):
        resend.resend(runs[1], plans[1], "nid004", "node nid004 is bad", Slurm({}, FakeSlurm()))


def test_a_node_that_turns_bad_between_two_rungs_fails_those_that_are_left(plans: list[Plan]) -> None:
    runs = submitted(plans, FakeSlurm())
    runs[0].record("serve", "loading")
    fake = FakeSlurm()
    with pytest.raises(ServeError, match="the rungs before were served there"):
        resend.resend(runs[1], plans[1], "nid003", "node nid003 is bad", Slurm({}, fake))
    assert fake.calls == []


def laddered(plans: list[Plan], scripts: list[str]) -> Path:
    """The job's script, and what each rung's own shall do instead of serving."""
    for plan, script in zip(plans, scripts, strict=True):
        written_run(plan).serve_script.write_text(script)
    path = RunDir(Path(plans[0].run_dir)).ladder_script
    path.write_text(ladder.script(plans))
    return path


def ran(plans: list[Plan]) -> list[str]:
    """What each rung printed."""
    logs = [RunDir(Path(plan.run_dir)).serve_log for plan in plans]
    return [log.read_text() if log.exists() else "" for log in logs]


def test_each_rung_runs_in_its_own_directory_with_its_own_log_and_a_failure_stops_no_other(plans: list[Plan]) -> None:
    script = laddered(plans, ["pwd; X=1; trap '' TERM; exit 3", 'echo "${X-}"; trap -p TERM', "pwd"])
    done = subprocess.run(["bash", script], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == ""
    assert [line.split()[1] for line in done.stdout.splitlines()] == [plan.run_dir for plan in plans]
    assert ran(plans) == [f"{plans[0].run_dir}\n", "\n", f"{plans[2].run_dir}\n"]


def test_when_all_rungs_end_well_so_does_the_job(plans: list[Plan]) -> None:
    assert subprocess.run(["bash", laddered(plans, ["true"] * 3)], check=False, capture_output=True).returncode == 0


def test_after_the_ladder_was_sent_again_no_further_rung_starts(plans: list[Plan]) -> None:
    script = laddered(plans, [f"exit {resend.RESENT}", "echo no", "echo no"])
    assert subprocess.run(["bash", script], check=False, capture_output=True).returncode == 1
    assert ran(plans) == ["", "", ""]


def test_a_job_that_has_to_end_waits_for_the_rung_that_runs_and_starts_no_other(
        plans: list[Plan], child: Callable[..., subprocess.Popen[bytes]]) -> None:
    script = laddered(plans, [
        "trap 'sleep 0.3; echo ended well; exit 0' TERM; echo up; while true; do sleep 0.01; done", "echo no", "true"])
    job = child("bash", script)
    wait_until(lambda: ran(plans)[0] == "up\n", 10, "the first rung")
    for process in subprocess.run(["pgrep", "-g", str(job.pid)], check=True, capture_output=True,
                                  text=True).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGTERM)  # as Slurm does, to every process of the job
    assert job.wait(10) == 1
    first, *others = ran(plans)
    assert first.endswith("ended well\n")
    assert others == ["", ""]
