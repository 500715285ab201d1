"""The files that ``trace`` is given: which traces a folder holds, and a table of floors."""

from __future__ import annotations

from pathlib import Path

import msgspec

from isambard_serve.errors import UsageError, nearest
from isambard_serve.run import UNREADABLE, RunDir
from isambard_serve.trace.buckets import IDLE, Table

RECORD = "record one: isambard-serve submit RECIPE --profile-at CONCURRENCY"


def traces(path: Path) -> list[Path]:
    """The traces at ``path``: a trace itself, a folder of them, or a run's directory.

    Raises:
        UsageError: there is none.
    """
    if path.is_file():
        return [path]
    run = RunDir(path)
    if run.plan.is_file() and not run.profile.is_dir():
        raise UsageError("is a run that recorded no profile", where=str(path), remedy=RECORD)
    folder = run.profile if run.profile.is_dir() else path
    found = sorted(each for each in folder.glob("*") if each.name.endswith((".json", ".json.gz")) and each.is_file())
    if not found:
        raise UsageError("holds no trace (*.json, *.json.gz)", where=str(folder),
                         remedy=RECORD)
    return found


def floors(path: Path, table: Table) -> dict[str, float]:
    """The least that buckets can take in ms, from a JSON file.

    Raises:
        UsageError: it cannot be read, or names a bucket that there is not.
    """
    try:
        known = msgspec.json.decode(path.read_bytes(), type=dict[str, float])
    except (OSError, *UNREADABLE) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path),
                         remedy='its form is {"MoE GEMM": 3.1, "attention": 0.9}') from error
    for name, least_ms in known.items():
        if least_ms < 0:
            raise UsageError(f"{name!r} cannot take {least_ms:g} ms", where=str(path), remedy="write how long, in ms")
        if name not in (*table.names, IDLE):
            raise UsageError(f"there is no bucket {name!r}", where=str(path),
                             remedy=nearest(name, table.names) or f"known buckets: {', '.join(table.names)}")
    return known
