"""Submission: the run directory is written, then the serve job and its sweep are sent, all or nothing."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import submitit
from submitit.core.utils import DelayedSubmission, JobPaths

from isambard_serve import controller, hubcache, ladder, outcome, process, recipe, render
from isambard_serve.container import Need
from isambard_serve.errors import HostError, NoProgramError, UsageError
from isambard_serve.local import Local
from isambard_serve.plan import Plan, Point
from isambard_serve.records import HOLDERS, Jobs, SubmittedJob
from isambard_serve.resend import neighbours
from isambard_serve.run import (
    Outline,
    RunDir,
    Runs,
    append_line,
    job_name,
    point_name,
    read_lines,
    read_record,
    write_whole,
)
from isambard_serve.search import Step
from isambard_serve.slurm import Slurm
from isambard_serve.sweep import sweep


class SweepExecutor(submitit.SlurmExecutor):
    """submitit's Slurm executor, of which the script's text is used; it is sent as the serve script is."""

    @classmethod
    def affinity(cls) -> int:
        """Scripts are rendered on machines without Slurm too."""
        return 1

    @property
    def script(self) -> str:
        """The sweep's sbatch script."""
        return self._make_submission_file_text(self._submitit_command_str, uid="")


def sweep_script(plan: Plan) -> str:
    """The sweep's sbatch script: submitit's own, with the directives of ``plan``."""
    executor = SweepExecutor(Path(plan.run_dir) / "submitit", python=shlex.quote(plan.python))
    directives = dict(plan.sweep_directives)
    limit = f"ulimit -S -n {plan.open_files} 2>/dev/null || ulimit -S -n \"$(ulimit -H -n)\""
    executor.update_parameters(
        job_name=directives.pop("job-name"),
        partition=directives.pop("partition", None),
        nodes=1,
        time=plan.sweep_minutes,
        stderr_to_stdout=True,
        setup=[limit],
        # The points start steps in the serve job; a step around them would be in their way.
        use_srun=False,
        additional_parameters=directives,
    )
    return executor.script


def scripts(plan: Plan) -> dict[str, str]:
    """Every script of the run by its file name: exactly what is sent."""
    texts = {"serve.sbatch": render.script("serve.sbatch", plan)}
    if plan.scheduler == "slurm":
        if plan.placement == "dependent":
            texts["sweep.sbatch"] = sweep_script(plan)
        texts["send.sh"] = render.script("send.sh", plan)
    return texts


def write(plan: Plan, chosen: recipe.Recipe) -> RunDir:
    """Writes the run directory of ``plan``, complete, so that it can be sent from here or by hand."""
    run = RunDir(Path(plan.run_dir))
    texts = scripts(plan)
    run.create()
    write_whole(run.lock, recipe.locked(chosen))
    for name, text in texts.items():
        write_whole(run.path / name, text, mode=0o700 if name == "send.sh" else 0o600)
    if plan.resumes:
        _take_over(RunDir(run.path.parent / plan.resumes), run, plan)
    delayed = DelayedSubmission(sweep, str(run.path))
    delayed.set_timeout(plan.sweep_minutes, 0)
    delayed.dump(run.submitit / "sweep.pkl")
    write_whole(run.plan, msgspec.json.format(msgspec.json.encode(plan), indent=2))
    return run


def _valid_points(run: RunDir, plan: Plan) -> set[str]:
    """The points of ``plan`` that ``run`` has a valid row for; a search has use for any."""
    valid = {point_name(row.concurrency, row.repeat) for row in run.read_rows() if row.valid}
    return valid if plan.search else valid & {point.name for point in plan.points}


class _Prompts(msgspec.Struct, frozen=True):
    """What of a search decides what its rows mean."""

    prompts_per_concurrency: int


class _Subject(msgspec.Struct, frozen=True):
    """What of a plan its rows are about: only where all of it is the same do two runs' rows belong together."""

    model: str
    isl: int
    osl: int
    gpus: int
    node_gpus: int
    site: str
    simulated: bool
    engine_version: str
    ranks: int
    expect: recipe.Expect
    points: tuple[Point, ...]
    search: _Prompts | None
    environment: dict[str, str]
    container_argv: tuple[str, ...]
    engine_argv: tuple[str | dict[str, object], ...]
    bench_argv: tuple[str | dict[str, object], ...]


def check_resumable(before: RunDir, plan: Plan) -> None:
    """Raises UsageError unless the rows of the run ``before`` can stand beside those that ``plan`` will measure.

    Its recipe may have been edited since, or the site's file, or another version of this package sends other flags.
    """
    if str(before.path.parent) != str(Path(plan.run_dir).parent):
        raise UsageError("lies elsewhere: a run is resumed where it was measured", where=str(before.path),
                         remedy="name it by its run id, with --site or --host")
    then = read_record(before.plan, _Subject)
    text = msgspec.json.encode(plan).replace(plan.run_id.encode(), before.run_id.encode())
    now = msgspec.json.decode(text, type=_Subject)
    changed = [name for name in _Subject.__struct_fields__ if getattr(then, name) != getattr(now, name)]
    if changed:
        raise UsageError(f"was measured with other values of {', '.join(changed)} than it would be now: its points "
                         "cannot stand beside new ones", where=before.run_id, remedy="submit the recipe anew")


def left(before: RunDir, plan: Plan) -> int:
    """How many points of ``plan`` the run ``before`` leaves to be measured; at least one where a search has no knee."""
    if plan.search:
        found = outcome.read(before)
        return 1 if found is None or found.knee is None else 0
    return len(plan.points) - len(_valid_points(before, plan))


def _take_over(before: RunDir, run: RunDir, plan: Plan) -> None:
    """Copies the valid points of the run ``before``, which are not measured again. Each row says where it was."""
    for name in sorted(_valid_points(before, plan)):
        shutil.copytree(before.points / name, run.points / name)
    for path in sorted(before.search.glob("*.jsonl")):
        for step in read_lines(path, Step):
            if step.kind == "scout":  # it cost the lost run, not this one
                append_line(run.search / "0000.jsonl", msgspec.structs.replace(step, gpu_s=0.0))


def check_needs(needs: Iterable[Need], runner: process.Runner = process.run) -> None:
    """Raises UsageError when something that the job will need is not there: better now than when GPUs are held."""
    for need in needs:
        missing = _missing(need, runner)
        if missing:
            raise UsageError(f"{need.what} {missing}", where=need.path or shlex.join(need.command), remedy=need.remedy)


def _missing(need: Need, runner: process.Runner) -> str | None:
    """What is amiss with ``need``, in words; None if it is there."""
    if need.path is None:
        return None if runner(need.command, env=os.environ).returncode == 0 else "not found"
    if not os.path.exists(need.path):
        return "not found"
    return hubcache.missing(Path(need.path), need.revision) if need.revision else None


Rung = tuple[Plan, recipe.Recipe]


def submit(rungs: Sequence[Rung], slurm: Slurm | None) -> list[RunDir]:
    """Writes the run directories and submits all rungs, each after the one before; all of them or none.

    Args:
        rungs: the plans and their recipes, in order.
        slurm: where to; None runs them as processes of this machine.

    Raises:
        UsageError: something that the jobs need is missing.
        HostError: Slurm refused; what was submitted before has been cancelled.
    """
    plans = [plan for plan, _ in rungs]
    if plans[0].same_node:
        ladder.check(plans)
    for plan in plans:
        check_needs(plan.needs)
    runs = [write(plan, chosen) for plan, chosen in rungs]
    with rolled_back(runs, slurm):
        if slurm is None:
            controller.start(runs, plans[0].python, plans[0].export)
        elif plans[0].same_node:
            _send_together(runs, plans, slurm)
        else:
            before: str | None = None
            for run, plan in zip(runs, plans, strict=True):
                before = _send(run, plan, slurm, f"afterany:{before}" if before else None)
        for run in runs:
            run.record("submit", "submitted")
    return runs


def _send(run: RunDir, plan: Plan, slurm: Slurm, dependency: str | None) -> str:
    """Submits the jobs of one run and returns the serve job's id.

    ``jobs.json`` is written before and after each submission, so that whoever comes after a crash can tell what
    may be running.
    """
    serve = send_job(run, plan.site, slurm, "serve", run.serve_script, dependency, last=plan.placement != "dependent")
    if plan.placement == "dependent":
        delay = f"+{plan.sweep_after_min}" if plan.sweep_after_min else ""
        job = send_job(run, plan.site, slurm, "sweep", run.sweep_script, f"after:{serve}{delay}", last=True)
        os.link(run.submitit / "sweep.pkl", JobPaths(run.submitit, job).submitted_pickle)
    return serve


def _send_together(runs: Sequence[RunDir], plans: Sequence[Plan], slurm: Slurm) -> None:
    """Submits one job for all of ``runs``, which is the serve job of each. Its id leads to the rung that runs."""
    write_whole(runs[0].ladder_script, ladder.script(plans))
    entry = SubmittedJob(role="serve", job_id=None, time=time.time())
    for run in runs:
        run.write_jobs(Jobs(jobs=(entry,)))
    job_id = slurm.submit(runs[0].ladder_script)
    for run in runs:
        run.write_jobs(Jobs(jobs=(msgspec.structs.replace(entry, job_id=job_id),), complete=True))
    Runs(runs[0].path.parent, plans[0].site).remember(job_id, runs[0].run_id)


def send_job(run: RunDir, site: str, slurm: Slurm, role: Literal["serve", "sweep", "task"], script: Path,
             dependency: str | None, *, last: bool) -> str:
    """Submits one job of ``run`` and returns its id; ``last``: none of the run follows it."""
    known = run.read_jobs().jobs
    entry = SubmittedJob(role=role, job_id=None, time=time.time())
    run.write_jobs(Jobs(jobs=(*known, entry)))
    job_id = slurm.submit(script, dependency=dependency)
    run.write_jobs(Jobs(jobs=(*known, msgspec.structs.replace(entry, job_id=job_id)), complete=last))
    Runs(run.path.parent, site).remember(job_id, run.run_id)
    return job_id


@contextlib.contextmanager
def rolled_back(runs: Sequence[RunDir], slurm: Slurm | None) -> Iterator[None]:
    """Cancels what was submitted when the block fails, from the last job to the first: each frees its successor."""
    try:
        yield
    except BaseException as error:
        sent = [job.job_id for run in reversed(runs) for job in reversed(run.read_jobs().jobs) if job.job_id]
        try:
            if slurm and not isinstance(error, NoProgramError):
                for run in reversed(runs):
                    _cancel_unheard(run, slurm)
            (slurm or Local()).cancel(sent)
        except HostError as second:
            raise HostError(f"{error} - and what had been submitted could not be cancelled: {second}",
                            where=str(runs[0].path),
                            remedy="; ".join(f"scancel --me --name={run.run_id},{run.run_id}-sweep" for run in runs)
                            ) from error
        with contextlib.suppress(OSError):  # a full disk may be why
            for run in runs:
                run.record("submit", "failed", reason=f"not submitted: {str(error) or type(error).__name__}")
        raise


def _cancel_unheard(run: RunDir, slurm: Slurm) -> None:
    """Cancels a job of ``run`` that Slurm may have taken although its id could not be noted."""
    for job in run.read_jobs().jobs:
        if job.job_id is None:
            plan = read_record(run.plan, Outline)
            slurm.cancel_named(job_name(plan.ladder[0] if plan.same_node else run.run_id, job.role))


def cancel(run: RunDir, slurm: Slurm | None) -> None:
    """Ends the run, its sweep first, since cancelling the serve job sets it free. Nothing else starts for it.

    The rung behind it on a ladder keeps waiting for the rung before it.
    """
    ids = run.job_ids()
    plan = read_record(run.plan, Outline)
    holder = next((ids[role] for role in HOLDERS if role in ids), None)
    if slurm is None:
        # First of all: the controller looks before it starts a rung, and the sweep while it measures.
        with contextlib.suppress(OSError):  # a full disk keeps nothing running
            run.record("cancel", "cancelled", reason="cancelled on request")
        Local().cancel([holder] if holder else [])
        return
    if plan.same_node:
        # The job is that of the other rungs too: this one's watcher sees it, or whoever would start it.
        run.record("cancel", "cancelled", reason="cancelled on request")
        end_jobs(run, slurm)
        return
    before, behind = neighbours(run, plan.ladder)
    if before and behind and holder:
        slurm.depend(behind, f"afterany:{before},afterany:{holder}")
    end_jobs(run, slurm)
    run.record("cancel", "cancelled", reason="cancelled on request")


def end_jobs(run: RunDir, slurm: Slurm) -> None:
    """Takes the run's jobs out of the queue, the sweep first; those that have ended are no error.

    One that several rungs share stays as long as any of them has something to do.
    """
    ids = run.job_ids()
    plan = read_record(run.plan, Outline)
    if plan.same_node and not all(ladder.over(RunDir(run.path.parent / run_id)) for run_id in plan.ladder):
        return
    _cancel_unheard(run, slurm)
    slurm.cancel(ids[role] for role in ("sweep", *HOLDERS) if role in ids)


def cancel_ladder(rungs: Sequence[RunDir], slurm: Slurm | None) -> None:
    """Ends all of ``rungs`` that have not ended, the last one first."""
    for rung in reversed(rungs):
        if not ladder.over(rung):
            cancel(rung, slurm)
