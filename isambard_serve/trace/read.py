"""Reads the torch profiler's traces: Chrome's JSON, plain or compressed, of any size, in a bounded memory.

A trace is read in blocks, which are cut between two events. Of an event only the fields wanted are decoded, and a
block that holds nothing but the program's own events is not decoded at all. What is kept of a kernel is 36 bytes.
"""

from __future__ import annotations

import gzip
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from isambard_serve.errors import ServeError, UsageError
from isambard_serve.run import UNREADABLE

if TYPE_CHECKING:
    from isambard_serve.trace.steps import Floats

BLOCK = 1 << 17
"""Bytes decoded at once: small enough for the processor's cache, which makes decoding up to half as fast again."""

LONGEST = 1 << 24
"""Bytes that one event, or all that stands before the first, may take."""

LONGEST_US = 86_400e6 * 366
"""No recording is longer than a year: its times are not microseconds, or not times."""

MOST = 1 << 23
"""Kernels and launches that are kept of one trace, 36 bytes of the one and 16 of the other: 300 MB at most."""

_BETWEEN = b"\n  },\n  {"
"""Between two events, as torch writes them. No text in JSON holds a line's end, and what is nested stands farther in:
so this cuts nothing apart."""
_PERHAPS = re.compile(rb"\}\s*,\s*\{")
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_WANTED = re.compile(rb'"cat"\s*:\s*"(?:kernel|gpu_mem|user_annotation|cuda_)')
_ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_MARK = re.compile(r"(?P<schedule>ProfilerStep#\d+$)|(?P<runner>execute_.*generation_\d+\()")
"""What marks a step: the profiler's own schedule, and vLLM's model runner."""


class _Args(msgspec.Struct, gc=False):
    device: int = 0
    stream: int = 0
    correlation: int = -1


class _Event(msgspec.Struct, gc=False):
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: _Args | None = None


class _Rest(msgspec.Struct):
    traceEvents: list[_Event]  # noqa: N815 - the trace's own name


class _Place(msgspec.Struct, frozen=True):
    rank: int | None = None


class _Gpu(msgspec.Struct):
    name: str = ""


class _Head(msgspec.Struct, rename="camel"):
    distributed_info: _Place = _Place()
    device_properties: list[_Gpu] = []


@dataclass
class Kernels:
    """What one GPU did: one value for each kernel, copy or fill, in the order of the file. Times in µs.

    ``name`` is an index into the trace's names; ``correlation`` is shared with the call that launched it, and so by
    all kernels of one launch of a CUDA graph (−1: not recorded).
    """

    start: array[float] = field(default_factory=lambda: array("d"))
    duration: array[float] = field(default_factory=lambda: array("d"))
    name: array[int] = field(default_factory=lambda: array("I"))
    stream: array[int] = field(default_factory=lambda: array("q"))
    correlation: array[int] = field(default_factory=lambda: array("q"))


@dataclass
class Recording:
    """What is kept of a trace: each GPU's kernels, and when the program launched them and marked its steps.

    ``launch_start`` (µs) and ``launch_correlation`` are those of the program's calls, ``marks`` begin and end (µs) of
    the steps that it marked, by whose marks they are. ``rank`` is None where the trace does not tell.
    """

    rank: int | None
    gpu: str | None
    names: list[str] = field(default_factory=list)
    gpus: dict[int, Kernels] = field(default_factory=dict)
    launch_start: array[float] = field(default_factory=lambda: array("d"))
    launch_correlation: array[int] = field(default_factory=lambda: array("q"))
    marks: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def marked(self) -> Floats:
        """Begin and end of the marked steps in µs, of shape (steps, 2), ascending; the profiler's own go first."""
        import numpy as np

        marks = self.marks.get("schedule") or self.marks.get("runner") or []
        return np.array(sorted(marks)).reshape(-1, 2)


def read(path: Path) -> Recording:
    """Reads the trace ``path``.

    Raises:
        UsageError: it is no trace of the torch profiler, or cannot be opened.
        ServeError: it is torn, damaged, or holds more than is kept.
    """
    try:
        with open(path, "rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if compressed else open(path, "rb", buffering=0) as file:
            return _recording(file.read, path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _torn(path, str(error)) from error
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", where=str(path)) from error


def _recording(read_block: Callable[[int], bytes], path: Path) -> Recording:
    text = b""
    while not (begin := _EVENTS.search(text)):
        block = read_block(BLOCK)
        if not block or len(text) > LONGEST or text.lstrip()[:1] not in (b"", b"{"):
            raise UsageError("is not a trace of the torch profiler", where=str(path),
                             remedy="its files are called *.pt.trace.json, or *.pt.trace.json.gz")
        text += block
    recording = _begun(text[: begin.end()])
    names: dict[str, int] = {}
    for events in _batches(read_block, text[begin.end():], path):
        try:
            _keep(events, recording, names, path)
        except OverflowError as error:
            raise _torn(path, f"a stream or correlation is no number that CUPTI gives: {error}") from error
    recording.names = list(names)
    for kernels in recording.gpus.values():
        if min(kernels.duration) < 0 or max(kernels.duration) > LONGEST_US or (
                max(kernels.start) - min(kernels.start) > LONGEST_US):
            raise _torn(path, "there are kernels of less than no time, or of years")
    return recording


def _begun(head: bytes) -> Recording:
    """A recording of which nothing is known but what stands before the events."""
    try:
        known = msgspec.json.decode(head + b"]}", type=_Head)
    except UNREADABLE:
        known = _Head()
    gpus = {gpu.name for gpu in known.device_properties}
    return Recording(rank=known.distributed_info.rank, gpu=" + ".join(sorted(gpus)) or None)


def _batches(read_block: Callable[[int], bytes], text: bytes, path: Path) -> Iterator[list[_Event]]:
    """The events, some at a time; those of blocks without anything wanted are left out."""
    decode = msgspec.json.Decoder(list[_Event]).decode
    while block := read_block(BLOCK):
        text += block
        cut = text.rfind(_BETWEEN)
        if cut >= 0:
            piece, text = text[: cut + len(b"\n  }")], text[cut + len(b"\n  },"):]
            if _WANTED.search(piece):
                try:
                    yield decode(b"[" + piece + b"]")
                except UNREADABLE as error:
                    raise _torn(path, str(error)) from error
            continue
        # Written by something else than torch. Whatever can be decoded was cut in the right place.
        for perhaps in reversed(list(_PERHAPS.finditer(text))[-3:]):
            with suppress(*UNREADABLE):
                events = decode(b"[" + text[: perhaps.start() + 1] + b"]")
                text = text[perhaps.end() - 1:]
                yield events
                break
        if len(text) > LONGEST:
            raise _torn(path, f"one event is longer than {LONGEST} bytes")
    try:
        yield msgspec.json.decode(b'{"traceEvents":[' + text, type=_Rest).traceEvents
    except UNREADABLE as error:
        raise _torn(path, str(error)) from error


def _torn(path: Path, why: str) -> ServeError:
    return ServeError(f"is torn or damaged: {why}", where=str(path),
                      remedy="an engine must be left time to write its trace out after /stop_profile; record it again")


def _keep(events: list[_Event], recording: Recording, names: dict[str, int], path: Path) -> None:
    """Takes what is wanted of ``events`` into ``recording``; ``names`` numbers the kernels' names."""
    gpus = recording.gpus
    for event in events:
        category, args = event.cat, event.args
        if category in _ON_GPU:
            args = args or _Args()
            kernels = gpus.get(args.device) or gpus.setdefault(args.device, Kernels())
            kernels.start.append(event.ts)
            kernels.duration.append(event.dur)
            kernels.name.append(names.setdefault(event.name, len(names)))
            kernels.stream.append(args.stream)
            kernels.correlation.append(args.correlation)
        elif category in _LAUNCHES and args:
            recording.launch_start.append(event.ts)
            recording.launch_correlation.append(args.correlation)
        elif category == "user_annotation" and (mark := _MARK.match(event.name)):
            recording.marks.setdefault(mark.lastgroup or "", []).append((event.ts, event.ts + event.dur))
    if sum(len(kernels.start) for kernels in gpus.values()) + len(recording.launch_start) > MOST:
        raise ServeError(f"holds more than {MOST} kernels and launches", where=str(path),
                         remedy="record fewer steps: some dozens tell as much")
