"""Cuts a trace of the torch profiler down to some steps, and to what `trace` reads: a sample that can be kept.

    python -m tests.support.trim_trace IN.trace.json.gz OUT.trace.json.gz --steps 5

Kept are the first steps that the profiler marked, or that begin with one of the first launches of a CUDA graph: the
GPU's work in them, the calls that launched it, and the marks. Events of the CPU, arguments that are not used, and
the folder that the trace was written to are left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ARGUMENTS = ("device", "stream", "correlation", "graph id", "graph node id")


def trimmed(document: dict[str, Any], steps: int) -> dict[str, Any]:
    """``document`` with no more than its first ``steps`` steps."""
    events = document["traceEvents"]
    begins = sorted(event["ts"] for event in events if event["name"].startswith(("ProfilerStep#", "cudaGraphLaunch")))
    end = begins[steps] if steps < len(begins) else float("inf")
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver") and event["ts"] < end]
    launched = {event["args"].get("correlation") for event in calls}
    work = [event for event in events if event.get("cat") in GPU and event["args"]["correlation"] in launched]
    used = {event["args"]["correlation"] for event in work}
    marks = [event for event in events if event.get("cat") == "user_annotation" and event["ts"] < end]
    kept = [*marks, *[call for call in calls if call["args"].get("correlation") in used], *work]
    for event in kept:
        event["args"] = {name: value for name, value in event["args"].items() if name in ARGUMENTS}
    return {**{name: value for name, value in document.items() if name != "traceName"}, "traceEvents": kept}


def main() -> None:
    """Reads, trims, writes in torch's layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    document = trimmed(json.loads(gzip.decompress(options.source.read_bytes())), options.steps)
    options.target.write_bytes(gzip.compress(json.dumps(document, indent=1).encode(), mtime=0))


if __name__ == "__main__":
    main()
