"""A run's state: a pure function of its events, of what Slurm says, and of when it last showed life."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from isambard_serve.records import HOLDERS, STATES, Event, Jobs, State
from isambard_serve.slurm import JobState

SILENCE_S = 60.0
"""A run that should be alive and has shown nothing for so long, while Slurm says nothing, is ``unknown``."""

_ENDS = ("failed", "cancelled", "done")


def fold(events: Sequence[Event], jobs: Jobs, slurm: Mapping[str, JobState], silence_s: float | None
         ) -> tuple[State, str | None]:
    """The state of a run, and why.

    Args:
        events: all of the run's events, by time.
        jobs: what was submitted.
        slurm: what Slurm says of the run's jobs; jobs it does not know (or an outage) are left out.
        silence_s: seconds since the run last wrote anything on its node; None if it never has.
    """
    events, resent = since_resent(events)
    role, noted = next(((job.role, job.job_id) for job in jobs.jobs if job.role in HOLDERS), ("serve", None))
    serve = noted or next((event.job_id for event in events if event.event == "started"), None)
    # A submission that was taken for refused, and ran all the same, is what its jobs say it is.
    ran = any(event.writer in HOLDERS for event in events)
    own = [event for event in events if event.event in STATES
           and not (ran and event.writer == "submit" and event.event == "failed")]
    answer = slurm.get(serve) if serve else None

    ends = [event for event in own if event.event in _ENDS]
    if ends:
        # The first failure is the cause; what follows is its consequence. A cancellation asked for explains all.
        first = min(ends, key=lambda event: (event.event != "cancelled", event.time))
        return cast(State, first.event), first.reason
    if serve and answer and answer.ended:
        teller = "" if serve.startswith("local-") else "Slurm: "
        if answer.state == "CANCELLED":
            return "cancelled", f"{teller}the {role} job was cancelled"
        if answer.state == "COMPLETED":
            return "failed", f"{teller}the {role} job ended before the run said that it was done"
        return "failed", f"{teller}{answer.state}" + (f" ({answer.reason})" if answer.reason else "")

    reached: State = "submitted"
    for event in own:
        # A server for people is measured now and then, from inside, and is ready again.
        again = (event.writer, event.event, reached) == ("inside", "ready", "measuring")
        if again or STATES.index(event.event) > STATES.index(reached):
            reached = cast(State, event.event)
    if answer and answer.state == "COMPLETING" and STATES.index(reached) < STATES.index("stopping"):
        return "stopping", "Slurm: COMPLETING" + (f" ({answer.reason})" if answer.reason else "")
    if reached == "submitted":
        now, why = _submitted(jobs, serve, slurm)
        return now, "; ".join(part for part in (resent, why) if part) or None
    if answer is None and silence_s is not None and silence_s > SILENCE_S:
        return "unknown", f"last was {reached}; no sign of life for {silence_s:.0f} s, and Slurm does not say"
    return reached, _cut_off(jobs)


def since_resent(events: Sequence[Event]) -> tuple[Sequence[Event], str | None]:
    """The events since the serve job was last sent again, and why it was; all of them if it never was."""
    for place in range(len(events) - 1, -1, -1):
        if events[place].event == "resent":
            cancelled = [event for event in events[:place] if event.writer == "cancel"]
            return [*cancelled, *events[place + 1:]], events[place].reason
    return events, None


def _submitted(jobs: Jobs, serve: str | None, slurm: Mapping[str, JobState]) -> tuple[State, str | None]:
    controller = next((job.job_id for job in jobs.jobs if job.role == "controller"), None)
    if controller and serve is None:
        gone = controller in slurm and slurm[controller].ended
        return ("failed", "the process that was to run it has ended") if gone else ("submitted", "waits for its turn")
    answer = slurm.get(serve) if serve else None
    if serve is None:
        if jobs.jobs:
            return "unknown", "the submission was cut off before Slurm's answer was noted: look for it with squeue"
        return "unknown", "nothing was submitted"
    waiting = f"Slurm: {answer.state}" + (f" ({answer.reason})" if answer.reason else "") if answer else None
    if answer and answer.state == "RUNNING":
        waiting = "its job runs; the run itself has not begun"
    return "submitted", _cut_off(jobs) or waiting


def _cut_off(jobs: Jobs) -> str | None:
    """What to say of a run whose submission was interrupted between its jobs."""
    if jobs.jobs and not jobs.complete:
        return ("the submission was cut off: no sweep was submitted, and the serve job ends after its idle_timeout; "
                "cancel this run and submit again")
    return None
