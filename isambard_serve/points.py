"""The loop over the points: each is measured by a step beside the engine, judged, and kept at once."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping

import msgspec

from isambard_serve import bench, process
from isambard_serve.errors import ServeError
from isambard_serve.plan import Plan, Point, filled
from isambard_serve.records import Row, Sample
from isambard_serve.run import RunDir, read_lines, write_whole

TICK_S = 0.5
STOP_GRACE_S = 10.0

Start = Callable[..., "subprocess.Popen[bytes]"]


class EngineGoneError(ServeError):
    """The serve job ended, or is ending, while points were still to do."""


def serve_end(run: RunDir) -> str | None:
    """Why the serve job is at its end, if it is."""
    for event in run.read_events(["serve"]):
        if event.event in ("failed", "stopping", "done"):
            return event.reason or event.event
    return None


def measure_all(run: RunDir, plan: Plan, *, serve_job: str, port: str, env: Mapping[str, str],
                start: Start = process.start) -> list[Row]:
    """Measures every point that has no row yet, and returns the rows of this call.

    Raises:
        EngineGoneError: the engine went away; the rows kept so far stay.
    """
    rows = []
    for point in plan.points:
        if not (run.points / point.name / "row.json").exists():
            rows.append(measure(run, plan, point, serve_job=serve_job, port=port, env=env, start=start))
            run.record("sweep", "point", point=point.name)
    return rows


def measure(run: RunDir, plan: Plan, point: Point, *, serve_job: str, port: str, env: Mapping[str, str],
            start: Start = process.start) -> Row:
    """Measures one point and keeps its row.

    Raises:
        EngineGoneError: the engine went away; nothing is kept of this point but its log.
    """
    folder = run.points / point.name
    folder.mkdir(mode=0o700, exist_ok=True)
    command = [*filled(plan.step_argv, serve_job=serve_job), *bench.argv(plan, point, port=port, folder=folder)]
    began = time.time()
    child = start(command, env=env, log=folder / "bench.log")
    returncode = None
    try:
        while returncode is None and time.time() - began < plan.limits.point_s:
            returncode = process.ended(child, TICK_S)
            gone = serve_end(run)
            if gone:
                raise EngineGoneError(f"the engine went away while {point.name} was measured: {gone}",
                                      where=f"run {run.run_id}")
    finally:
        process.stop(child, STOP_GRACE_S)
    window = [sample for sample in read_lines(run.samples, Sample) if began <= sample.time]
    kept = bench.row(plan, point, bench=bench.result(folder), returncode=returncode, window=window)
    write_whole(folder / "row.json", msgspec.json.format(msgspec.json.encode(kept), indent=2))
    return kept
