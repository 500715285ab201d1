"""Traces as the torch profiler writes them, made by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def kernel(name: str, start: float, duration: float, *, launch: int = 0, stream: int = 7, device: int = 0,
           category: str = "kernel") -> Event:
    """A kernel of ``duration`` µs on a GPU; ``launch`` is the correlation of the call that launched it."""
    return {"ph": "X", "cat": category, "name": name, "pid": device, "tid": stream, "ts": start, "dur": duration,
            "args": {"device": device, "stream": stream, "correlation": launch, "grid": [1, 1, 1]}}


def launch(correlation: int, start: float, name: str = "cudaLaunchKernel") -> Event:
    """The program's call that launches a kernel or a graph."""
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": 2.5,
            "args": {"cbid": 211, "correlation": correlation}}


def mark(name: str, start: float, duration: float) -> Event:
    """A span that the program marked."""
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": duration,
            "args": {"External id": 1}}


def call(name: str, start: float = 0.0) -> Event:
    """A Python function's event: what most of a trace with stacks is made of."""
    return {"ph": "X", "cat": "python_function", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": 1,
            "args": {"Python parent id": None, "Python id": 1}}


def text(events: Sequence[Event], *, indent: int | None = 1, **head: Any) -> bytes:
    """The file: laid out as torch does it, or with ``indent`` None as in one line."""
    document = {"schemaVersion": 1, **head, "traceEvents": events, "traceName": "/tmp/trace.json"}
    return json.dumps(document, indent=indent).encode()


def write(path: Path, events: Sequence[Event], **layout: Any) -> Path:
    """Write the trace ``path``, compressed if its name says so."""
    content = text(events, **layout)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def steps(count: int, *, gap: float = 10.0, layers: int = 3, begin: float = 1000.0) -> list[Event]:
    """Kernels of ``count`` equal steps, launched one by one: an embedding, layers of three, logits, argmax.

    Each step takes 2 + layers × 35 + 13 µs, and the GPU idles for ``gap`` µs before the next.
    """
    events = []
    now = begin
    for step in range(count):
        words = [("embedding", 2.0), *[("rms_norm", 5.0), ("fused_moe_kernel", 20.0), ("flash_fwd", 10.0)] * layers,
                 ("nvjet", 10.0), ("ArgMax", 3.0)]
        for place, (name, duration) in enumerate(words):
            correlation = step * 100 + place
            events += [launch(correlation, now - 900.0), kernel(name, now, duration, launch=correlation)]
            now += duration
        now += gap
    return events
