"""What a far side says lies in a run directory: whether that may be written here, and which of it is to be fetched.

Everything in it comes from another machine and is taken for hostile until it was checked.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path

from isambard_serve.errors import HostError, ServeError
from isambard_serve.records import Record

MAX_FILES = 200_000
"""A listing may have so many files: it is held in memory."""

MAX_PATH = 4096
"""PATH_MAX of linux/limits.h, in bytes."""

PART = ".part.tmp"


class Listed(Record, frozen=True):
    """A file on the far side as it was listed. ``inode`` tells a file that grew from one that took its place."""

    path: str
    size: int
    mtime_ns: int
    mode: int
    inode: int


def decoded(name: bytes, size: int, mtime_ns: int, mode: int, inode: int) -> Listed:
    """The entry of a file that may be written below a folder of one's own, under a name that any system takes.

    Raises:
        HostError: the name leads elsewhere or cannot be shown, or it is no regular file.
    """
    try:
        path = name.decode()
    except UnicodeDecodeError:
        raise _refused(repr(name)[1:], "its name is not UTF-8") from None
    if len(name) > MAX_PATH or not all(_is_plain(part) for part in path.split("/")):
        raise _refused(repr(path), "its name is not that of a file below the run's folder")
    if not path.isprintable():
        raise _refused(repr(path), "its name has characters that cannot be shown")
    if not stat.S_ISREG(mode):
        raise _refused(repr(path), "it is no regular file")
    return Listed(path=path, size=size, mtime_ns=mtime_ns, mode=stat.S_IMODE(mode), inode=inode)


def _is_plain(part: str) -> bool:
    return part not in ("", ".", "..") and "\\" not in part


def check_apart(entries: Iterable[Listed]) -> None:
    """Raises HostError if two files would be one here, or a file a folder.

    Names that differ only in case, or in how their accents are written, are one name to macOS and Windows.
    """
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    for entry in entries:
        key = _key(entry.path)
        if key in seen:
            raise _refused(repr(entry.path), f"{seen[key]!r} is the same name on many systems")
        seen[key] = entry.path
        while key := key.rpartition("/")[0]:
            if key in folders:
                break
            folders[key] = entry.path
    for key in folders.keys() & seen.keys():
        raise _refused(repr(seen[key]), f"it cannot be a file and the folder of {folders[key]!r}")


def _key(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def _refused(path: str, why: str) -> HostError:
    return HostError(f"refused: {why}", where=path, remedy="leave it out with --exclude PATTERN, if it should be there")


def scan(folder: Path) -> dict[str, os.stat_result]:
    """The regular files below ``folder`` by their relative paths; none if there is no such folder."""
    found: dict[str, os.stat_result] = {}
    waiting = [(str(folder), "")]
    while waiting:
        place, prefix = waiting.pop()
        try:
            entries = os.scandir(place)
        except FileNotFoundError:
            continue
        with entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, f"{prefix}{entry.name}/"))
                elif entry.is_file(follow_symlinks=False):
                    found[prefix + entry.name] = entry.stat(follow_symlinks=False)
    return found


def missing(listed: Iterable[Listed], here: Mapping[str, os.stat_result]) -> list[Listed]:
    """Those files that are not here yet with the same size and time of last change, in order."""
    return [each for each in listed if not _is_here(each, here.get(each.path))]


def _is_here(listed: Listed, own: os.stat_result | None) -> bool:
    return own is not None and (own.st_size, own.st_mtime_ns) == (listed.size, listed.mtime_ns)


def part_of(path: str) -> str:
    """Where the file ``path`` lies until it is whole. No far side can list that name: it is taken for half-written."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}{PART}"


def check_room(listed: Iterable[Listed], free: int, where: Path) -> None:
    """Raises ServeError if the files need more than ``free`` bytes."""
    needed = sum(each.size for each in listed)
    if needed > free:
        raise ServeError(f"{needed:,} bytes are to come, and there is room for {free:,}", where=str(where),
                         remedy="name a folder on another disk with -o, or leave files out with --exclude")


def beginning(listed: Listed, here: Mapping[str, os.stat_result]) -> tuple[str, int]:
    """The file here that may hold the first bytes of ``listed``, and how many: its part, or it as it was last time."""
    for path in (part_of(listed.path), listed.path):
        own = here.get(path)
        if own and own.st_size <= listed.size:
            return path, own.st_size
    return listed.path, 0


def forget_parts(folder: Path, here: Iterable[str]) -> None:
    """Removes the parts that were ``here`` and were not needed."""
    for path in here:
        if path.endswith(PART):
            (folder / path).unlink(missing_ok=True)
