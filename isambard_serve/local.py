"""Jobs without Slurm: processes of this machine, named by pid and start time (a pid alone is used again)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil

from isambard_serve.slurm import JobState

KILL_AFTER_S = 30.0
"""How long a process that was asked to end may take: the watcher ends its engine first."""

CLOCK_SHIFT_S = 2.0
"""How far a process's start time may seem to move: the kernel counts from boot, and the clock is corrected."""


def job_id(pid: int) -> str:
    """The job id of the running process ``pid``: ``local-<pid>-<start time in seconds since the epoch>``."""
    return f"local-{pid}-{round(psutil.Process(pid).create_time())}"


def _process(job: str) -> psutil.Process | None:
    """The process that ``job`` names, if it still runs."""
    with contextlib.suppress(psutil.Error, ValueError):
        _, pid, started = job.split("-")
        process = psutil.Process(int(pid))
        alive = process.status() != psutil.STATUS_ZOMBIE
        if alive and abs(process.create_time() - int(started)) <= CLOCK_SHIFT_S:
            return process
    return None


class Local:
    """The counterpart of :class:`~isambard_serve.slurm.Slurm` for jobs that are processes."""

    def states(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        """Which jobs run. One that does not has ended without this telling how: its run's events do."""
        gone = JobState(state="FAILED", reason="its process has ended")
        return {job: JobState(state="RUNNING") if _process(job) else gone for job in job_ids}

    def cancel(self, job_ids: Iterable[str]) -> None:
        """Ends jobs one after another: TERM, and KILL if that is not heeded."""
        for job in job_ids:
            process = _process(job)
            with contextlib.suppress(psutil.NoSuchProcess):
                if process:
                    process.terminate()
                    psutil.wait_procs([process], timeout=KILL_AFTER_S)
                    process.kill()
