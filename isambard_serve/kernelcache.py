"""Compiled kernels, kept from one run to the next: a start that finds them need not compile for minutes.

They are used from a folder in the node's memory (home folders are a network file system, on which compilers' locks
and renames fail) and kept as one file on shared storage, for the same image, engine and model of GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from isambard_serve import process
from isambard_serve.errors import HostError
from isambard_serve.plan import Plan

KEPT = 16
"""How many files are kept; the ones that were written longest ago go."""

TICK_S = 0.2
UNPACK_S = 300.0

Gpus = Sequence[Mapping[str, str]]


def restore(plan: Plan, gpus: Gpus, env: Mapping[str, str], runner: process.Runner = process.run) -> str | None:
    """Unpacks what was kept into the run's folder on this node. What does not unpack is no kernel, and no error.

    Returns what there is to say about it.
    """
    kept = _file(plan, gpus)
    if kept is None:
        return None
    folder = _folder(plan)
    said = None
    if kept.exists():
        try:
            done = runner(["tar", "--extract", f"--file={kept}", f"--directory={folder}"], env=env,
                          timeout_s=UNPACK_S)
            failure = done.stderr.strip() if done.returncode else None
        except HostError as error:
            failure = str(error)
        said = f"compiled kernels from an earlier run: {_size(folder)[1] / 1e6:,.0f} MB"
        if failure is not None:
            shutil.rmtree(folder)
            folder.mkdir(mode=0o700)
            said = f"compiled kernels from an earlier run are left out, {kept} does not unpack: {failure}"
    _restored(plan).write_text(repr(_size(folder)))
    return said


def save(plan: Plan, gpus: Gpus, env: Mapping[str, str], log: Path, over: threading.Event) -> None:
    """Keeps the kernels for the next run, unless all of them were restored; given up once ``over`` is set.

    It is done beside the engine and out of its way, at the lowest priority.
    """
    kept = _file(plan, gpus)
    if kept is None or over.is_set() or _restored(plan).read_text() == repr(_size(_folder(plan))):
        return
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    growing = kept.with_name(f".{kept.name}.{plan.run_id}")
    try:
        child = process.start(["nice", "-n", "19", "tar", "--create", f"--file={growing}",
                               f"--directory={_folder(plan)}", "."], env=env, log=log, bound=True)
        code = None
        while code is None and not over.is_set():
            code = process.ended(child, TICK_S)
        process.stop(child, TICK_S)
        # 1: a file changed meanwhile, which one run's kernels may do and the next one's compiler repairs.
        if code in (0, 1):
            growing.replace(kept)
            _forget(kept.parent)
    finally:
        growing.unlink(missing_ok=True)


def _file(plan: Plan, gpus: Gpus) -> Path | None:
    """Where the kernels of ``plan`` are kept for this node's model of GPU; None if they are not kept."""
    if plan.kernels is None or plan.local_dir is None:
        return None
    model = re.sub(r"[^a-z0-9]+", "-", (gpus[0]["name"] if gpus else "no gpu").lower())
    return Path(f"{plan.kernels}-{model}.tar")


def _folder(plan: Plan) -> Path:
    return Path(str(plan.local_dir)) / "kernels"


def _restored(plan: Plan) -> Path:
    """The file that says how much was restored."""
    return Path(str(plan.local_dir)) / "restored"


def _size(folder: Path) -> tuple[int, int]:
    """How many files there are in ``folder``, and how many bytes."""
    sizes = []
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # a compiler's temporary file has just gone
                sizes.append((Path(place) / name).lstat().st_size)
    return len(sizes), sum(sizes)


def _forget(folder: Path) -> None:
    for old in sorted(folder.glob("*.tar"), key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
        old.unlink(missing_ok=True)
