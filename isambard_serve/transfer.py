"""Collecting from another machine: what is missing here is fetched over SSH, whole files only, and nothing twice.

A file is not fetched again while its size and time of last change are those of the file here. If they are not, the
SHA-256 of the bytes that are here goes with the question, and only what follows them is sent: so a log that has grown
costs what it has grown by, and a file that a lost connection cut short goes on where it was cut.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from isambard_serve import farside, listing
from isambard_serve.collect import Copied, unreadable
from isambard_serve.errors import ConnectionLostError, HostError, UsageError
from isambard_serve.farstream import FarSide
from isambard_serve.landing import SAME, Landing
from isambard_serve.listing import Listed

if TYPE_CHECKING:
    from isambard_serve.host import Host

BATCH_FILES = 128
BATCH_BYTES = 1 << 20
"""Files are asked for in batches: few enough for one question, and enough to be worth one."""

AHEAD_FILES = 1024
AHEAD_BYTES = 16 << 20
"""So much is asked for before it comes: more than is under way on any link, so that none is idle for want of it."""

MAX_STREAMS = 4
TRIAL_S = 1.0
PAYS = 5.0
"""Further streams are begun where the first has been at it for a trial, and would take so many times as long for the
rest. OpenSSH has no more than 2 MiB under way in each: 20 MB/s with a round trip of 100 ms. Where the host is near
one is enough, and more of them take processors from it."""


class Progress(Protocol):
    """Told what is to come and what has come, in bytes of files; from several threads."""

    def begin(self, total: int) -> None:
        """So many bytes are to come from now on."""

    def advance(self, count: int) -> None:
        """So many more have come."""


class Fetch:
    """Brings what is missing of the run directory ``root`` on a host below ``folder``.

    :meth:`run` can be repeated, over a new connection after one that was lost: what is whole stays, and the file that
    was under way goes on where it was cut.

    Args:
        exclude: patterns of paths that are left out, as ``fnmatch`` has them; ``*`` matches slashes too.
        progress: told how far it is.
    """

    def __init__(self, root: str, folder: Path, *, exclude: Sequence[str] = (), progress: Progress | None = None
                 ) -> None:
        self._root = root
        self._folder = folder
        self._exclude = tuple(exclude)
        self._progress = progress
        self._batches: deque[list[Listed]] = deque()
        self._here: dict[str, os.stat_result] = {}
        self._open: list[FarSide] = []
        self._lock = threading.Lock()
        self._unreadable: list[str] = []
        self._unchanged: int | None = None
        self._files = self._bytes = self._due = 0

    def run(self, host: Host, first: FarSide) -> Copied:
        """Fetches over ``host`` and says what this and earlier runs have fetched.

        Args:
            first: runs on ``host``. It has been ended if an error is raised.

        Raises:
            UsageError: another collection writes to the folder.
            ConnectionLostError: the connection was lost.
            HostError: the directory cannot be read there, or what the host says not be believed.
            ServeError: a file arrived damaged, or cannot be written here.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with _alone(self._folder), self._ended_by_errors(first):
            listed = first.list(self._root, self._exclude)
            self._here = listing.scan(self._folder)
            todo = listing.missing(listed, self._here)
            if self._unchanged is None:
                self._unchanged = len(listed) - len(todo)
            listing.check_room(todo, shutil.disk_usage(self._folder).free, self._folder)
            self._due = sum(each.size - listing.beginning(each, self._here)[1] for each in todo)
            if self._progress:
                self._progress.begin(self._due)
            self._unreadable = []
            self._batches = deque(batches(todo))
            self._receive(host, first)
            listing.forget_parts(self._folder, self._here)
        if self._unreadable:
            raise unreadable(self._unreadable, f"{host.name}:{self._root}")
        return Copied(files=self._files, bytes=self._bytes, unchanged=self._unchanged)

    @contextlib.contextmanager
    def _ended_by_errors(self, far: FarSide) -> Iterator[None]:
        """What ``far`` still has to say after an error, nobody knows."""
        self._open.append(far)
        try:
            yield
        except BaseException:
            far.close()
            raise
        finally:
            self._open.remove(far)

    def _receive(self, host: Host, first: FarSide) -> None:
        """Shares the batches among ``first`` and, where that pays, further far sides.

        When one is lost, the others take what has reached them, and go on while they can; any other error ends all.
        """
        lost: ConnectionLostError | None = None
        due = self._due
        with ThreadPoolExecutor(MAX_STREAMS) as pool:
            works = [pool.submit(self._work, first)]
            try:
                if wait(works, TRIAL_S).not_done and self._batches and self._due > PAYS * (due - self._due):
                    works += [pool.submit(self._help, host) for _ in range(MAX_STREAMS - 1)]
                for done in as_completed(works):
                    try:
                        done.result()
                    except ConnectionLostError as error:
                        lost = error
            except BaseException:
                for far in tuple(self._open):
                    far.close()
                raise
        if lost:
            raise lost

    def _help(self, host: Host) -> None:
        try:
            far = FarSide(host)
        except HostError:  # a host may allow one session only; the first does it all then
            return
        with contextlib.closing(far), self._ended_by_errors(far):
            self._work(far)

    def _work(self, far: FarSide) -> None:
        """Receives files over ``far`` until there are no more to ask for."""
        share = _Share(far, self._root, self._next_batch, self._advance)
        while landing := share.next():
            self._note(landing.want.listed, landing.receive(far.take, share.arrived))

    def _next_batch(self) -> list[Landing]:
        with contextlib.suppress(IndexError):  # another thread may have taken the last one
            return [Landing(self._folder, each, self._here) for each in self._batches.popleft()]
        return []

    def _advance(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            self._due -= count
        if self._progress:
            self._progress.advance(count)

    def _note(self, listed: Listed, state: int) -> None:
        with self._lock:
            if state == farside.UNREADABLE:
                self._unreadable.append(listed.path)
            self._files += state == farside.SENT
            self._unchanged = (self._unchanged or 0) + (state == SAME)


class _Share:
    """What one far side was asked for and has not sent yet: always a little ahead of what arrives.

    Args:
        take_batch: gives the next files to ask for; none when there are no more.
        advance: told of bytes that have come.
    """

    def __init__(self, far: FarSide, root: str, take_batch: Callable[[], Sequence[Landing]],
                 advance: Callable[[int], None]) -> None:
        self._far = far
        self._root = root
        self._take_batch = take_batch
        self._advance = advance
        self._asked: deque[Landing] = deque()
        self._due = 0
        self._left = 0

    def next(self) -> Landing | None:
        """The file that comes next; None when all have come."""
        self._due -= self._left  # what of the last one did not come after all
        self._ask()
        landing = self._asked.popleft() if self._asked else None
        self._left = landing.want.missing if landing else 0
        return landing

    def arrived(self, count: int) -> None:
        """Takes in that so many bytes of it have come."""
        self._left -= count
        self._due -= count
        self._advance(count)
        self._ask()

    def _ask(self) -> None:
        while len(self._asked) < AHEAD_FILES and self._due < AHEAD_BYTES and (batch := self._take_batch()):
            self._far.ask(self._root, [landing.want for landing in batch])
            self._asked.extend(batch)
            self._due += sum(landing.want.missing for landing in batch)


def batches(todo: Sequence[Listed]) -> Iterator[list[Listed]]:
    """Files to ask for at once, in order."""
    batch: list[Listed] = []
    size = 0
    for each in todo:
        batch.append(each)
        size += each.size
        if len(batch) == BATCH_FILES or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Nobody else collects into ``folder`` meanwhile: the parts of files would be mixed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError("another collection writes here", where=str(folder),
                             remedy="wait for it to end") from error
        yield
    finally:
        os.close(descriptor)
