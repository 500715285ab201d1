"""Which bucket a kernel belongs to: one table of patterns, shipped as ``buckets.yaml``, which a user's file extends."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from isambard_serve import yamlfile
from isambard_serve.errors import UsageError
from isambard_serve.records import Record

SHIPPED = Path(__file__).with_name("buckets.yaml")
IDLE = "idle"
UNMATCHED = "unmatched"


class Bucket(Record, frozen=True):
    """A bucket: the regular expressions of which one must be found in a kernel's name; capitals do not matter.

    ``background``: its kernels are meant to run beside others. They count only where none of those runs.
    """

    name: str
    kernels: tuple[str, ...]
    background: bool | None = None


class File(Record, frozen=True):
    """A file of buckets. The first pattern that is found in a name decides, from the top of the file to its end."""

    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class Table:
    """The buckets in the order in which they are shown, and the patterns in that in which they are tried."""

    names: tuple[str, ...]
    background: tuple[bool, ...]
    patterns: tuple[tuple[re.Pattern[str], int], ...]

    def place(self, kernel: str) -> int:
        """The bucket that the kernel belongs to, as an index into ``names``; ``len(names)`` if none is meant for it."""
        return next((bucket for pattern, bucket in self.patterns if pattern.search(kernel)), len(self.names))


def load(path: Path | None = None) -> Table:
    """The shipped table; the patterns of the file ``path`` are tried before its own.

    A bucket of that file with the name of a shipped one adds to it.

    Raises:
        UsageError: the file cannot be read, a pattern is no regular expression, or a name stands twice in it or is
            kept for what is in no bucket.
    """
    shipped, own = _read(SHIPPED), _read(path) if path else ()
    names = list(dict.fromkeys(bucket.name for bucket in (*shipped, *own)))
    background = {bucket.name: bucket.background for bucket in (*shipped, *own) if bucket.background is not None}
    return Table(names=tuple(names), background=tuple(background.get(name, False) for name in names),
                 patterns=tuple((re.compile(pattern, re.IGNORECASE), names.index(bucket.name))
                                for bucket in (*own, *shipped) for pattern in bucket.kernels))


def _read(path: Path) -> tuple[Bucket, ...]:
    buckets = yamlfile.convert(yamlfile.read(path), File, str(path)).buckets
    seen: set[str] = set()
    for bucket in buckets:
        where = f"{path}: {bucket.name}"
        if not bucket.name.strip() or not bucket.name.isprintable():
            raise UsageError(f"{bucket.name!r} is no name that can be shown", where=str(path),
                             remedy="give it a name of one line")
        if bucket.name in (IDLE, UNMATCHED):
            raise UsageError("is the name of what is in no bucket", where=where, remedy="give it another name")
        if bucket.name in seen:
            raise UsageError("stands twice in one file", where=where, remedy="put all its patterns in one place")
        seen.add(bucket.name)
        for pattern in bucket.kernels:
            try:
                re.compile(pattern, re.IGNORECASE)
            except (re.error, OverflowError, RecursionError) as error:
                raise UsageError(f"{pattern!r} is no regular expression: {error}", where=where,
                                 remedy=r"write \( for a bracket, \. for a dot") from error
    return buckets
