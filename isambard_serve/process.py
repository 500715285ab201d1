"""The one place that runs other programs."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from isambard_serve.errors import HostError, NoProgramError
from isambard_serve.records import Record

PIPE_BYTES = 1 << 20
"""What the output of a program that is talked to may hold, on Linux: with its 64 KiB, much data comes in small steps.
1 MiB is the most that an ordinary user may have (pipe-max-size in proc_sys_fs(5))."""

KILLED_S = 1.0
"""How long to wait for a killed program to be gone."""


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


def together(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], timeout_s: float) -> list[Completed | None]:
    """Runs programs (with their variables) side by side, without a shell and without input.

    None: it gave no answer within ``timeout_s``. It is killed, and not waited for: what hangs inside a driver cannot
    be killed.

    Raises:
        NoProgramError: there is no such program, or it may not be run.
    """
    with contextlib.ExitStack() as files:
        running = []
        for argv, env in commands:
            output = [files.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
            try:
                child = subprocess.Popen(argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=output[0],
                                         stderr=output[1], process_group=0)
            except OSError as error:
                raise NoProgramError(f"{argv[0]} cannot be started here: {error.strerror}") from error
            running.append((child, output))
        deadline = time.monotonic() + timeout_s
        return [_gathered(child, output, deadline) for child, output in running]


def _gathered(child: subprocess.Popen[bytes], output: Sequence[IO[bytes]], deadline: float) -> Completed | None:
    returncode = ended(child, max(0.0, deadline - time.monotonic()))
    if returncode is None:
        _signal_group(child, signal.SIGKILL)
        ended(child, KILLED_S)
        return None
    texts = []
    for file in output:
        file.seek(0)
        texts.append(file.read().decode(errors="replace"))
    return Completed(returncode=returncode, stdout=texts[0], stderr=texts[1])


def start(argv: Sequence[str], *, env: Mapping[str, str], log: Path, bound: bool = False) -> subprocess.Popen[bytes]:
    """Starts ``argv`` in a process group of its own, its output appended to ``log``.

    Its input says nothing, and ends when this process does, by whatever cause: a lifeline that reaches further than
    signals do, into other steps and containers.

    Args:
        bound: the kernel ends it (TERM) when this thread dies, by whatever cause; on Linux only.
    """
    reading, writing = os.pipe()
    try:
        with open(log, "ab") as output:
            child = subprocess.Popen(argv, env=dict(env), stdin=reading, stdout=output, stderr=subprocess.STDOUT,
                                     process_group=0,
                                     preexec_fn=_die_with_parent if bound and sys.platform == "linux" else None)
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    weakref.finalize(child, os.close, writing)
    return child


def converse(argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts ``argv`` in a process group of its own to talk to through pipes; what it says beside goes to ``log``."""
    with open(log, "ab") as output:
        return subprocess.Popen(argv, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
                                process_group=0, bufsize=0)


def piped(argv: Sequence[str], *, env: Mapping[str, str], stderr: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """Starts ``argv`` with pipes to talk to it, away from the terminal: it can ask nobody, and Ctrl-C is not for it.

    Raises:
        NoProgramError: there is no such program, or it may not be run.
    """
    try:
        child = subprocess.Popen(argv, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                                 start_new_session=True)
    except OSError as error:
        raise NoProgramError(f"{argv[0]} cannot be started here: {error.strerror}") from error
    if child.stdout and hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # somebody who has many pipes may have no more wide ones
            fcntl.fcntl(child.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return child


# $$ stays the program's own id as long as this watcher, which is of its group, lives.
_TETHERED = 'exec 3<&0 </dev/null; { cat <&3; kill "$$"; } >/dev/null 2>&1 & exec "$@" 3<&-'


def tethered(argv: Sequence[str]) -> list[str]:
    """``argv``, for a program that does not read its input, so that it ends (TERM) when its input does.

    So it does not outlive a process that was killed, on any system.
    """
    return ["/bin/sh", "-c", _TETHERED, "sh", *argv]


def attended(argv: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Runs ``argv`` at the terminal of this process, whose Ctrl-C is then for it alone, and returns its exit code.

    Raises:
        NoProgramError: there is no such program, or it may not be run.
    """
    before = signal.signal(signal.SIGINT, lambda *_: None)  # unlike SIG_IGN, a handler is not inherited
    try:
        code = subprocess.run(argv, env=dict(env), check=False).returncode
    except OSError as error:
        raise NoProgramError(f"{argv[0]} cannot be started here: {error.strerror}") from error
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code  # as a shell tells a signal


@contextlib.contextmanager
def connected(command: str) -> Iterator[socket.socket]:
    """A socket whose other end is stdin and stdout of the shell command ``command``, as a ProxyCommand wants it."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            child = subprocess.Popen(["/bin/sh", "-c", command], stdin=theirs.fileno(), stdout=theirs.fileno(),
                                     start_new_session=True)
        try:
            yield ours
        finally:
            stop(child, 1.0)


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
