"""Where runs are collected from: this machine, or a host over SSH. What is done with them is the same."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from isambard_serve import collect, remote, run, status
from isambard_serve.collect import Copied
from isambard_serve.errors import HostError, UsageError
from isambard_serve.farstream import FarSide
from isambard_serve.records import Run
from isambard_serve.run import RunDir, Runs
from isambard_serve.transfer import Fetch, Progress

if TYPE_CHECKING:
    from isambard_serve.host import Host
    from isambard_serve.slurm import Slurm

FOLLOW_S = 10.0
QUIET_S = 60.0
"""A run that has written nothing for so long is asked for at the site: its own files may never say that it ended."""


class Source(Protocol):
    """Has runs, and gives their files."""

    def find(self, names: Sequence[str], *, whole_ladder: bool) -> list[Run]:
        """The runs that are named, each once, as they stand."""

    def bring(self, found: Run, folder: Path) -> Copied:
        """Brings what ``folder`` does not have of the run's files, and says what was brought since the beginning."""


class ThisMachine:
    """The runs of a site of which this is a login node, or the whole.

    Args:
        exclude: patterns of paths that are not brought.
    """

    def __init__(self, runs: Runs, slurm: Slurm | None, exclude: Sequence[str] = ()) -> None:
        self._runs = runs
        self._slurm = slurm
        self._exclude = exclude

    def find(self, names: Sequence[str], *, whole_ladder: bool) -> list[Run]:
        """The runs that are named, each once, as they stand."""
        named = [each for name in names
                 for each in (self._runs.ladder(name) if whole_ladder else [self._runs.find(name)])]
        return [status.read(each, self._slurm) for each in {each.path: each for each in named}.values()]

    def bring(self, found: Run, folder: Path) -> Copied:
        """Copies the run's files.

        Raises:
            UsageError: ``folder`` lies in the run's own directory.
        """
        directory = Path(found.directory)
        if folder.resolve().is_relative_to(directory.resolve()):
            raise UsageError("results cannot be collected into the run that they are of", where=str(folder.parent),
                             remedy="name another folder: -o DIR")
        return collect.collect(RunDir(directory), folder, self._exclude)


class OverSsh:
    """The runs that ``isambard-serve`` knows on the host ``there``. To be used in a ``with`` block.

    Args:
        fetches: the runs that were begun over a connection before this one; those begun over this one are added.
        site: the site's name there; None as that machine itself finds it.
        exclude: patterns of paths that are not brought.
        progress: told how far a run's files are.
    """

    def __init__(self, there: Host, fetches: dict[str, Fetch], *, site: str | None = None,
                 exclude: Sequence[str] = (), progress: Progress | None = None) -> None:
        self._there = there
        self._version = remote.version()
        self._fetches = fetches
        self._site = ["--site", site] if site else []
        self._exclude = exclude
        self._progress = progress
        self._pool = ThreadPoolExecutor(1)
        self._far: Future[FarSide] | None = None

    def __enter__(self) -> Self:
        # It starts while the runs are looked for.
        self._far = self._pool.submit(FarSide, self._there)
        return self

    def __exit__(self, *_: object) -> None:
        with self._pool, contextlib.suppress(HostError):
            if self._far:
                self._far.result().close()

    def find(self, names: Sequence[str], *, whole_ladder: bool) -> list[Run]:
        """The runs that are named, each once, as they stand.

        Raises:
            ServeError: as ``remote.ask`` does.
            HostError: its answer is none.
        """
        options = [*(["--ladder"] if whole_ladder else []), *self._site]
        named: list[Run] = []
        for name in names:
            answer = remote.ask(self._there, ["status", name, *options], self._version)
            try:
                named += msgspec.convert(answer["runs"], list[Run])
            except (msgspec.ValidationError, LookupError, TypeError) as error:
                raise HostError(f"its answer cannot be understood: {error}", where=self._there.name) from error
        return list({run.checked_id(each.run_id): each for each in named}.values())

    def bring(self, found: Run, folder: Path) -> Copied:
        """Fetches the run's files. Raises ServeError as ``Fetch`` and ``FarSide`` do."""
        fetch = self._fetches.setdefault(found.run_id, Fetch(found.directory, folder, exclude=self._exclude,
                                                             progress=self._progress))
        assert self._far  # noqa: S101 - this is a ``with`` block
        return fetch.run(self._there, self._far.result())


def follow(source: Source, found: Run, folder: Path, told: Callable[[Run], None],
           pause: Callable[[float], None] = time.sleep) -> Run:
    """Brings what is new of a run until it has ended, and returns it as it ended.

    Its own events say so; the site is asked only about a run that has written nothing for ``QUIET_S``.

    Args:
        told: is told of the run as the site sees it, whenever that was asked.
    """
    last, changed = None, time.monotonic()
    while True:
        copied = source.bring(found, folder)
        now = time.monotonic()
        if copied != last:
            last, changed = copied, now
        if status.has_ended(RunDir(folder)) or now - changed > QUIET_S:
            (found,) = source.find([found.run_id], whole_ladder=False)
            told(found)
            if found.state in (*status.ENDS, "unknown"):
                source.bring(found, folder)
                return found
            changed = now
        pause(FOLLOW_S)
