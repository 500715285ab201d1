"""The loop over the points: each is measured by a load generator beside the engine, judged, and kept at once."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from isambard_serve import bench, process
from isambard_serve.claim import Claim, SupersededError
from isambard_serve.engine import EngineClient, EngineUnreachableError
from isambard_serve.errors import ServeError
from isambard_serve.plan import Plan, Point
from isambard_serve.records import Row, Sample, Writer
from isambard_serve.run import RunDir, read_lines, write_once

TICK_S = 0.5
STOP_GRACE_S = 10.0
ATTEMPTS = 3
"""How often a load generator is started that leaves no result at all."""

DRAIN_S = 60.0
"""How long the engine may take to let go of a predecessor's requests."""

PROOF_S = 15.0
"""How long to wait for a sign that the engine outlived a point that went wrong."""

Start = Callable[..., "subprocess.Popen[bytes]"]


class EngineGoneError(ServeError):
    """The serve job ended, or is ending, while points were still to do."""


def serve_end(run: RunDir) -> str | None:
    """Why the serve job is at its end, if it is."""
    for event in run.read_events(["serve", "cancel"]):
        if event.event in ("failed", "stopping", "done", "cancelled"):
            return event.reason or event.event
    return None


class Loop:
    """Measures a run's points, for whoever holds the claim.

    Args:
        writer: whose events tell of the points.
        step: the words before the load generator's own command: what puts it beside the engine.
        node: the engine's node, and ``port``: where it listens there.
        env: the load generator's variables.
        start: starts a program; tests put a fake here.
    """

    def __init__(self, run: RunDir, plan: Plan, claim: Claim, *, writer: Writer, step: Sequence[str], node: str,
                 port: str, env: Mapping[str, str], start: Start = process.start) -> None:
        self._run = run
        self._plan = plan
        self._claim = claim
        self._writer: Writer = writer
        self._step = step
        self._node = node
        self._port = port
        self._env = env
        self._start = start

    def measure_all(self) -> None:
        """Measures every point that has no row yet.

        Raises:
            EngineGoneError: the engine went away; the rows kept so far stay.
            SupersededError: somebody else measures now.
        """
        for point in self._plan.points:
            if not (self._run.points / point.name / "row.json").exists():
                self._claim.check()
                self.measure(point)

    def measure(self, point: Point) -> Row:
        """Measures one point and keeps its row.

        A load generator that left no result (its step could not be started, say) is tried again.

        Raises:
            EngineGoneError: the engine went away; nothing is kept of this point but its log.
            SupersededError: somebody else measures now, and this point is theirs.
        """
        folder = self._run.points / point.name
        folder.mkdir(mode=0o700, exist_ok=True)
        for attempt in range(ATTEMPTS):
            began = time.time()
            returncode = self._generate(point, folder, (self._claim.number - 1) * ATTEMPTS + attempt)
            result = bench.result(folder)
            window = [sample for sample in read_lines(self._run.samples, Sample) if began <= sample.time]
            kept = bench.row(self._plan, point, node=self._node, bench=result, returncode=returncode, window=window)
            if not kept.valid:
                self._check_engine_outlived(point)
            if result is not None or returncode is None:
                break
        self._claim.check()
        try:
            write_once(folder / "row.json", msgspec.json.format(msgspec.json.encode(kept), indent=2))
        except FileExistsError as error:
            raise SupersededError(f"somebody else has kept {point.name}", where=f"run {self._run.run_id}") from error
        how = None if returncode == 0 else f"the load generator ended with {returncode}: see {point.name}/bench.log"
        self._run.record(self._writer, "point", point=point.name, reason=how)
        return kept

    def _generate(self, point: Point, folder: Path, attempt: int) -> int | None:
        """Runs the load generator and returns its exit code; None if it took too long and was ended."""
        (folder / bench.RESULT).unlink(missing_ok=True)  # what a predecessor left of it is not this measurement
        command = [*self._step, *bench.argv(self._plan, point, port=self._port, folder=folder, attempt=attempt)]
        limit = time.monotonic() + self._plan.limits.point_s
        self._check_engine(point)
        child = self._start(command, env=self._env, log=folder / "bench.log")
        returncode = None
        try:
            while returncode is None and time.monotonic() < limit:
                returncode = process.ended(child, TICK_S)
                self._check_engine(point)
                self._claim.check()
        finally:
            process.stop(child, STOP_GRACE_S)
        return returncode

    def _check_engine(self, point: Point) -> None:
        gone = serve_end(self._run)
        if gone:
            raise EngineGoneError(f"the engine went away while {point.name} was measured: {gone}",
                                  where=f"run {self._run.run_id}")

    def _check_engine_outlived(self, point: Point) -> None:
        """Raises EngineGoneError if the engine died under a point that went wrong: then it is not the point's fault.

        A load generator notices at once that its engine has died, the watcher a little later, and nobody if the
        watcher died too. Two samples more are the proof that the engine still answers.
        """
        before = len(read_lines(self._run.samples, Sample))
        limit = time.monotonic() + PROOF_S
        while len(read_lines(self._run.samples, Sample)) < before + 2:
            self._check_engine(point)
            if time.monotonic() > limit:
                raise EngineGoneError(f"the engine gives no sign of life after {point.name} went wrong",
                                      where=f"run {self._run.run_id}")
            time.sleep(TICK_S)


def clear(run: RunDir, client: EngineClient) -> None:
    """Ends the load generators that a predecessor left on this node, and waits until the engine is free of them.

    Raises:
        ServeError: the engine still works on somebody's requests.
    """
    for generator in psutil.process_iter(["cmdline"]):
        # This run's own, and nobody else's: the folder of its points stands in the command.
        command = generator.info["cmdline"] or []
        if "bench" in command and any(word.startswith(f"{run.points}/") for word in command):
            with contextlib.suppress(psutil.Error):
                generator.terminate()
    limit = time.monotonic() + DRAIN_S
    while time.monotonic() < limit:
        with contextlib.suppress(EngineUnreachableError):
            sample = client.sample()
            if not sample.running and not sample.waiting:
                return
        time.sleep(TICK_S)
    raise ServeError(f"the engine still works on earlier requests after {DRAIN_S:.0f} s", where=f"run {run.run_id}")
