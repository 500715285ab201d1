"""How fast `trace` is, and how little memory it takes, beside HolisticTraceAnalysis: on one set, in one run.

    python benchmarks/trace.py HTA_PYTHON [--sample TRACE.json.gz] [--megabytes 1024] [--ranks 4]

HTA_PYTHON is the interpreter of a virtual environment with HolisticTraceAnalysis in it (0.5.0 was used). The set is
made by repeating a recording, the repository's own unless another is given, each time later and with launches of its
own, until all ranks together have that many megabytes of JSON (compressed on disk, as vLLM does). Both read all ranks
with as many processes as they choose; times are of whole processes, memory is the highest sum over all of them
(proportional set size). HolisticTraceAnalysis is asked for its kernel breakdown alone, and not to round times to whole
microseconds, which would change every kernel's time; `trace` for all that it tells. The kernels' times must be equal.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import psutil

from isambard_serve.trace.read import read

SAMPLE = Path(__file__).parents[1] / "docs/samples/h200-moe-eager.trace.json.gz"

HTA = """
import json, os, sys
os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
from hta.common.trace_parser import ParserBackend, set_default_trace_parsing_backend
from hta.trace_analysis import TraceAnalysis
set_default_trace_parsing_backend(ParserBackend(sys.argv[1]))
analysis = TraceAnalysis(trace_files=dict(enumerate(sys.argv[3:])), include_last_profiler_step=True)
analysis.get_gpu_kernel_breakdown(visualize=False, num_kernels=10**9, duration_ratio=1.0)
names = analysis.t.symbol_table.get_sym_table()
totals = {}
for rank, frame in analysis.t.traces.items():
    took = frame[frame["stream"].ne(-1)].groupby("name")["dur"].sum()
    totals[rank] = {names[index]: float(total) for index, total in took.items()}
json.dump(totals, open(sys.argv[2], "w"))
"""


def repeated(sample: Path, folder: Path, ranks: int, megabytes: int) -> list[Path]:
    """Writes a trace a rank, of ``sample`` again and again; returns their paths."""
    document = msgspec.json.decode(gzip.decompress(sample.read_bytes()))
    events: list[dict[str, Any]] = document.pop("traceEvents")
    times = [event["ts"] for event in events if event["ph"] == "X"]
    length = max(times) - min(times) + 50_000.0
    launches = 1 + max(event.get("args", {}).get("correlation", 0) for event in events)
    paths = [folder / f"rank{rank}.trace.json.gz" for rank in range(ranks)]
    for rank, path in enumerate(paths):
        head = _text({**document, "distributedInfo": {"rank": rank, "world_size": ranks}, "traceEvents": []})
        with gzip.open(path, "wb", compresslevel=1) as file:
            size = file.write(head.removesuffix(b"]\n}"))
            between = b""
            while size < megabytes * 1e6 / ranks:
                text = _text({"traceEvents": events})
                size += file.write(between + text[text.index(b"[") + 1 : text.rindex(b"\n ]")])
                between = b","
                for event in events:
                    _shift(event, length, launches)
            file.write(b"\n ]\n}")
    return paths


def _text(document: dict[str, Any]) -> bytes:
    """JSON in the layout of the torch profiler."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1)


def _shift(event: dict[str, Any], length: float, launches: int) -> None:
    """Puts ``event`` a whole recording later, with a launch and a step of its own."""
    if "ts" in event:
        event["ts"] += length
    arguments = event.get("args", {})
    if "correlation" in arguments:
        arguments["correlation"] += launches
    if event.get("cat") == "ac2g":
        event["id"] += launches
    name, sign, number = event["name"].partition("ProfilerStep#")
    if sign and not name:
        event["name"] = f"ProfilerStep#{int(number) + 1000}"


def measured(command: list[str], output: Path) -> tuple[float, float]:
    """Seconds that ``command`` takes, and the most memory that it and its children have together, in MB."""
    peak = 0.0
    with output.open("wb") as out, (output.parent / "log").open("wb") as log:
        began = time.perf_counter()
        child = psutil.Popen(command, stdout=out, stderr=log)
        while child.poll() is None:
            peak = max(peak, sum(_share(process) for process in [child, *_children(child)]))
            time.sleep(0.02)
        seconds = time.perf_counter() - began
    if child.returncode:
        sys.exit(f"{command[0]} failed:\n{(output.parent / 'log').read_text()[-3000:]}")
    return seconds, peak / 1e6


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _share(process: psutil.Process) -> int:
    """The process's proportional share of memory, in bytes: what several share is divided among them."""
    try:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def totals(path: Path) -> dict[str, float]:
    """Each kernel's time in a trace in µs, by name."""
    recording = read(path)
    took: defaultdict[str, float] = defaultdict(float)
    for kernels in recording.gpus.values():
        for name, duration in zip(kernels.name, kernels.duration, strict=True):
            took[recording.names[name]] += duration
    return took


def differences(paths: list[Path], theirs: dict[str, dict[str, float]]) -> list[str]:
    """What the two do not agree on, by more than a millionth."""
    found = []
    for rank, path in enumerate(paths):
        ours, other = totals(path), theirs[str(rank)]
        found += [f"rank {rank}, {name}: {ours.get(name)} and {other.get(name)} µs"
                  for name in sorted({*ours, *other})
                  if abs(ours.get(name, 0.0) - other.get(name, 0.0)) > 1e-6 * ours.get(name, 0.0)]
    return found


def main() -> None:
    """Makes the set, measures both, compares, prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hta_python")
    parser.add_argument("--sample", type=Path, default=SAMPLE)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--backend", default="json", help="HolisticTraceAnalysis' parser; json is its own default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = repeated(options.sample, folder, options.ranks, options.megabytes)
        words = [str(path) for path in paths]
        ours = measured([sys.executable, "-m", "isambard_serve", "trace", *words, "--json"], folder / "ours.json")
        theirs = measured([options.hta_python, "-c", HTA, options.backend, str(folder / "hta.json"), *words],
                          folder / "hta.out")
        unlike = differences(paths, json.loads((folder / "hta.json").read_bytes()))
        kernels = sum(rank["kernels"] for rank in json.loads((folder / "ours.json").read_bytes())["ranks"])
    print(f"{options.ranks} ranks, {options.megabytes} MB of JSON, {kernels} kernels, {psutil.cpu_count()} CPUs")
    for title, (seconds, peak) in (("isambard-serve trace", ours), ("HolisticTraceAnalysis", theirs)):
        print(f"{title:<24} {seconds:8.2f} s {peak:10.0f} MB")
    print(f"{'ratio':<24} {theirs[0] / ours[0]:8.1f} x {theirs[1] / ours[1]:10.1f} x")
    print("kernels' times: " + ("equal" if not unlike else "DIFFERENT\n" + "\n".join(unlike[:20])))
    sys.exit(1 if unlike else 0)


if __name__ == "__main__":
    main()
