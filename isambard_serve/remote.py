"""The same command line on a login node: words go there, and what it prints comes back as it is."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from io import BufferedReader
from typing import Any, BinaryIO, cast

import msgspec

from isambard_serve import host, wheel
from isambard_serve.errors import ConnectionLostError, HostError, ServeError
from isambard_serve.host import Host, Stream

VERSIONS = ".local/share/isambard-serve/versions"
"""Where on a login node `deploy` puts each version, below the home directory."""

TETHER = "ISAMBARD_SERVE_TETHERED"
"""The variable that tells the far side that its caller holds its stdin open for as long as it is there."""

MISSING = 127
_RUN = f'bin="$HOME/{VERSIONS}/$0/bin/isambard-serve"; test -x "$bin" || exit {MISSING}; {TETHER}=1 exec "$bin" "$@"'

Again = Callable[[int], list[str]]
"""The words that go on where a lost connection left off, after so many bytes of output."""


class RemoteError(ServeError):
    """What the command line on the login node said was wrong; its exit code is its own."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code


@functools.cache
def version() -> str:
    """The version that a login node must have: this very one."""
    return wheel.identity(wheel.files())


def argv(words: Sequence[str], needed: str) -> list[str]:
    """The command that runs ``words`` with the version ``needed``."""
    return ["/bin/sh", "-c", _RUN, needed, *words]


def ask(there: Host, words: Sequence[str], needed: str, timeout_s: float = 180) -> Any:
    """What ``words --json`` answers there.

    Raises:
        HostError: this version is not there, its answer cannot be understood, or the connection was lost.
        RemoteError: it failed.
    """
    done = there.run(argv([words[0], "--json", *words[1:]], needed), timeout_s=timeout_s)
    _check_present(done.returncode, there, needed)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().removeprefix("error: ")
        raise RemoteError(f"{there.name}: {said}", done.returncode)
    try:
        return msgspec.json.decode(done.stdout)
    except msgspec.DecodeError as error:
        raise HostError(f"its answer cannot be understood: {error}", where=there.name) from error


def relay(alias: str, words: Sequence[str], *, stdin: bytes = b"", again: Again | None = None,
          out: BinaryIO | None = None, err: BinaryIO | None = None) -> int:
    """Runs ``words`` on ``alias``, prints what it prints as it comes, and returns its exit code.

    Args:
        stdin: what it gets to read.
        again: makes the words that go on after a lost connection; without it nothing is tried again.

    Raises:
        HostError: the host cannot be reached, this version is not there, or the connection was lost.
    """
    out, err = out or sys.stdout.buffer, err or sys.stderr.buffer
    needed, printed, tries = version(), 0, 0

    def work(there: Host) -> int:
        nonlocal printed, tries
        tries += 1
        with there.start(argv(words if tries == 1 or not again else again(printed), needed)) as stream:
            stream.hear(lambda said: _write(err, said))
            threading.Thread(target=_feed, args=(stream, stdin), daemon=True).start()
            try:
                while block := cast(BufferedReader, stream.stdout).read1(1 << 16):
                    _write(out, block)
                    printed += len(block)
                code = stream.wait()
            except ConnectionLostError as error:
                if again:
                    raise
                raise HostError("the connection was lost", where=alias, remedy="what was begun goes on there: see "
                                f"`isambard-serve status --host {alias}`") from error
        _check_present(code, there, needed)
        return code

    return host.persistently(alias, work)


def _check_present(code: int, there: Host, needed: str) -> None:
    if code == MISSING:
        raise HostError(f"isambard-serve {needed} is not there", where=there.name,
                        remedy=f"isambard-serve deploy --host {there.name} (or add --deploy)")


def _feed(stream: Stream, data: bytes) -> None:
    """Sends ``data``, and leaves stdin open: its end tells the far side that nobody listens any more."""
    try:
        stream.stdin.write(data)
        stream.stdin.flush()
    except (OSError, ValueError):  # it has ended; its exit code says how
        return


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
