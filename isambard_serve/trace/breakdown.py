"""Puts kernels, steps and buckets together: what each bucket takes of a step, on each GPU and on all of them."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from isambard_serve.records import Bucket, RankTrace, Trace, UnmatchedKernel
from isambard_serve.trace import steps
from isambard_serve.trace.buckets import IDLE, Table
from isambard_serve.trace.read import Recording, read

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from isambard_serve.trace.steps import Floats, Ints

    Bools = npt.NDArray[np.bool_]

MOST_NAMED = 10
"""How many kernels that no pattern matches are named: those that take most."""

STEADY_LAUNCHES = 0.1
STEADY_BUSY = 0.5
"""By how much a steady step's launches, and its busy time, may differ from the median step's. A step that prefills
besides takes longer by far; one that the recording cut has fewer launches."""


def of_files(paths: Sequence[Path], table: Table, tell: Callable[[str], None]) -> list[RankTrace]:
    """What each GPU of the traces did in a steady step; the traces are read beside each other where cores allow.

    ``tell`` is told of each that has been read. One without GPU work, such as an API server's, gives nothing. Ranks
    are the traces' own if no two are alike, else they are numbered in the order of ``paths``.
    """
    def told(path: Path, ranks: list[RankTrace]) -> list[RankTrace]:
        tell(f"read {path.name}" + ("" if ranks else ": no GPU kernels in it"))
        return ranks

    # Not every laptop's system knows which cores a process may use.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(len(paths), cores)
    work = partial(of_file, table=table)
    if processes > 1:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            each = [told(*pair) for pair in zip(paths, pool.map(work, paths), strict=True)]
    else:
        each = [told(path, work(path)) for path in paths]
    found = [rank for ranks in each for rank in ranks]
    if len({rank.rank for rank in found}) < len(found):
        found = [msgspec.structs.replace(rank, rank=number) for number, rank in enumerate(found)]
    return sorted(found, key=lambda rank: rank.rank)


def of_file(path: Path, table: Table) -> list[RankTrace]:
    """What each GPU of the trace ``path`` did in a steady step; the errors are :func:`read`'s."""
    recording = read(path)
    named = re.search(r"rank[-_]?(\d+)", path.name)
    rank = recording.rank if recording.rank is not None else int(named[1]) if named else 0
    return [of_gpu(recording, device, table, rank=rank, path=str(path)) for device in sorted(recording.gpus)]


def of_gpu(recording: Recording, device: int, table: Table, *, rank: int, path: str) -> RankTrace:
    """What one GPU of a recording did in a steady step."""
    import numpy as np

    kernels = recording.gpus[device]
    order = np.argsort(np.frombuffer(kernels.start), kind="stable")
    start = np.frombuffer(kernels.start)[order]
    duration = np.frombuffer(kernels.duration)[order]
    name = np.frombuffer(kernels.name, np.uintc)[order].astype(np.int64)
    correlation = np.frombuffer(kernels.correlation, np.int64)[order]
    found = steps.find(name=name, stream=np.frombuffer(kernels.stream, np.int64)[order], correlation=correlation,
                       launched=_launched(recording, correlation), marks=recording.marked())
    place = np.array([table.place(each) for each in recording.names])[name]
    end = start + duration
    took = exclusive(start, end, np.append(table.background, False)[place])

    first, launches = found.first[:-1], np.diff(found.first)
    span = np.diff(np.append(start[first], end[first[-1]: found.first[-1]].max()))
    steady = _steady(launches, np.add.reduceat(took[: found.first[-1]], first))
    count = int(steady.sum())
    kept = found.first[0] + np.flatnonzero(np.repeat(steady, launches))
    start, end, name, place, took = (array[kept] for array in (start, end, name, place, took))

    buckets = len(table.names)
    ms = np.bincount(place, took, buckets + 1) / 1000 / count
    starts = np.bincount(place, minlength=buckets + 1) / count
    step_ms = max(float(span[steady].sum()) / 1000 / count, float(ms.sum()))

    def bucket(title: str, took_ms: float, started: float | None) -> Bucket:
        share = took_ms / step_ms if step_ms else 0.0
        return Bucket(name=title, ms=took_ms, share=share, launches=started, floor_ms=None)

    def hidden(index: int) -> float:
        own = place == index
        alone = exclusive(start[own], end[own], np.zeros(int(own.sum()), bool))
        return float(alone.sum() - took[own].sum()) / 1000 / count

    return RankTrace(
        rank=rank,
        path=path,
        gpu=recording.gpu,
        kernels=len(order),
        kernel_ms=float(duration.sum()) / 1000,
        found_by=found.by,
        steps=count,
        left_out=len(steady) - count,
        step_ms=step_ms,
        busy_ms=float(ms.sum()),
        launches=len(kept) / count,
        buckets=(*(bucket(title, float(ms[index]), float(starts[index])) for index, title in enumerate(table.names)),
                 bucket(IDLE, step_ms - float(ms.sum()), None)),
        hidden_ms={title: hidden(index) for index, title in enumerate(table.names) if table.background[index]},
        unmatched_ms=float(ms[buckets]),
        unmatched=_unmatched(name[place == buckets], took[place == buckets] / 1000 / count, recording.names, count),
    )


def exclusive(start: Floats, end: Floats, background: Bools) -> Floats:
    """The time that counts as each kernel's own, so that the sum is the time in which any kernel ran.

    Of kernels that overlap, the one that began first has the time; one in the background has only what is left by
    all others. ``start`` is ascending; the unit is theirs.
    """
    import numpy as np

    took = np.zeros(len(start))
    front, back = np.flatnonzero(~background), np.flatnonzero(background)
    begins, ends = _own(start[front], end[front])
    took[front] = ends - begins
    if len(back):
        # Where the others have run for how long: it grows from 0 at the first's begin to their whole time.
        when = np.stack([begins, ends], 1).ravel()
        ran = np.stack([np.cumsum(took[front]) - took[front], np.cumsum(took[front])], 1).ravel()
        begins, ends = _own(start[back], end[back])
        others = np.interp(ends, when, ran) - np.interp(begins, when, ran) if len(front) else 0.0
        took[back] = np.maximum(0.0, ends - begins - others)
    return took


def _own(start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """The part of each kernel that no earlier one covers: begin and end, equal where nothing is left."""
    import numpy as np

    if not len(start):
        return start, end
    latest = np.maximum.accumulate(np.maximum(start, end))
    return np.maximum(start, np.append(start[0], latest[:-1])), latest


def _launched(recording: Recording, correlation: Ints) -> Floats:
    """When the program launched each kernel, by their correlation; NaN where that is not recorded."""
    import numpy as np

    known = np.frombuffer(recording.launch_correlation, np.int64)
    if not len(known):
        return np.full(len(correlation), np.nan)
    order = np.argsort(known, kind="stable")
    place = order[np.minimum(np.searchsorted(known, correlation, sorter=order), len(known) - 1)]
    return np.where(known[place] == correlation, np.frombuffer(recording.launch_start)[place], np.nan)


def _steady(launches: Ints, busy: Floats) -> Bools:
    import numpy as np

    return ((np.abs(launches - np.median(launches)) <= STEADY_LAUNCHES * np.median(launches))
            & (np.abs(busy - np.median(busy)) <= STEADY_BUSY * np.median(busy)))


def _unmatched(name: Ints, took_ms: Floats, names: Sequence[str], count: int) -> tuple[UnmatchedKernel, ...]:
    import numpy as np

    ms = np.bincount(name, took_ms, len(names))
    launches = np.bincount(name, minlength=len(names)) / count
    most = [index for index in np.argsort(-ms, kind="stable")[:MOST_NAMED] if launches[index]]
    return tuple(UnmatchedKernel(name=names[index], ms=float(ms[index]), launches=float(launches[index]))
                 for index in most)


def combined(ranks: Sequence[RankTrace], floors: Mapping[str, float]) -> Trace:
    """The mean over all ranks, each bucket beside its floor (``floors``, in ms) where that is known."""
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    step_ms = mean([rank.step_ms for rank in ranks])
    buckets = []
    for each in zip(*(rank.buckets for rank in ranks), strict=True):
        ms = mean([bucket.ms for bucket in each])
        launches = [bucket.launches for bucket in each if bucket.launches is not None]
        buckets.append(Bucket(name=each[0].name, ms=ms, share=ms / step_ms if step_ms else 0.0,
                              launches=mean(launches) if launches else None, floor_ms=floors.get(each[0].name)))
    busy_ms = sum(rank.busy_ms for rank in ranks)
    return Trace(ranks=tuple(ranks), steps=min(rank.steps for rank in ranks), step_ms=step_ms, buckets=tuple(buckets),
                 unmatched_share=sum(rank.unmatched_ms for rank in ranks) / busy_ms if busy_ms else 0.0)
