"""Slurm: what is sent to it and what its answers mean. Written against 22.05 and 24.11, parsed defensively."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from isambard_serve import process, run
from isambard_serve.errors import HostError
from isambard_serve.process import Completed, Runner
from isambard_serve.records import Record

_PASSED = ("HOME", "USER", "LOGNAME", "PATH", "LANG", "SLURM_CONF")
_REMEDIES = {
    "QOSMaxWallDurationPerJobLimit": "the time asked for is longer than the QoS allows: --time",
    "QOSMaxSubmitJobPerUserLimit": "you have as many jobs as the QoS allows: wait, or cancel some",
    "AssocGrpGRESMinutesLimit": "the project's credit does not cover the time and GPUs asked for",
    "Invalid account": "check account in the site file",
    "Invalid qos": "check qos in the site file",
    "invalid partition": "check partition in the site file",
}

ANSWER_S = 15.0
"""How long Slurm may take to answer a question. In an outage its commands try again for a minute before they fail."""

ENDED = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
                   "PREEMPTED", "REVOKED", "TIMEOUT"})
"""Slurm's terminal job states (squeue's manual page, JOB STATE CODES)."""


class JobState(Record, frozen=True):
    """What Slurm says of one job: its state, why it waits or how it ended, and when it must end at the latest."""

    state: str
    reason: str | None = None

    @property
    def ended(self) -> bool:
        """Whether the job will never run again."""
        return self.state in ENDED


class Use(Record, frozen=True):
    """What the accounting says that an ended job has held: GPUs, and for how many seconds."""

    gpus: int
    elapsed_s: int


class _Answer(Record, frozen=True):
    time: float
    states: dict[str, JobState]


def environment(export: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that Slurm's commands get: those it needs and ``export``, nothing that could override a script.

    ``SBATCH_*`` and ``SLURM_*`` of the submitting shell win over ``#SBATCH`` lines, so none is passed on.
    """
    return {name: environ[name] for name in (*_PASSED, *export) if name in environ}


def stripped(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what Slurm put there: an inner srun would take it for its own options."""
    return {name: value for name, value in environ.items()
            if not name.startswith(("SLURM_", "SRUN_", "SBATCH_", "SALLOC_")) or name == "SLURM_CONF"}


class Slurm:
    """Slurm's commands on this machine.

    Args:
        env: the variables that the commands get; see :func:`environment`.
        runner: runs them; tests put a fake here.
    """

    def __init__(self, env: Mapping[str, str], runner: Runner = process.run) -> None:
        self._env = env
        self._runner = runner

    def _call(self, *argv: str, timeout_s: float = 60) -> Completed:
        return self._runner(argv, env=self._env, timeout_s=timeout_s)

    def submit(self, script: Path, *, dependency: str | None = None, exclude: str | None = None) -> str:
        """Submits ``script`` and returns the job's id.

        Args:
            exclude: nodes that it shall not run on, in place of those that the script excludes.

        Raises:
            HostError: Slurm refused it, or its answer holds no job id.
        """
        wanted = {"dependency": dependency, "exclude": exclude}
        options = [f"--{name}={value}" for name, value in wanted.items() if value]
        done = self._call("sbatch", "--parsable", *options, str(script))
        match = re.match(r"\s*(\d+)(?:;\S+)?\s*$", done.stdout)
        if done.returncode != 0 or not match:
            raise _refusal(done, str(script))
        return match[1]

    def accepts(self, words: Sequence[str], what: str) -> None:
        """Asks whether a job with the directives ``words`` would be taken; none is submitted.

        Raises:
            HostError: Slurm would refuse ``what``, and says why.
        """
        done = self._call("sbatch", "--test-only", *words, "--wrap=true", timeout_s=ANSWER_S)
        if done.returncode != 0:
            raise _refusal(done, what)

    def ask(self, *argv: str) -> str:
        """What one of Slurm's commands prints.

        Raises:
            HostError: it failed, gave no answer in time, or is not there.
        """
        done = self._call(*argv, timeout_s=ANSWER_S)
        if done.returncode != 0:
            said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
            raise HostError(said, where=argv[0])
        return done.stdout

    def cancel(self, job_ids: Iterable[str]) -> None:
        """Cancels jobs, one by one in the order given. A job that has ended already is no error.

        Raises:
            HostError: Slurm refused, or could not be reached; later jobs were asked for all the same.
        """
        refused = []
        for job_id in job_ids:
            done = self._call("scancel", job_id)
            if done.returncode != 0 and "Invalid job id" not in done.stderr:
                refused.append(f"{job_id}: {done.stderr.strip()}")
        if refused:
            raise HostError(f"scancel failed for {'; '.join(refused)}")

    def cancel_named(self, name: str) -> None:
        """Cancels the user's jobs called ``name``: one whose id was never heard, because the answer was lost.

        Raises:
            HostError: Slurm refused, or could not be reached.
        """
        done = self._call("scancel", "--me", f"--name={name}")
        if done.returncode != 0:
            raise HostError(f"scancel --name={name} failed: {done.stderr.strip()}")

    def depend(self, job_id: str, dependency: str) -> None:
        """Gives a pending job another dependency.

        Slurm refuses one that names a job it has forgotten; no error, since what it has forgotten has ended.
        """
        self._call("scontrol", "update", f"JobId={job_id}", f"Dependency={dependency}")

    def states(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        """What Slurm says of ``job_ids``, and of the user's other jobs that it names beside them.

        A job that it no longer knows is left out, and so are all in an outage: that is no end.
        """
        found: dict[str, JobState] = {}
        wanted = sorted(set(job_ids))
        if not wanted:
            return found
        # One unknown id makes squeue refuse the whole list on some versions, so ended jobs are asked for by user.
        with contextlib.suppress(HostError):
            done = self._call("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r",
                              timeout_s=ANSWER_S)
            if done.returncode == 0:
                found = parse_states(done.stdout)
        missing = [job_id for job_id in wanted if job_id not in found]
        if missing:
            with contextlib.suppress(HostError):
                done = self._call("sacct", "-nPX", "-j", ",".join(missing), "--format=JobID,State,ExitCode",
                                  timeout_s=ANSWER_S)
                if done.returncode == 0:
                    found |= parse_states(done.stdout)
        return found

    def used(self, job_ids: Iterable[str]) -> dict[str, Use]:
        """What ended jobs have held, by the accounting. Jobs that still run, and all in an outage, are left out."""
        with contextlib.suppress(HostError):
            done = self._call("sacct", "-nPX", "-j", ",".join(job_ids), "--format=JobID,State,ElapsedRaw,End,AllocTRES",
                              timeout_s=ANSWER_S)
            if done.returncode == 0:
                return parse_used(done.stdout)
        return {}

    def end_time(self, job_id: str) -> float | None:
        """When the job must end at the latest (seconds since the epoch); None if Slurm does not say."""
        with contextlib.suppress(HostError):
            return parse_end_time(self._call("scontrol", "show", "job", "-o", job_id, timeout_s=ANSWER_S).stdout)
        return None


def _refusal(done: Completed, where: str) -> HostError:
    """Slurm's refusal of a job in its own words, with a remedy where one is known."""
    said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
    remedy = next((text for word, text in _REMEDIES.items() if word in said), None)
    return HostError(f"Slurm refused the job: {said}", where=where, remedy=remedy)


def parse_states(text: str) -> dict[str, JobState]:
    """Lines of ``id|state|reason`` as squeue (``%i|%T|%r``) and sacct print them, by job id."""
    states = {}
    for line in text.splitlines():
        job_id, bar, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        if bar and job_id.isdigit() and state:
            # sacct writes "CANCELLED by 1000"; squeue's reason "None" is no reason.
            states[job_id] = JobState(state=state.split()[0], reason=reason if reason not in ("", "None") else None)
    return states


def parse_used(text: str) -> dict[str, Use]:
    """The ended jobs in lines of ``id|state|seconds|end|TRES`` as sacct prints them, by job id.

    After an outage the accounting can know that a job has ended before it knows when; its seconds still grow then.
    """
    used = {}
    for line in text.splitlines():
        job_id, state, elapsed_s, end, tres = [*line.strip().split("|"), "", "", "", ""][:5]
        gpus = re.search(r"\bgres/gpu=(\d+)", tres)
        ended = state.split(" ")[0] in ENDED and end not in ("", "Unknown")
        if job_id.isdigit() and elapsed_s.isdigit() and ended:
            used[job_id] = Use(gpus=int(gpus[1]) if gpus else 0, elapsed_s=int(elapsed_s))
    return used


def parse_end_time(text: str) -> float | None:
    """``EndTime`` of ``scontrol show job``, which is in this machine's time zone."""
    match = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
    return time.mktime(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S")) if match else None


def states_within_limit(slurm: Slurm, job_ids: Iterable[str], cache: Path, interval_s: float,
                        now: float | None = None) -> dict[str, JobState]:
    """:meth:`Slurm.states`, asked no oftener than the site allows: a younger answer in ``cache`` is used again.

    The cache is shared by all of a user's commands at a site. Jobs that it does not hold are taken as not known.
    """
    now = time.time() if now is None else now
    wanted = set(job_ids)
    known: dict[str, JobState] = {}
    with contextlib.suppress(OSError, msgspec.DecodeError):
        answer = msgspec.json.decode(cache.read_bytes(), type=_Answer)
        known = answer.states
        if 0 <= now - answer.time < interval_s:
            return {job_id: state for job_id, state in known.items() if job_id in wanted}
    # Ended jobs stay ended; asking for them again would only lengthen the question.
    ended = {job_id: state for job_id, state in known.items() if state.ended}
    open_jobs = wanted - ended.keys()
    fresh = slurm.states(open_jobs) if open_jobs else {}
    if open_jobs:
        os.makedirs(cache.parent, mode=0o700, exist_ok=True)
        run.write_whole(cache, msgspec.json.encode(_Answer(time=now, states={**ended, **fresh})))
    return {job_id: state for job_id, state in {**ended, **fresh}.items() if job_id in wanted}
