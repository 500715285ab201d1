"""A program that runs on the far side, and the framing that keeps a login shell's noise out of its answer.

The far side is told to print one mark on stdout and on stderr just before the program begins. What comes before it
is the shell's own (a profile that greets, ``module`` that complains) and is dropped. A login shell is needed: at many
sites it alone sets the variables that a site file names.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Protocol, Self

from isambard_serve.errors import ConnectionLostError, HostError
from isambard_serve.records import Record

START_S = 60.0
"""How long the far side's login shell may take to begin a program."""

LAST_WORDS_S = 5.0
"""How long to wait for the rest of stderr once a program has ended: what it left behind may hold it open."""

# A plain shell (whose $0 is the mark, and $@ the program) takes the login shell's place: that would have words of its
# own at its end too (~/.bash_logout, traps). Profiles see an empty stdin, so that none can eat what is meant for the
# program, and a shell stays its parent: a signal that ends it is told as 128 + its number.
_RUN = 'printf "\\n%s\\n" "$0"; printf "\\n%s\\n" "$0" >&2; "$@" <&3 3<&-; exit $?'
_BEGIN = 'exec bash -lc \'exec /bin/sh -c "$@"\' bash "$@" 3<&0 </dev/null'

_PROFILES = "look at what its ~/.bashrc and ~/.bash_profile do"


class Done(Record, frozen=True):
    """How a far-side program ended; stdout and stderr are kept apart."""

    returncode: int
    stdout: bytes
    stderr: bytes


def new_mark() -> str:
    """A line that no profile prints."""
    return f"isambard-serve:{secrets.token_hex(8)}"


def command_line(argv: Sequence[str], mark: str) -> str:
    """``argv`` as one line for the far side's shell, whichever that is: it has to start ``/bin/sh``, and no more."""
    return shlex.join(["exec", "/bin/sh", "-c", _BEGIN, "sh", _RUN, mark, *argv])


class Ending(Protocol):
    """How a far-side program is waited for, and cut off."""

    def wait(self) -> int:
        """Its exit code. Raises ConnectionLostError if the connection went away first."""

    def cut(self) -> None:
        """Cuts it off: whoever reads from it comes to an end."""


class Stream:
    """A running far-side program.

    ``stdin`` and ``stdout`` are binary files; closing ``stdin`` is the end of its input. If the connection is lost,
    ``stdout`` simply ends: :meth:`wait` tells the difference.

    Args:
        mark: what it prints before the program begins; None if it has nothing before it.
        where: the host's name, for errors.
    """

    def __init__(self, stdin: BinaryIO, stdout: BinaryIO, stderr: BinaryIO, ending: Ending, *, where: str,
                 mark: str | None = None) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.where = where
        self._stderr = stderr
        self._ending = ending
        self._mark = None if mark is None else mark.encode()
        self._said = bytearray()
        self._sink: Callable[[bytes], None] | None = None
        self._lock = threading.Lock()
        self._begun = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._stderr as stderr:
            while line := stderr.readline():
                with self._lock:
                    if line.rstrip(b"\r\n") == self._mark:
                        self._said.clear()
                        self._begun.set()
                    elif self._sink:
                        self._sink(line)
                    else:
                        self._said += line

    @property
    def stderr(self) -> str:
        """What it has said on stderr so far, unless somebody hears it."""
        return bytes(self._said).decode(errors="replace")

    def hear(self, sink: Callable[[bytes], None]) -> None:
        """From now on gives what it says on stderr to ``sink``, beginning with what it has said so far."""
        with self._lock:
            if self._said:
                sink(bytes(self._said))
            self._said.clear()
            self._sink = sink

    def begin(self, limit_s: float = START_S) -> Self:
        """Reads up to the mark: from here on, ``stdout`` and ``stderr`` are the program's own.

        Raises:
            ConnectionLostError: the connection went away first.
            HostError: the far side's shell ended first, or did not come so far within ``limit_s``.
        """
        with limited(self, limit_s) as late:
            while line := self._line():
                if line.rstrip(b"\r\n") == self._mark:
                    self._begun.wait(LAST_WORDS_S)
                    return self
        try:
            if late.is_set():
                raise HostError(f"its login shell began no command within {limit_s:.0f} s", where=self.where,
                                remedy=_PROFILES)
            code = self.wait()
            said = self.stderr.strip()
            raise HostError(f"its login shell ended with {code} before the command began{said and ': '}{said}",
                            where=self.where, remedy=_PROFILES)
        finally:
            self.close()

    def _line(self) -> bytes:
        with contextlib.suppress(OSError):
            return self.stdout.readline()
        return b""

    def wait(self) -> int:
        """The program's exit code, once it has ended.

        Raises:
            ConnectionLostError: the connection went away first.
        """
        code = self._ending.wait()
        self._reader.join(LAST_WORDS_S)
        return code

    def cut(self) -> None:
        """Cuts the program off, if it still runs. Any thread may do so; ``stdout`` then comes to an end."""
        self._ending.cut()

    def close(self) -> None:
        """Cuts the program off, if it still runs, and lets go of everything."""
        self.cut()
        for file in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):  # what was not sent yet is lost
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def limited(stream: Stream, limit_s: float | None) -> Iterator[threading.Event]:
    """Cuts ``stream`` off when the block takes longer than ``limit_s``, and says so by the event."""
    late = threading.Event()

    def expire() -> None:
        late.set()
        stream.cut()

    timer = threading.Timer(limit_s or 0, expire)
    timer.daemon = True
    if limit_s is not None:
        timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def finish(stream: Stream, stdin: bytes, timeout_s: float | None) -> Done:
    """Feeds ``stdin`` to a program, reads all it prints, and says how it ended.

    Raises:
        ConnectionLostError: the connection went away.
        HostError: it gave no answer within ``timeout_s``.
    """
    feeder = threading.Thread(target=_feed, args=(stream.stdin, stdin), daemon=True)
    feeder.start()
    out, code = b"", None
    with stream, limited(stream, timeout_s) as late:
        try:
            with contextlib.suppress(OSError):
                out = stream.stdout.read()
            code = stream.wait()
        except ConnectionLostError:
            if not late.is_set():
                raise
        if code is None or late.is_set():
            raise HostError(f"gave no answer within {timeout_s or 0:.0f} s", where=stream.where)
        stream.cut()
        feeder.join()
        return Done(returncode=code, stdout=out, stderr=stream.stderr.encode())


def _feed(file: BinaryIO, data: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):  # the program does not want all of it
        file.write(data)
        file.close()
