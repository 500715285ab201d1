"""Submission: the run directory is written, then the serve job and its sweep are sent, all or nothing."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import submitit
from submitit.core.utils import DelayedSubmission, JobPaths

from isambard_serve import recipe, render
from isambard_serve.errors import HostError, UsageError
from isambard_serve.plan import Plan
from isambard_serve.records import Jobs, SubmittedJob
from isambard_serve.run import RunDir, Runs, write_whole
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
    return {
        "serve.sbatch": render.script("serve.sbatch", plan),
        "sweep.sbatch": sweep_script(plan),
        "send.sh": render.script("send.sh", plan),
    }


def write(plan: Plan, chosen: recipe.Recipe) -> RunDir:
    """Writes the run directory of ``plan``, complete, so that it can be sent from here or by hand."""
    run = RunDir(Path(plan.run_dir))
    texts = scripts(plan)
    run.create()
    write_whole(run.lock, recipe.locked(chosen))
    write_whole(run.plan, msgspec.json.format(msgspec.json.encode(plan), indent=2))
    for name, text in texts.items():
        write_whole(run.path / name, text, mode=0o700 if name == "send.sh" else 0o600)
    delayed = DelayedSubmission(sweep, str(run.path))
    delayed.set_timeout(plan.sweep_minutes, 0)
    delayed.dump(run.submitit / "sweep.pkl")
    return run


def check_needs(plan: Plan) -> None:
    """Raises UsageError when a file that the job will need is not there: better now than when GPUs are held."""
    for path, remedy in plan.needs.items():
        if not Path(path).exists():
            raise UsageError("the engine's image is not there", where=path, remedy=remedy)


def submit(plan: Plan, chosen: recipe.Recipe, slurm: Slurm) -> Jobs:
    """Writes the run directory and submits both jobs; if anything fails, nothing is left in the queue.

    ``jobs.json`` is written before and after each submission, so that whoever comes after a crash can tell
    what may be running.

    Raises:
        UsageError: something that the jobs need is missing.
        HostError: Slurm refused; what was submitted before has been cancelled.
    """
    check_needs(plan)
    run = write(plan, chosen)
    runs = Runs(run.path.parent, plan.site)
    jobs = Jobs()
    with _rolled_back(run, slurm):
        for role in ("serve", "sweep"):
            entry = SubmittedJob(role=role, job_id=None, time=time.time())
            _note(run, Jobs(jobs=(*jobs.jobs, entry)))
            if role == "serve":
                job_id = slurm.submit(run.serve_script)
            else:
                delay = f"+{plan.sweep_after_min}" if plan.sweep_after_min else ""
                job_id = slurm.submit(run.sweep_script, dependency=f"after:{jobs.jobs[0].job_id}{delay}")
            jobs = Jobs(jobs=(*jobs.jobs, msgspec.structs.replace(entry, job_id=job_id)), complete=role == "sweep")
            _note(run, jobs)
            runs.remember(job_id, run.run_id)
            if role == "sweep":
                pickle = JobPaths(run.submitit, job_id).submitted_pickle
                os.link(run.submitit / "sweep.pkl", pickle)
        run.record("submit", "submitted")
    return jobs


def _note(run: RunDir, jobs: Jobs) -> None:
    write_whole(run.jobs, msgspec.json.format(msgspec.json.encode(jobs), indent=2))


@contextlib.contextmanager
def _rolled_back(run: RunDir, slurm: Slurm) -> Iterator[None]:
    """Cancels what was submitted when the block fails: the sweep first, since it depends on the serve job."""
    try:
        yield
    except BaseException as error:
        sent = [job.job_id for job in reversed(run.read_jobs().jobs) if job.job_id]
        try:
            slurm.cancel(sent)
        except HostError as second:
            raise HostError(f"{error} - and what had been submitted could not be cancelled: {second}",
                            where=str(run.path), remedy=f"scancel {' '.join(sent)}") from error
        run.record("submit", "failed", reason=f"not submitted: {error or type(error).__name__}")
        raise


def cancel(run: RunDir, slurm: Slurm) -> list[str]:
    """Cancels the run's jobs, the sweep first (cancelling the serve job sets it free), and returns their ids."""
    ids = run.job_ids()
    slurm.cancel(ids[role] for role in ("sweep", "serve") if role in ids)
    run.record("cancel", "cancelled", reason="cancelled on request")
    return list(ids.values())
