"""Runs without Slurm: one detached process takes a submission's rungs one after another.

Each rung is the same ``serve.sbatch``, run by bash, and its sweep, run by submitit's local executor.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import submitit

from isambard_serve import local, slurm
from isambard_serve.plan import Plan
from isambard_serve.records import Jobs, SubmittedJob
from isambard_serve.run import Outline, RunDir, Runs, read_record
from isambard_serve.sweep import sweep

SWEEP_GRACE_S = 30.0
GO = b"go\n"


def start(runs: list[RunDir], python: str, export: Iterable[str]) -> None:
    """Starts the controller of ``runs``, apart from this process, and notes it as theirs.

    It waits for a word that all is noted; if this process ends before, it ends too and nothing runs.
    """
    env = slurm.environment(export, os.environ)
    with open(runs[0].path / "controller.log", "ab") as log:
        child = subprocess.Popen([python, "-m", "isambard_serve.controller", *(str(run.path) for run in runs)],
                                 env=env, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                                 cwd=runs[0].path, start_new_session=True)
    for run in runs:
        _note(run, {"controller": local.job_id(child.pid)})
    assert child.stdin is not None  # noqa: S101 - it is a pipe
    with child.stdin as gate:
        gate.write(GO)


def _note(run: RunDir, ids: dict[str, str]) -> None:
    """Notes the job ids of ``run`` beside those noted before."""
    known = {job.role: job for job in run.read_jobs().jobs}
    for role in ("serve", "sweep", "task", "controller"):
        if role in ids:
            known[role] = SubmittedJob(role=role, job_id=ids[role], time=time.time())
    run.write_jobs(Jobs(jobs=tuple(known.values()), complete=True))
    index = Runs(run.path.parent, read_record(run.plan, Outline).site)
    for job in ids.values():
        index.remember(job, run.run_id)  # the controller of several leads to the last one


def _start(run: RunDir, role: Literal["serve", "task"], script: Path, log: Path) -> subprocess.Popen[bytes]:
    """Starts the run's job."""
    with open(log, "ab") as output:
        child = subprocess.Popen(["bash", script], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                 cwd=run.path)
    _note(run, {role: local.job_id(child.pid)})
    return child


def serve(run: RunDir) -> None:
    """Runs one rung to its end, or a task."""
    if run.is_task:
        _start(run, "task", run.task_script, run.task_log).wait()
        return
    plan = read_record(run.plan, Plan)
    child = _start(run, "serve", run.serve_script, run.serve_log)
    job: submitit.Job[None] | None = None
    if plan.placement == "dependent":
        executor = submitit.LocalExecutor(run.submitit, python=None)
        # Its own default would end the sweep after two minutes.
        executor.update_parameters(timeout_min=plan.sweep_minutes, stderr_to_stdout=True)
        job = executor.submit(sweep, str(run.path))
        _note(run, {"sweep": local.job_id(int(job.job_id))})
    child.wait()
    if job is not None:
        # It sees for itself that the engine has gone.
        deadline = time.monotonic() + SWEEP_GRACE_S
        while not job.done() and time.monotonic() < deadline:
            time.sleep(0.2)
        if not job.done():
            job.cancel()


def main() -> None:
    """``python -m isambard_serve.controller RUN_DIR…``: the rungs in order, but for those cancelled meanwhile."""
    if sys.stdin.buffer.read() != GO:
        return
    for path in sys.argv[1:]:
        run = RunDir(Path(path))
        if not run.read_events(["cancel"]):
            serve(run)


if __name__ == "__main__":
    main()
