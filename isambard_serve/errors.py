"""What can go wrong, as one tree. Every error says what happened, where, and what to do about it.

::

    ServeError            exit code 1   a run failed, is invalid, or a gate said no
    ├── UsageError                  2   a command line, recipe, site or run name that cannot be used
    ├── HostError                   3   Slurm (or the machine it runs on) cannot be reached or refused
    │   ├── NoProgramError          3   a program that is needed cannot be started here
    │   └── ConnectionLostError     3   a host cannot be reached now, or the connection to it went away
    └── NotReadyError               4   something was not ready in the time it was given
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ServeError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        what: one sentence on what happened.
        where: the file, key path, host or job that it happened to.
        remedy: what the reader can do now.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  → {self.remedy}" if self.remedy else text


class UsageError(ServeError):
    """A command line, recipe, site or run name that cannot be used as it stands."""

    exit_code = 2


class HostError(ServeError):
    """Slurm, or the machine it runs on, cannot be reached or refused the request."""

    exit_code = 3


class NoProgramError(HostError):
    """A program that is needed cannot be started here: nothing was asked of it."""


class ConnectionLostError(HostError):
    """A host cannot be reached now, or the connection to it went away: another attempt may help."""


class NotReadyError(ServeError):
    """Something was not ready in the time it was given."""

    exit_code = 4


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The other known name that ``name`` was most likely meant to be, as a remedy; None when none is near."""
    close = difflib.get_close_matches(name, [each for each in known if each != name], n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else None
