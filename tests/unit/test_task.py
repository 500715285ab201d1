"""Tasks: one job that runs commands in order, and is a run like any other to whoever asks."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isambard_serve import launch, local, shipped, status, task
from isambard_serve import site as sites
from isambard_serve.container import Need
from isambard_serve.errors import HostError, UsageError
from isambard_serve.run import Outline, RunDir, Runs, read_record
from isambard_serve.slurm import Slurm
from isambard_serve.task import TaskPlan
from tests.support.waiting import wait_until
from tests.unit.helpers import RUN_ID, FakeSlurm, pretend_site, said

NO_SIGNAL = threading.Event()


def made(runs_dir: Path, *commands: tuple[str, ...], **changes: Any) -> TaskPlan:
    """The plan of running ``commands``, for a minute, with one GPU."""
    given = {"run_id": RUN_ID, "runs_dir": str(runs_dir), "python": sys.executable, "time_s": 60, "gpus": 1, **changes}
    site = given.pop("site", pretend_site())
    return task.make("chore", "does a chore", commands, site, **given)


def written(plan: TaskPlan) -> RunDir:
    run = task.submit(plan, Slurm({}, FakeSlurm()))
    assert read_record(run.plan, TaskPlan) == plan
    return run


def events(run: RunDir) -> list[tuple[str, str, str | None]]:
    return [(event.writer, event.event, event.reason) for event in run.read_events()]


def test_its_job_is_sent_and_found_again_by_its_id(tmp_path: Path) -> None:
    fake = FakeSlurm()
    run = task.submit(made(tmp_path, ("true",)), Slurm({}, fake))
    assert fake.calls == [("sbatch", "--parsable", str(run.task_script))]
    assert run.job_ids() == {"task": "101"}
    assert run.read_jobs().complete
    assert Runs(tmp_path, "pretend").find("101").path == run.path
    assert events(run) == [("submit", "submitted", None)]


def test_what_it_needs_is_missed_before_anything_is_written(tmp_path: Path) -> None:
    plan = made(tmp_path, ("true",), needs=(Need(path=str(tmp_path / "none"), what="the image", remedy="build it"),))
    with pytest.raises(UsageError, match="the image not found"):
        task.submit(plan, Slurm({}, FakeSlurm()))
    assert not (tmp_path / RUN_ID).exists()


def test_a_refused_task_has_failed(tmp_path: Path) -> None:
    plan = made(tmp_path, ("true",))
    with pytest.raises(HostError, match="Invalid account"):
        task.submit(plan, Slurm({}, FakeSlurm(sbatch=said(stderr="Invalid account", returncode=1))))
    assert status.read(RunDir(Path(plan.run_dir))).state == "failed"


def test_its_script_asks_for_what_a_job_must_have_and_shows_its_commands(tmp_path: Path) -> None:
    plan = made(Path("/shared/runs"), ("apptainer", "exec", "an image.sif", "true"), environment={"HF_HOME": "/a b"})
    text = task.script(msgspec.structs.replace(plan, python="/opt/python", package_version="0.0.0"))
    assert text == f"""\
#!/bin/bash
# Run {RUN_ID}, which serves nothing: does a chore.
# Site pretend, written by isambard-serve 0.0.0.
#
#SBATCH --job-name={RUN_ID}
#SBATCH --partition=batch
#SBATCH --account=pretend
#SBATCH --qos=normal
#SBATCH --reservation=tests
#SBATCH --exclude='nid[001-002]'
#SBATCH --mail-user=someone@example.org
#SBATCH --mail-type=END,FAIL
#SBATCH --nodes=1
#SBATCH --gpus=1
#SBATCH --time=00:01:00
#SBATCH --no-requeue
#SBATCH --export=HOME,PATH
#SBATCH --chdir=/shared/runs/{RUN_ID}
#SBATCH --output=/shared/runs/{RUN_ID}/task.log
#SBATCH --open-mode=append

set -euo pipefail

ulimit -S -n 4096 2>/dev/null || ulimit -S -n "$(ulimit -H -n)"

# What the site gives them.
export NO_COLOR=1
export PYTHONUNBUFFERED=1
export HF_HOME='/a b'

# Notes how it goes in the run's events, and runs plan.json's commands one after another until one fails:
#   apptainer exec 'an image.sif' true
exec /opt/python -m isambard_serve.task /shared/runs/{RUN_ID}
"""


def test_a_command_with_a_line_break_stays_within_its_comment(tmp_path: Path) -> None:
    text = task.script(made(tmp_path, ("echo", "one\ntouch /tmp/two")))
    assert "#   echo 'one touch /tmp/two'\n" in text


def test_without_a_number_it_asks_for_the_smallest_job_of_the_site_and_never_for_more_than_a_node(
        tmp_path: Path) -> None:
    isambard = sites.resolved(sites.load("isambard-ai"), {}, from_afar=True)[0]
    plan = made(tmp_path, ("true",), site=isambard, gpus=None, time_s=3600)
    assert (plan.gpus, plan.cost) == (1, 0.25)
    sandbox = sites.resolved(sites.load("sandbox"), {"HOME": "/home"})[0]
    assert "gpus" not in made(tmp_path, ("true",), site=sandbox, gpus=None).directives
    with pytest.raises(UsageError, match="needs 8 GPUs"):
        made(tmp_path, ("true",), gpus=8)


def test_commands_run_one_after_another_and_what_they_print_is_kept(tmp_path: Path) -> None:
    run = written(made(tmp_path, ("echo", "one"), ("sh", "-c", "echo two >&2")))
    assert task.perform(run, NO_SIGNAL) == 0
    assert run.log("task").read_text() == "one\ntwo\n"
    assert events(run)[1:] == [("task", "started", None), ("task", "done", None)]
    assert status.read(run).state == "done"


def test_a_command_that_fails_ends_the_task_and_is_named(tmp_path: Path) -> None:
    run = written(made(tmp_path, ("sh", "-c", "exit 3"), ("touch", str(tmp_path / "never"))))
    assert task.perform(run, NO_SIGNAL) == 1
    found = status.read(run)
    assert (found.state, found.reason) == ("failed", "sh ended with 3: see the log")
    assert not (tmp_path / "never").exists()


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    run = written(made(tmp_path, ("no-such-program",)))
    assert task.perform(run, NO_SIGNAL) == 1
    assert status.read(run).reason == "no-such-program cannot be started: No such file or directory"


@pytest.mark.parametrize("how", ["signal", "cancel"])
def test_a_task_that_is_asked_to_end_ends_its_command(tmp_path: Path, how: str) -> None:
    run = written(made(tmp_path, ("sleep", "60")))
    terminated = threading.Event()
    if how == "signal":
        terminated.set()
    else:
        launch.cancel(run, Slurm({}, FakeSlurm()))
    assert task.perform(run, terminated) == 1
    assert status.read(run).state == ("failed" if how == "signal" else "cancelled")


def test_its_job_is_cancelled_and_its_state_follows_slurm(tmp_path: Path) -> None:
    run = written(made(tmp_path, ("true",)))
    fake = FakeSlurm(squeue="101|RUNNING|None\n")
    assert status.read(run, Slurm({}, fake)).state == "submitted"
    launch.cancel(run, Slurm({}, fake))
    assert ("scancel", "101") in fake.calls
    assert status.read(run).state == "cancelled"


def test_slurms_end_is_its_end(tmp_path: Path) -> None:
    run = written(made(tmp_path, ("true",)))
    found = status.read(run, Slurm({}, FakeSlurm(squeue="101|TIMEOUT|None\n")))
    assert (found.state, found.reason) == ("failed", "Slurm: TIMEOUT")


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # it outlives who submits
def test_without_slurm_it_is_a_process_of_this_machine(tmp_path: Path) -> None:
    plan = made(tmp_path, ("echo", "done here"), site=pretend_site(scheduler="local", export=("HOME", "PATH")))
    run = task.submit(plan, None)
    wait_until(lambda: status.read(run).state in status.ENDS, 30, "the task's end")
    assert status.read(run).state == "done"
    assert "done here\n" in run.task_log.read_text()
    assert set(run.job_ids()) == {"task", "controller"}
    (controller,) = {run.job_ids()["controller"]}
    wait_until(lambda: local.Local().states([controller])[controller].ended, 20, "the controller's end")


def test_every_plan_has_an_outline(tmp_path: Path) -> None:
    run = written(made(tmp_path, ("true",)))
    outline = read_record(run.plan, Outline)
    assert (outline.recipe, outline.site, outline.points, outline.placement) == ("chore", "pretend", (), "inside")
    assert shipped.folder("templates").joinpath("task.sbatch.j2").exists()
