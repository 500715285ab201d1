"""What a run is doing, from its files and, no oftener than the site allows, from Slurm."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from isambard_serve import asked, outcome, state, verdict
from isambard_serve import slurm as slurm_module
from isambard_serve.audit import Audit
from isambard_serve.errors import ServeError
from isambard_serve.local import Local
from isambard_serve.records import HOLDERS, Endpoint, Row, Run
from isambard_serve.run import Outline, RunDir, load_of, read_record, write_whole
from isambard_serve.slurm import JobState, Slurm, Use

ENDS = ("done", "failed", "cancelled")

SILENT_S = 60.0
"""How long a run may write nothing before whoever follows its log asks Slurm: an engine is sampled each second."""

LAST_WORDS_S = 15.0
"""How long whoever follows its log waits for a run that was told to end to have said its last words."""

UNKNOWN_S = 600.0
"""How long to wait for an unknown state to become known again."""


def read(run: RunDir, slurm: Slurm | None = None) -> Run:
    """The run as it stands.

    Args:
        slurm: asked about jobs whose files do not say that the run has ended; None asks nobody. Jobs that are
            processes of this machine are looked for in any case.
    """
    plan = read_record(run.plan, Outline)
    events = run.read_events()
    jobs = run.read_jobs()
    ids = run.job_ids()
    silence_s = _silence_s(run)
    answers: dict[str, JobState] = {}
    now, reason = state.fold(events, jobs, answers, None)
    if now not in ENDS and ids and (slurm or plan.scheduler == "local"):
        if slurm:
            cache = run.path.parent / ".jobs" / "slurm.json"
            answers = slurm_module.states_within_limit(slurm, ids.values(), cache, plan.poll_interval_s)
        else:
            answers = Local().states(ids.values())
            # A process may have said its last word and ended since.
            events = run.read_events()
        now, reason = state.fold(events, jobs, answers, silence_s)
    # What rungs of one job have held, the accounting cannot tell apart.
    accounted = plan.scheduler == "slurm" and not plan.same_node
    used = _used(run, plan, slurm, ids) if now in ENDS and accounted else {}
    node_hours = _node_hours(run, plan, ended=now in ENDS)
    if used:
        node_hours = round(sum(use.gpus * use.elapsed_s for use in used.values()) / 3600 / plan.node_gpus, 6)
    endpoint = _endpoint(run) if now in ("ready", "measuring") and plan.placement == "none" else None
    kept, rows = len(run.kept()), run.read_rows()
    return Run(
        run_id=run.run_id,
        recipe=plan.recipe,
        ladder=plan.ladder[0] if plan.ladder else None,
        site=plan.site,
        simulated=plan.simulated,
        state=now,
        reason=reason,
        jobs=ids,
        node_hours=node_hours,
        node_hours_by="sacct" if used else "clock",
        directory=str(run.path),
        points_done=kept,
        points_planned=None if plan.search else len(plan.points) + len(asked.read(run)),
        points_invalid=kept - sum(row.valid for row in rows),
        binding=_binding(run),
        url=endpoint.url if endpoint else None,
        key_file=endpoint.key_file if endpoint else None,
        verdict=verdict.of(rows, outcome.read(run), _compared_with(run, plan)),
    )


def _compared_with(run: RunDir, plan: Outline) -> list[Row] | None:
    """The rows of the ladder's first rung; None if the run is that, or on no ladder, or had another load."""
    first = run.path.parent / (plan.ladder[0] if plan.ladder else run.run_id)
    return None if first == run.path or load_of(RunDir(first)) != load_of(run) else RunDir(first).read_rows()


def _endpoint(run: RunDir) -> Endpoint | None:
    with contextlib.suppress(FileNotFoundError, ServeError):
        return read_record(run.endpoint, Endpoint)
    return None


def has_ended(run: RunDir) -> bool:
    """Whether the run's own files say that it has ended. Nobody is asked: they may lie far from where it runs."""
    now, _ = state.fold(run.read_events(), run.read_jobs(), {}, None)
    return now in ENDS


def _binding(run: RunDir) -> str | None:
    with contextlib.suppress(FileNotFoundError, ServeError):
        return read_record(run.binding, Audit).summary
    return None


def _silence_s(run: RunDir) -> float | None:
    """Seconds since the engine's node wrote anything; None if it never has."""
    newest = 0.0
    for path in (run.samples, *(run.events / f"{holder}.jsonl" for holder in HOLDERS), run.engine_log, run.task_log):
        with contextlib.suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return time.time() - newest if newest else None


def _used(run: RunDir, plan: Outline, slurm: Slurm | None, ids: dict[str, str]) -> dict[str, Use]:
    """What the run's jobs have held, by the accounting; empty until it knows that all have ended.

    What it says once is kept in the run directory, and it is asked no oftener than the site allows.
    """
    with contextlib.suppress(FileNotFoundError):
        return read_record(run.used, dict[str, Use])
    asked = run.path.parent / ".jobs" / "sacct-asked"
    if slurm is None or not ids or (asked.exists() and 0 <= time.time() - asked.stat().st_mtime < plan.poll_interval_s):
        return {}
    asked.parent.mkdir(mode=0o700, exist_ok=True)
    asked.touch(mode=0o600)
    used = slurm.used(ids.values())
    if not set(ids.values()) <= used.keys():
        return {}
    write_whole(run.used, msgspec.json.encode(used))
    return used


def _node_hours(run: RunDir, plan: Outline, *, ended: bool) -> float | None:
    """What the serve job has held, by the run's own clock: from its first event to its last, or to now."""
    events, _ = state.since_resent(run.read_events(HOLDERS))
    times = [event.time for event in events]
    if not times:
        return None
    held_s = (times[-1] if ended else time.time()) - times[0]
    return round(held_s / 3600 * plan.gpus / plan.node_gpus, 6)


def follow(path: Path, run: RunDir, slurm: Slurm | None, *, skip: int = 0, tick_s: float = 0.5) -> Iterator[bytes]:
    """The content of ``path`` as it grows, but for its first ``skip`` bytes, until the run has ended.

    The run's own files tell of its end. Slurm is asked only when the run has been silent for :data:`SILENT_S`, for
    a job that could not say a last word, and then no oftener than the site allows.
    """
    position = skip
    seen_ended: float | None = None
    while True:
        silence_s = _silence_s(run)
        silent = time.time() - run.jobs.stat().st_mtime if silence_s is None and run.jobs.exists() else silence_s
        now = read(run, slurm if silent is not None and silent > SILENT_S else None).state
        if now in ENDS and seen_ended is None:
            seen_ended = time.monotonic()
        ended = now == "unknown" or (seen_ended is not None and (
            _fell_silent(run) or time.monotonic() - seen_ended > LAST_WORDS_S))
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            file.seek(position)
            while block := file.read(1 << 16):
                position += len(block)
                yield block
        if ended:
            return
        time.sleep(tick_s)


def _fell_silent(run: RunDir) -> bool:
    """Whether its job has said how it ended, or none ever ran: a run that is cancelled goes on for a moment."""
    said = [event.event for event in run.read_events() if event.writer in HOLDERS]
    return not said or any(event in ENDS for event in said)


def wait(run: RunDir, slurm: Slurm | None, changed: Callable[[Run], None], tick_s: float = 1.0,
         until: Sequence[str] = ()) -> Run:
    """Waits until the run has ended, or is in a state of ``until``, and returns it.

    ``changed`` is told of each new state and point.

    An unknown state may become known again, when Slurm is back; it is waited for, but not for ever.
    """
    last: tuple[object, ...] = ()
    known = time.monotonic()
    while True:
        now = read(run, slurm)
        seen = (now.state, now.reason if now.state in ENDS else None, now.points_done)
        if seen != last:
            changed(now)
            last = seen
        if now.state != "unknown":
            known = time.monotonic()
        if now.state in (*ENDS, *until) or time.monotonic() - known > UNKNOWN_S:
            return now
        time.sleep(tick_s)
