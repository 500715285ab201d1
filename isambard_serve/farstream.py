"""Talks with ``farside`` on another machine: starts it, asks, and reads its stream of answers.

Nothing that arrives is trusted: lengths are bounded before memory is taken for them, and whatever does not have the
form that ``farside`` gives it ends the conversation.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from isambard_serve import farside, listing
from isambard_serve.errors import ConnectionLostError, HostError
from isambard_serve.listing import Listed

if TYPE_CHECKING:
    from isambard_serve.host import Host

PYTHON = ("python3", "-I", "-S")


@dataclass(frozen=True)
class Want:
    """A file to ask for, and how it begins here: with ``start`` bytes of this SHA-256, which need not be sent."""

    listed: Listed
    start: int = 0
    digest: str = ""

    @property
    def missing(self) -> int:
        """How many bytes are to come, if it begins so there too."""
        return self.listed.size - self.start

    def question(self) -> list[object]:
        """It, as ``farside`` wants to be asked."""
        each = self.listed
        return [each.path, each.size, each.mtime_ns, each.inode, self.start, self.digest]


class Inlet:
    """The far side's stream of answers, block by block.

    Read by whoever takes: a thread that read ahead would hand each block to another processor, which costs more than it
    gains. ``ssh`` and the pipe from it read ahead already.
    """

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._block = memoryview(b"")

    def take(self, count: int) -> memoryview | bytes:
        """The next ``count`` bytes.

        Raises:
            ConnectionLostError: there are no more.
            HostError: what comes has not the form that it must have.
        """
        if count <= len(self._block):
            taken, self._block = self._block[:count], self._block[count:]
            return taken
        parts = [self._block]
        left = count - len(self._block)
        while left:
            block = self._next()
            parts.append(block[:left])
            self._block = block[left:]
            left -= len(parts[-1])
        return b"".join(parts)

    def _next(self) -> memoryview:
        length, packed_length = farside.LENGTHS.unpack(self._exactly(farside.LENGTHS.size))
        if not 0 < packed_length <= length <= farside.BLOCK:
            raise malformed(f"a block of {length} bytes in {packed_length}")
        packed = self._exactly(packed_length)
        return memoryview(_unpacked(packed, length) if packed_length < length else packed)

    def _exactly(self, count: int) -> bytes:
        try:
            data = self._source.read(count)
        except (OSError, ValueError) as error:  # ValueError: the file was closed under our hands
            raise ConnectionLostError(f"the connection was lost: {error}") from error
        if len(data) < count:
            raise ConnectionLostError("the connection was lost")
        return data


def _unpacked(packed: bytes, length: int) -> bytes:
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(packed, length + 1)
    except zlib.error as error:
        raise malformed(str(error)) from None
    if len(data) != length or not decompressor.eof:
        raise malformed("a block that does not have its length")
    return data


def malformed(what: str) -> HostError:
    """The error of an answer that has not the form that it must have."""
    return HostError(f"answered something that cannot be understood: {what}")


class FarSide:
    """``farside``, running on ``host``.

    Args:
        python: the interpreter's command there.

    Raises:
        HostError: nothing can be started there.
    """

    def __init__(self, host: Host, python: Sequence[str] = PYTHON) -> None:
        self._name = host.name
        program = Path(farside.__file__).read_bytes()
        self._stream = host.start([*python, "-c", _LOAD.format(len(program))])
        self._inlet = Inlet(self._stream.stdout)
        self._closed = False
        try:
            self._say(program)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends it. Any thread may do so: what waits for its answer gets a ConnectionLostError."""
        if not self._closed:
            self._closed = True
            self._stream.close()

    def list(self, root: str, exclude: Sequence[str] = ()) -> list[Listed]:
        """The files below ``root`` that may be collected, in order, each checked.

        Raises:
            ConnectionLostError: the connection was lost.
            HostError: they cannot be read there, or one of them may not be written here.
        """
        self._say(_line({"list": root, "exclude": list(exclude)}))
        found = [entry for entry in self._entries() if farside.wanted(entry.path, exclude)]
        listing.check_apart(found)
        return found

    def ask(self, root: str, wants: Sequence[Want]) -> None:
        """Asks for files below ``root``: they come in this order, behind those that were asked for before.

        Together with those that are not answered yet it must fit into what the way there holds (an SSH channel's
        window, a pipe): nobody reads it before the answers to those before it were written.
        """
        self._say(_line({"root": root, "send": [want.question() for want in wants]}))

    def take(self, count: int) -> memoryview | bytes:
        """The next ``count`` bytes of its answer. Raises ConnectionLostError and HostError."""
        try:
            return self._inlet.take(count)
        except ConnectionLostError as lost:
            raise self._why(lost) from None

    def _entries(self) -> Iterator[Listed]:
        for _ in range(listing.MAX_FILES + 1):
            length, size, mtime_ns, mode, inode = farside.ENTRY.unpack(self.take(farside.ENTRY.size))
            if not length:
                return
            yield listing.decoded(bytes(self.take(length)), size, mtime_ns, mode, inode)
        raise HostError(f"lists more than {listing.MAX_FILES:,} files", where=self._name,
                        remedy="leave some out with --exclude PATTERN")

    def _say(self, data: bytes) -> None:
        try:
            self._stream.stdin.write(data)
            self._stream.stdin.flush()
        except (OSError, ValueError) as error:
            raise self._why(ConnectionLostError(str(error), where=self._name)) from error

    def _why(self, lost: ConnectionLostError) -> HostError:
        """What the end of its answers is due to: itself, if it can still be heard, or the connection."""
        if self._closed:
            return lost
        try:
            code = self._stream.wait()
        except ConnectionLostError as error:
            return error
        if not code:
            return lost
        said = self._stream.stderr.strip().splitlines()
        return HostError(said[-1] if said else f"the far side ended with {code}", where=self._name)


_LOAD = "import sys; exec(compile(sys.stdin.buffer.read({}), 'farside', 'exec'))"


def _line(question: dict[str, Any]) -> bytes:
    return json.dumps(question).encode() + b"\n"
