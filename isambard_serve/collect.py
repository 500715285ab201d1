"""Collecting: a run's files are copied to where its reader is, while it runs or after, and tabled."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path

from isambard_serve import farside
from isambard_serve.errors import ServeError
from isambard_serve.records import Record
from isambard_serve.run import RunDir

_BLOCK = 1 << 20


class Copied(Record, frozen=True):
    """What a collection did: files and bytes copied, and files that were there already."""

    files: int
    bytes: int
    unchanged: int


def unreadable(paths: Sequence[str], where: str) -> ServeError:
    """The error that what is at these ``paths`` could not be read there."""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return ServeError(f"{paths[0]}{more} cannot be read there", where=where,
                      remedy="all else has come; --exclude PATTERN leaves out what need not")


def collect(run: RunDir, destination: Path, exclude: Sequence[str] = ()) -> Copied:
    """Copies the run's files below ``destination``, each by a temporary name and a rename.

    A file that is there already with the same size and SHA-256 is left alone. Of a file that still grows the
    bytes that it had when its turn came are taken.

    Args:
        exclude: patterns of relative paths that stay, as ``fnmatch`` has them; ``*`` matches slashes too.

    Raises:
        ServeError: a file shrank while it was copied, or could not be read (all others were copied) or written.
    """
    count = size = unchanged = 0
    closed = []
    for relative, status in farside.walk(str(run.path), exclude):
        source, target = run.path / relative, destination / relative
        if status is None:
            closed.append(relative)
            continue
        try:
            length = source.stat().st_size
            if target.is_file() and target.stat().st_size == length and _digest(source) == _digest(target):
                unchanged += 1
                continue
            _copy(source, target, length)
        except FileNotFoundError:  # gone since
            continue
        except PermissionError as error:
            if error.filename != str(source):
                raise
            closed.append(relative)
            continue
        count += 1
        size += length
    if closed:
        raise unreadable(closed, str(run.path))
    return Copied(files=count, bytes=size, unchanged=unchanged)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(source: Path, target: Path, length: int) -> None:
    """The first ``length`` bytes of ``source``, under the name ``target`` only when all of them are there."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(source, "rb") as reader, open(temporary, "xb") as writer:
            left = length
            while left and (block := reader.read(min(left, _BLOCK))):
                writer.write(block)
                left -= len(block)
        if left:
            raise ServeError("shrank while it was copied", where=str(source), remedy="collect again")
        temporary.replace(target)
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError) and error.filename == str(source):
            raise
        raise ServeError(f"cannot be written: {error.strerror}", where=str(target)) from error
    finally:
        with contextlib.suppress(OSError):  # it must not hide what went wrong
            temporary.unlink(missing_ok=True)
