"""The loop over the points: each is measured by a load generator beside the engine, judged, and kept at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from isambard_serve import bench
from isambard_serve.claim import Claim, SupersededError
from isambard_serve.client import Client, Load
from isambard_serve.engine import EngineClient, EngineUnreachableError
from isambard_serve.errors import ServeError
from isambard_serve.evidence import CLIENT, Observer
from isambard_serve.plan import Plan, Point
from isambard_serve.records import Row, Sample, Writer
from isambard_serve.run import RunDir, append_line, read_lines, write_once, write_whole

TICK_S = 0.5
ATTEMPTS = 3
"""How often a load generator is started that leaves no result at all."""

DRAIN_S = 60.0
"""How long the engine may take to let go of a predecessor's requests."""

OUTLIVED_S = 2.0
"""What an engine answers within so long after a point went wrong proves nothing: the watcher looks every half second
whether it has died, waits as long for a signal that explains it, and then ends what looks on.
"""

PROOF_S = 15.0
"""How long to wait for a sign that the engine outlived a point that went wrong."""

UNANSWERED = frozenset({"bench_ended", "completed", "none_failed"})
"""The codes of a point whose requests were not all answered: its engine may have died."""

COUNTERS = "counters.jsonl"

WARMUP_LONG = 16
"""How many prompts of the full length warm up, some for each DP rank of a node."""

WARMUP_ISL = 64
"""How long the short prompts are: so many of them are prefilled in one step that all decode at once soon."""


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
        client: sends the loads.
        node: the engine's node, and ``url``: where it answers there.
    """

    def __init__(self, run: RunDir, plan: Plan, claim: Claim, *, writer: Writer, client: Client, node: str,
                 url: str) -> None:
        self.run = run
        self.plan = plan
        self.claim = claim
        self.url = url
        self._writer: Writer = writer
        self._client = client
        self._node = node

    def measure_all(self, points: Sequence[Point]) -> None:
        """Measures every one of ``points`` that has no row yet.

        Raises:
            EngineGoneError: the engine went away; the rows kept so far stay.
            SupersededError: somebody else measures now.
        """
        left = [point for point in points if not (self.run.points / point.name / "row.json").exists()]
        if left:
            self.warm_up(max(point.concurrency for point in left))
        for point in left:
            self.claim.check()
            self.measure(point)

    def warm_up(self, concurrency: int) -> None:
        """Has the engine meet what it will be measured with, so that it compiles nothing in a point.

        Two short loads: some prompts of the full length, and then ``concurrency`` short ones at once, which fill the
        prefill's chunks and reach the largest batch that decodes. With long prompts alone the first would have ended
        before the last had begun.

        Raises:
            EngineGoneError: the engine went away.
            SupersededError: somebody else measures now.
        """
        osl = min(self.plan.warmup_osl, self.plan.osl)
        for seed, (prompts, isl) in enumerate(((WARMUP_LONG, self.plan.isl), (concurrency, WARMUP_ISL))):
            if osl:
                words = bench.load(self.plan, url=self.url, prompts=prompts, concurrency=prompts,
                                   seed=bench.ATTEMPT_SEEDS * self.claim.number - seed - 1,
                                   isl=min(isl, self.plan.isl), osl=osl)
                with self.sent(words, self.run.points / "warmup.log", "the warm-up") as load:
                    self._wait(load, "the warm-up")

    def measure(self, point: Point) -> Row:
        """Measures one point and keeps its row.

        A load generator that left no result (its step could not be started, say) is tried again.

        Raises:
            EngineGoneError: the engine went away; nothing is kept of this point but its log.
            SupersededError: somebody else measures now, and this point is theirs.
        """
        folder = self.run.points / point.name
        folder.mkdir(mode=0o700, exist_ok=True)
        for attempt in range(ATTEMPTS):
            observer = Observer(self.run)
            returncode, window = self._generate(point, folder, (self.claim.number - 1) * ATTEMPTS + attempt)
            result = bench.result(folder)
            kept = bench.row(self.plan, point, node=self._node, bench=result, returncode=returncode, window=window,
                             evidence=observer.gathered(folder, window))
            if not UNANSWERED.isdisjoint(kept.reasons):
                self._check_engine_outlived(point)
            if result is not None or returncode is None:
                break
        self.claim.check()
        try:
            write_once(folder / "row.json", msgspec.json.format(msgspec.json.encode(kept), indent=2))
        except FileExistsError as error:
            raise SupersededError(f"somebody else has kept {point.name}", where=f"run {self.run.run_id}") from error
        how = None if returncode == 0 else f"the load generator ended with {returncode}: see {point.name}/bench.log"
        self.run.record(self._writer, "point", point=point.name, reason=how)
        return kept

    def _generate(self, point: Point, folder: Path, attempt: int) -> tuple[int | None, list[Sample]]:
        """Puts the point's load on the engine.

        Returns:
            The benchmark's exit code, None if it took too long and was ended; and the engine's samples meanwhile.
        """
        for name in (bench.RESULT, CLIENT, COUNTERS):  # what a predecessor left of them is not this measurement
            (folder / name).unlink(missing_ok=True)
        words = bench.words(self.plan, point, url=self.url, folder=folder, attempt=attempt)
        with self.sent(words, folder / "bench.log", point.name) as load:
            began = time.time()
            returncode = self._wait(load, point.name)
        if load.facts:
            write_whole(folder / CLIENT, msgspec.json.encode(load.facts))
        samples = read_lines(self.run.samples, Sample)
        if load.counters is None:
            return returncode, [sample for sample in samples if began <= sample.time]
        before, after = load.counters
        append_line(folder / COUNTERS, before)
        append_line(folder / COUNTERS, after)
        return returncode, [before, *(sample for sample in samples if before.time < sample.time < after.time), after]

    @contextlib.contextmanager
    def sent(self, words: Sequence[str], log: Path, what: str) -> Iterator[Load]:
        """A load on its way to the engine; it is broken off at the end of the block, unless it has ended.

        Raises:
            EngineGoneError: the engine has gone before ``what`` began.
            SupersededError: somebody else measures now.
        """
        self._check_engine(what)
        settled = False
        while not settled:
            settled = self._client.settled(TICK_S)
            self.check(what)
        load = self._client.start_point(words, log)
        try:
            yield load
        finally:
            load.stop()

    def _wait(self, load: Load, what: str) -> int | None:
        """Waits until ``load`` has ended, and returns how; None if it takes longer than a point may."""
        limit = time.monotonic() + self.plan.limits.point_s
        returncode = None
        while returncode is None and time.monotonic() < limit:
            returncode = load.ended(TICK_S)
            self.check(what)
        return returncode

    def check(self, what: str) -> None:
        """Raises EngineGoneError if the engine has gone, and SupersededError if somebody else measures now."""
        self._check_engine(what)
        self.claim.check()

    def drain(self, what: str) -> None:
        """Waits until the engine has let go of the requests of ``what``, as its samples show.

        Raises:
            EngineGoneError: it went away, or still works on them.
        """
        limit = time.monotonic() + DRAIN_S
        since = time.time()
        while True:
            last = read_lines(self.run.samples, Sample)[-1:]
            if last and last[0].time >= since and not last[0].running and not last[0].waiting:
                return
            self.check(what)
            if time.monotonic() > limit:
                raise EngineGoneError(f"the engine still works on {what}, which was broken off {DRAIN_S:.0f} s ago",
                                      where=f"run {self.run.run_id}")
            time.sleep(TICK_S / 5)

    def _check_engine(self, what: str) -> None:
        gone = serve_end(self.run)
        if gone:
            raise EngineGoneError(f"the engine went away while {what} was measured: {gone}",
                                  where=f"run {self.run.run_id}")

    def _check_engine_outlived(self, point: Point) -> None:
        """Raises EngineGoneError if the engine died under a point that went wrong: then it is not the point's fault.

        A load generator notices at once that its engine has died, the watcher a little later, and nobody if the
        watcher died too. One sample more after that is the proof that the engine still answers.
        """
        began = time.monotonic()
        before = None
        while True:
            samples = len(read_lines(self.run.samples, Sample))
            elapsed = time.monotonic() - began
            self._check_engine(point.name)
            if before is None or elapsed < OUTLIVED_S:
                before = samples
            elif samples > before:
                return
            if elapsed > PROOF_S:
                raise EngineGoneError(f"the engine gives no sign of life after {point.name} went wrong",
                                      where=f"run {self.run.run_id}")
            time.sleep(TICK_S)


def clear(run: RunDir, client: EngineClient) -> None:
    """Ends the load generators that a predecessor left on this node, and waits until the engine is free of them.

    Raises:
        ServeError: the engine still works on somebody's requests.
    """
    for generator in psutil.process_iter(["cmdline"]):
        # This run's own, and nobody else's: its folder stands in the command.
        command = generator.info["cmdline"] or []
        if str(run.client) in command or (
                "bench" in command and any(word.startswith(f"{run.points}/") for word in command)):
            with contextlib.suppress(psutil.Error):
                generator.terminate()
    drain(run, client)


def drain(run: RunDir, client: EngineClient) -> None:
    """Waits until the engine works on nothing.

    Raises:
        ServeError: the engine still works on somebody's requests.
    """
    limit = time.monotonic() + DRAIN_S
    while time.monotonic() < limit:
        with contextlib.suppress(EngineUnreachableError):
            sample = client.sample()
            if not sample.running and not sample.waiting:
                return
        time.sleep(TICK_S)
    raise ServeError(f"the engine still works on earlier requests after {DRAIN_S:.0f} s", where=f"run {run.run_id}")
