"""How far a transfer is: a bar with rate and time left, for somebody at a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from isambard_serve import transfer


class Bar:
    """A bar for the bytes of files that come.

    Args:
        shown: what the bar is a part of.
    """

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self._task: TaskID | None = None

    def begin(self, total: int) -> None:
        """So many bytes are to come from now on."""
        if self._task is not None:
            self._shown.remove_task(self._task)
        self._task = self._shown.add_task("", total=total)

    def advance(self, count: int) -> None:
        """So many more have come."""
        if self._task is not None:
            self._shown.advance(self._task, count)


@contextlib.contextmanager
def bar() -> Iterator[transfer.Progress | None]:
    """A bar on stderr for as long as the block lasts; None where nobody looks on."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        yield Bar(shown)
