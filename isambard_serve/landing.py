"""One file's way to the disk: what of it is here already, what arrives, its check, and its name once it is whole."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from io import RawIOBase
from pathlib import Path

from isambard_serve import farside
from isambard_serve.errors import ServeError
from isambard_serve.farstream import Want, malformed
from isambard_serve.listing import Listed, beginning, part_of

Take = Callable[[int], "memoryview | bytes"]

_READ = 1 << 20

SAME = 100
"""Beside the states that the far side knows: its content is what was here already."""


class DamagedError(ServeError):
    """What arrived is not the file that was asked for."""


class Landing:
    """Receives the file ``listed`` below ``folder``.

    Bytes of it that are here already, in a part that a lost connection left or in the file as it was the last time, are
    hashed, and need not come again if the file still begins with them.

    Args:
        here: the files below ``folder``, as ``listing.scan`` found them.

    Raises:
        ServeError: what is here cannot be read.
    """

    def __init__(self, folder: Path, listed: Listed, here: Mapping[str, os.stat_result]) -> None:
        self._mode = listed.mode & 0o777 | 0o600
        # Text, not pathlib's paths: there may be thousands of small files, and these take longer than the files do.
        self._target = f"{folder}/{listed.path}"
        self._part = f"{folder}/{part_of(listed.path)}"
        begun, start = beginning(listed, here)
        self._begun = f"{folder}/{begun}"
        self.want = Want(listed, start, self._digest_of(start) if start else "")

    def receive(self, take: Take, count: Callable[[int], None]) -> int:
        """Reads the answer to ``want`` and returns what became of it: ``SENT``, ``SAME``, ``GONE``, ``UNREADABLE``.

        Args:
            take: gives the answer's next bytes.
            count: told of the file's bytes as they come.

        Raises:
            HostError: the answer cannot be understood, or does not come.
            ServeError: it arrived damaged, it shrank meanwhile, or it cannot be written here.
        """
        state, start, size, mtime_ns = farside.FILE.unpack(take(farside.FILE.size))
        if state in (farside.GONE, farside.UNREADABLE):
            return int(state)
        if state != farside.SENT or start > size or start not in (0, self.want.start):
            raise malformed(f"state {state} of a file, from byte {start} of {size}")
        try:
            if 0 < start == size and self._begun == self._target:
                self._rest(take, 0, lambda _: None, lambda: self.want.digest)
                os.utime(self._target, ns=(mtime_ns, mtime_ns))
                return SAME
            with self._open(start) as file:
                total = _digest(file, start)

                def keep(piece: memoryview | bytes) -> None:
                    total.update(piece)
                    _write(file, piece)
                    count(len(piece))

                self._rest(take, size - start, keep, total.hexdigest)
                os.utime(file.fileno(), ns=(mtime_ns, mtime_ns))
            os.replace(self._part, self._target)
        except OSError as error:
            raise self._unusable("written", error) from error
        except DamagedError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._part)
            raise
        return farside.SENT

    def _rest(self, take: Take, left: int, keep: Callable[[memoryview | bytes], None], digest: Callable[[], str]
              ) -> None:
        """Gives the ``left`` bytes that are to come to ``keep``, and checks that all came and what they make up."""
        while length := farside.PIECE.unpack(take(farside.PIECE.size))[0]:
            if length > min(left, farside.BLOCK):
                raise malformed(f"a piece of {length} bytes where {left} were to come")
            keep(take(length))
            left -= length
        stated = bytes(take(farside.DIGEST))
        if left:
            raise DamagedError("shrank while it was copied", where=self._target, remedy="collect again")
        if stated.hex() != digest():
            raise DamagedError("arrived damaged: its SHA-256 is not the one that it has there",
                               where=self._target, remedy="collect again")

    def _digest_of(self, size: int) -> str:
        try:
            with open(self._begun, "rb", buffering=0) as file:
                return _digest(file, size).hexdigest()
        except OSError as error:
            raise self._unusable("read", error) from error

    def _open(self, start: int) -> RawIOBase:
        """The part, cut to the ``start`` bytes that are here."""
        if start and self._begun == self._target:
            shutil.copyfile(self._target, self._part)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | (0 if start else os.O_TRUNC)
        try:
            descriptor = os.open(self._part, flags, self._mode)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(self._part), exist_ok=True)
            descriptor = os.open(self._part, flags, self._mode)
        if start:
            os.truncate(descriptor, start)
        return open(descriptor, "r+b", buffering=0)

    def _unusable(self, what: str, error: OSError) -> ServeError:
        return ServeError(f"cannot be {what}: {error.strerror}", where=self._target)


def _write(file: RawIOBase, data: memoryview | bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left):]


def _digest(file: RawIOBase, size: int) -> hashlib._Hash:
    """The SHA-256 of the next ``size`` bytes of ``file``."""
    total = hashlib.sha256()
    while size and (piece := file.read(min(size, _READ))):
        total.update(piece)
        size -= len(piece)
    return total
