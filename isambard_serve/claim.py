"""Who measures: the claim on a run's points, its heartbeat, and when somebody else may take it.

One claimant at a time runs the loop over the points. Claims are numbered files that appear once and never
change; the highest number holds. A claimant's thread counts up a heartbeat; whoever judges it re-reads the file
and uses a clock of its own, so that the clocks of two nodes are never compared.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from isambard_serve.errors import ServeError
from isambard_serve.records import Record
from isambard_serve.run import RunDir, write_once

BEAT_S = 2.0


class SupersededError(ServeError):
    """Somebody else holds the claim now: leave, and write nothing more."""


class Holder(Record, frozen=True):
    """The content of a claim: who took it, and when."""

    holder: str
    job_id: str | None
    time: float
    schema: str = "isambard-serve/claim/1"


def newest(run: RunDir) -> int:
    """The number of the claim that holds; 0 if nobody has claimed the points."""
    return max((int(path.stem) for path in run.claims.glob("*.json")), default=0)


class Claim:
    """A claim that this process took."""

    def __init__(self, run: RunDir, number: int) -> None:
        self._run = run
        self.number = number

    @classmethod
    def take(cls, run: RunDir, holder: str, job_id: str | None, *, over: int) -> Claim:
        """Takes the claim that follows number ``over``.

        Raises:
            SupersededError: somebody else was quicker.
        """
        content = Holder(holder=holder, job_id=job_id, time=time.time())
        try:
            write_once(run.claims / f"{over + 1:04d}.json", msgspec.json.encode(content))
        except FileExistsError as error:
            raise SupersededError("somebody else measures", where=f"run {run.run_id}") from error
        return cls(run, over + 1)

    def check(self) -> None:
        """Raises SupersededError if this claim no longer holds."""
        if newest(self._run) != self.number:
            raise SupersededError("somebody else has taken over the measuring", where=f"run {self._run.run_id}")

    @contextlib.contextmanager
    def beating(self, beat_s: float = BEAT_S) -> Iterator[None]:
        """Counts up the claim's heartbeat in a thread of its own, which no point holds up."""
        over = threading.Event()
        path = beat_file(self._run, self.number)

        def beat() -> None:
            count = 0
            while True:
                with contextlib.suppress(OSError):  # a full disk now need not be one at the next beat
                    path.write_text(f"{count}\n")
                count += 1
                if over.wait(beat_s):
                    return

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def beat_file(run: RunDir, number: int) -> Path:
    """Where the heartbeat of claim ``number`` is counted."""
    return run.claims / f"{number:04d}.beat"


class Vigil:
    """Watches over the claim from the node that holds the GPUs: they never wait for a claimant that is gone.

    Args:
        grace_s: how long the first claimant may take to come, from now.
        silence_s: how long a heartbeat may stand still.
    """

    def __init__(self, run: RunDir, *, grace_s: float, silence_s: float,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._grace_s = grace_s
        self._silence_s = silence_s
        self._clock = clock
        self._seen: tuple[int, str] = (0, "")
        self._since = clock()

    def reason_to_take_over(self) -> str | None:
        """Why the claim should be taken now, if it should be."""
        number = newest(self._run)
        beat = ""
        with contextlib.suppress(OSError):
            beat = beat_file(self._run, number).read_text()
        if (number, beat) != self._seen:
            self._seen = (number, beat)
            self._since = self._clock()
        waited = self._clock() - self._since
        if number == 0:
            return f"no sweep came within {self._grace_s:.0f} s" if waited > self._grace_s else None
        return f"the sweep's heartbeat stood still for {self._silence_s:.0f} s" if waited > self._silence_s else None
