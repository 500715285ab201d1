"""Tasks: runs that serve nothing. One job that runs commands in order: measure a node, build an image, fetch weights.

A task has a run directory like any run, so that ``status``, ``logs``, ``collect`` and ``cancel`` know it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from isambard_serve import __version__, container, controller, inengine, launch, process, render
from isambard_serve.container import Need
from isambard_serve.directives import holder_directives
from isambard_serve.errors import UsageError
from isambard_serve.recipe import Recipe
from isambard_serve.records import Record
from isambard_serve.run import RunDir, Runs, read_record, write_whole
from isambard_serve.site import Site
from isambard_serve.slurm import Slurm

TICK_S = 0.5
STOP_GRACE_S = 20.0


class TaskPlan(Record, frozen=True):
    """Everything about a task that is known before it is submitted: a task's ``plan.json``.

    ``recipe`` is the task's name, under which tables show it. ``commands`` run one after another until one fails.
    ``cost``: node-hours, if it runs to its time limit.
    """

    run_id: str
    run_dir: str
    recipe: str
    description: str
    site: str
    scheduler: Literal["slurm", "local"]
    python: str
    gpus: int
    node_gpus: int
    cost: float
    directives: dict[str, str | bool]
    open_files: int
    export: tuple[str, ...]
    unset: tuple[str, ...]
    environment: dict[str, str]
    files: dict[str, str]
    commands: tuple[tuple[str, ...], ...]
    needs: tuple[Need, ...]
    poll_interval_s: float
    ladder: tuple[str, ...] = ()
    simulated: bool = False
    schema: str = "isambard-serve/task/1"
    package_version: str = __version__


def make(name: str, description: str, commands: Sequence[Sequence[str]], site: Site, *, run_id: str, runs_dir: str,
         python: str, time_s: int, gpus: int | None = None, environment: Mapping[str, str] | None = None,
         files: Mapping[str, str] | None = None, needs: Sequence[Need] = ()) -> TaskPlan:
    """The plan of running ``commands`` at ``site`` (whose variables are resolved).

    Args:
        gpus: how many; the smallest job that the site allows unless given.
        environment: variables besides the site's.
        files: what to put into the run's directory for the commands, by file name.
        needs: what must exist before it is submitted.

    Raises:
        UsageError: a directive cannot be written, or the site's nodes are smaller.
    """
    gpus = site.sweep.gpus if gpus is None else gpus
    if gpus > site.node.gpus:
        raise UsageError(f"needs {gpus} GPUs, a node of {site.name} has {site.node.gpus}", where=name)
    run_dir = f"{runs_dir}/{run_id}"
    return TaskPlan(
        run_id=run_id, run_dir=run_dir, recipe=name, description=description, site=site.name,
        scheduler=site.scheduler, python=python, gpus=gpus, node_gpus=site.node.gpus,
        cost=round(gpus / site.node.gpus * time_s / 3600, 4),
        directives=holder_directives(site, run_id, run_dir, "task.log", gpus, time_s),
        open_files=site.open_files, export=site.export, unset=site.unset,
        environment={"NO_COLOR": "1", "PYTHONUNBUFFERED": "1", **site.set, **(environment or {})},
        files=dict(files or {}), commands=tuple(tuple(command) for command in commands), needs=tuple(needs),
        poll_interval_s=site.poll_interval_s,
    )


def inside(site: Site, recipe: Recipe, run_dir: str, module: str, *words: str,
           variables: Mapping[str, str]) -> tuple[str, ...]:
    """The command that runs a ``module`` of this package in the recipe's container, with the engine's interpreter
    and its overlay.

    What the module needs beside Python itself must come with vLLM, as msgspec does.
    """
    path = ":".join([f"{run_dir}/intask", *([recipe.engine.overlay] if recipe.engine.overlay else [])])
    return (*container.words(site, recipe, role="command", run_dir=run_dir, variables=variables),
            "env", f"PYTHONPATH={path}", container.python(site), "-m", f"isambard_serve.{module}", *words)


def install(run: RunDir) -> None:
    """Puts into the run's directory what its commands may need in a container."""
    inengine.install(run.inengine)
    package = Path(__file__).resolve().parent
    shutil.copytree(package, run.intask / package.name, dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("__pycache__"))


def script(plan: TaskPlan) -> str:
    """The task's sbatch script, exactly as sent."""
    return render.script("task.sbatch", plan)


def submit(plan: TaskPlan, slurm: Slurm | None) -> RunDir:
    """Writes the run directory and submits the job.

    Args:
        slurm: where to; None runs it as a process of this machine.

    Raises:
        UsageError: something that the job needs is missing.
        HostError: Slurm refused.
    """
    launch.check_needs(plan.needs)
    run = RunDir(Path(plan.run_dir))
    text = script(plan)
    run.create()
    write_whole(run.task_script, text)
    for name, content in plan.files.items():
        write_whole(run.path / name, content)
    write_whole(run.plan, msgspec.json.format(msgspec.json.encode(plan), indent=2))
    with launch.rolled_back([run], slurm):
        if slurm is None:
            controller.start([run], plan.python, plan.export)
        else:
            launch.send_job(run, plan.site, slurm, "task", run.task_script, None, last=True)
        run.record("submit", "submitted")
    return run


def perform(run: RunDir, terminated: threading.Event) -> int:
    """On the node: runs the task's commands and records how they went. Returns the job's exit code."""
    plan = read_record(run.plan, TaskPlan)
    job_id = os.environ.get("SLURM_JOB_ID")
    run.record("task", "started", job_id=job_id)
    if job_id:
        Runs(run.path.parent, plan.site).remember(job_id, run.run_id)
    install(run)
    for command in plan.commands:
        why = _stopped(run, command, terminated)
        if why:
            run.record("task", "failed", reason=why, job_id=job_id)
            return 1
    run.record("task", "done", job_id=job_id)
    return 0


def _stopped(run: RunDir, command: Sequence[str], terminated: threading.Event) -> str | None:
    """Runs ``command``; None if it did its work, otherwise why not."""
    print("+", shlex.join(command), flush=True)  # noqa: T201 - the job's log
    try:
        child = process.start(command, env=os.environ, log=run.task_log, bound=True)
    except OSError as error:
        return f"{command[0]} cannot be started: {error.strerror}"
    try:
        while (code := process.ended(child, TICK_S)) is None:
            if run.read_events(["cancel"]):
                return "cancelled on request"
            if terminated.is_set():
                return "asked to end by a signal: scancel, or the job's time limit"
    finally:
        process.stop(child, STOP_GRACE_S)
    return f"{shlex.join(command[:1])} ended with {code}: see the log" if code else None


def main() -> None:
    """``python -m isambard_serve.task RUN_DIR``."""
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    sys.exit(perform(RunDir(Path(sys.argv[1])), terminated))


if __name__ == "__main__":
    main()
