"""A serve job that finds its node bad sends itself again, once, to another one.

It stays the same run, whose jobs are others: nothing has been measured yet that the new node could be mixed up with.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import msgspec

from isambard_serve.errors import HostError, ServeError
from isambard_serve.plan import Plan
from isambard_serve.records import Jobs, SubmittedJob
from isambard_serve.run import RunDir, Runs
from isambard_serve.slurm import Slurm

RESENT = 75
"""The exit code that says so: sysexits.h's EX_TEMPFAIL, by which a ladder's job starts no further rung."""

TICK_S = 0.5
SUBMITTED_S = 30.0
"""How long the submission may take to note its last job after its first has begun."""


def neighbours(run: RunDir, ladder: tuple[str, ...]) -> tuple[str | None, str | None]:
    """The serve jobs of the nearest rungs of ``ladder`` before and behind ``run`` that nobody has cancelled."""
    rungs = [RunDir(run.path.parent / run_id) for run_id in ladder]
    place = ladder.index(run.run_id) if ladder else 0

    def nearest(side: Sequence[RunDir]) -> str | None:
        return next((rung.job_ids().get("serve") for rung in side if not rung.read_events(["cancel"])), None)

    return nearest(rungs[:place][::-1]), nearest(rungs[place + 1:])


def resend(run: RunDir, plan: Plan, node: str, why: str, cluster: Slurm) -> str:
    """Sends the serve job of ``run`` again, to any node but ``node`` and those that it avoids; returns its id.

    The sweep and the next rung of the ladder wait for the new job instead. A sweep that has begun to wait is
    cancelled, since it would hold its GPU meanwhile: then the new job measures by itself.

    Of a ladder on one node the whole job is sent again, unless a rung has been served already: they stay together.

    Raises:
        ServeError: it has been sent again before, or cannot be.
        HostError: Slurm refused.
    """
    if plan.scheduler == "local":
        raise ServeError(f"{why}; there is no other node")
    rungs = [RunDir(run.path.parent / run_id) for run_id in plan.ladder] if plan.same_node else [run]
    before = {event.event for rung in rungs for event in rung.read_events(["serve"])}
    if "resent" in before:
        raise ServeError(f"{why}; it was the second node, and a third is not tried")
    if "loading" in before:
        raise ServeError(f"{why}; the rungs before were served there, and all stay on one node")
    jobs = _jobs(rungs[-1], why)
    avoided = [str(plan.serve_directives["exclude"])] if "exclude" in plan.serve_directives else []
    entry = SubmittedJob(role="serve", job_id=None, time=time.time())
    rest = tuple(job for job in jobs.jobs if job.role != "serve")
    for rung in rungs:
        rung.write_jobs(Jobs(jobs=(entry, *rest), complete=True))
    script = rungs[0].ladder_script if plan.same_node else run.serve_script
    try:
        job_id = cluster.submit(script, exclude=",".join([*avoided, node]))
    except HostError:
        for rung in rungs:
            rung.write_jobs(jobs)
        raise
    for rung in rungs:
        rung.write_jobs(Jobs(jobs=(msgspec.structs.replace(entry, job_id=job_id), *rest), complete=True))
    Runs(run.path.parent, plan.site).remember(job_id, run.run_id)
    run.record("serve", "resent", reason=f"{why}; sent again to another node than {node}", job_id=job_id)
    with contextlib.suppress(HostError):  # the new job is under way, whatever becomes of those behind it
        _redirect(run, plan, job_id, [job.job_id for job in rest if job.role == "sweep" and job.job_id], cluster)
    return job_id


def _redirect(run: RunDir, plan: Plan, job_id: str, sweeps: Sequence[str], cluster: Slurm) -> None:
    """Has what waited for the old serve job of ``run`` wait for ``job_id``."""
    _, behind = neighbours(run, plan.ladder)
    if behind and not plan.same_node:
        cluster.depend(behind, f"afterany:{job_id}")
    delay = f"+{plan.sweep_after_min}" if plan.sweep_after_min else ""
    for sweep in sweeps:
        cluster.depend(sweep, f"after:{job_id}{delay}")
        state = cluster.states([sweep]).get(sweep)
        if state is None or state.state != "PENDING":
            cluster.cancel([sweep])


def _jobs(run: RunDir, why: str) -> Jobs:
    """What was submitted, once all of it is noted: the first job may be here before its sweep was sent."""
    deadline = time.monotonic() + SUBMITTED_S
    while not run.read_jobs().complete:
        if time.monotonic() > deadline:
            raise ServeError(f"{why}; and it cannot be sent again: nobody has noted all of its jobs",
                             remedy="submit it again")
        time.sleep(TICK_S)
    return run.read_jobs()
