"""The one place that runs other programs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from isambard_serve.errors import HostError, NoProgramError
from isambard_serve.records import Record


class Completed(Record, frozen=True):
    """How a program ended. stdout and stderr are kept apart: what is parsed never has stderr in it."""

    returncode: int
    stdout: str
    stderr: str


class Runner(Protocol):
    """Runs a program to its end. Tests put a fake here that answers Slurm's commands and refuses all others."""

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float = 60) -> Completed:
        """Runs ``argv`` and says how it ended."""


def run(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float = 60) -> Completed:
    """Runs ``argv`` without a shell and without input.

    Raises:
        NoProgramError: there is no such program, or it may not be run.
        HostError: it gave no answer within ``timeout_s``.
    """
    try:
        done = subprocess.run(argv, env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              errors="replace", timeout=timeout_s, check=False)
    except OSError as error:
        raise NoProgramError(f"{argv[0]} cannot be started here: {error.strerror}",
                             remedy="is this a login node of the site?") from error
    except subprocess.TimeoutExpired as error:
        raise HostError(f"{argv[0]} gave no answer within {timeout_s:.0f} s") from error
    return Completed(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)


def start(argv: Sequence[str], *, env: Mapping[str, str], log: Path, bound: bool = False) -> subprocess.Popen[bytes]:
    """Starts ``argv`` in a process group of its own, its output appended to ``log``.

    Args:
        bound: the kernel ends it (TERM) when this thread dies, by whatever cause; on Linux only.
    """
    with open(log, "ab") as output:
        return subprocess.Popen(argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=output,
                                stderr=subprocess.STDOUT, process_group=0,
                                preexec_fn=_die_with_parent if bound and sys.platform == "linux" else None)


def converse(argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts ``argv`` in a process group of its own to talk to through pipes; what it says beside goes to ``log``."""
    with open(log, "ab") as output:
        return subprocess.Popen(argv, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
                                process_group=0, bufsize=0)


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def stop(child: subprocess.Popen[bytes], grace_s: float) -> int:
    """Ends ``child`` and its process group: TERM, and KILL after ``grace_s``. Returns its exit code."""
    _signal_group(child, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace_s)
    # Also when the leader has gone: others of its group may be left.
    _signal_group(child, signal.SIGKILL)
    return child.wait()


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # The id stays taken while any process of the group lives, so a group that is found is the child's own.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def ended(child: subprocess.Popen[bytes], within_s: float) -> int | None:
    """The exit code of ``child`` if it ends within ``within_s``, else None."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(within_s)
    return None
