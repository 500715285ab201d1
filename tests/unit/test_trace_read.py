"""Traces are read whatever their size, layout and end: all of what is wanted, or an error that says why not."""

from __future__ import annotations

import gzip
import json
import os
import random
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from isambard_serve.errors import ServeError, UsageError
from isambard_serve.trace import read as reading
from isambard_serve.trace.read import Recording, read
from tests.unit import traces
from tests.unit.traces import Event, call, kernel, launch, mark

TRIALS = int(os.environ.get("ISAMBARD_SERVE_TRIALS", "3"))

NASTY = ["void f<A{lambda(int)#1}, {lambda(int)#2}>()", '"quoted", "cat": "kernel"', "back\\slash", "}, {", '},\n  {"a',
         "  },\n  {\n", "[", "]", "traceEvents\": [", "ü ß →", "", "{" * 50]


def soup(draw: random.Random) -> list[Event]:
    """Events of all kinds in any order, with names that look like JSON."""
    def name() -> str:
        return draw.choice(NASTY) + str(draw.randrange(3))

    makers: list[Callable[[], Event]] = [
        lambda: kernel(name(), draw.uniform(0, 9e12), draw.uniform(0, 99), launch=draw.randrange(99),
                       stream=draw.randrange(3), device=draw.randrange(2), category=draw.choice(traces.ON_GPU)),
        lambda: launch(draw.randrange(99), draw.uniform(0, 9e12), name()),
        lambda: mark(draw.choice(["ProfilerStep#7", "execute_context_0(0)_generation_8(8)", name()]), 1.0, 2.0),
        lambda: call(name()),
        lambda: {"ph": "M", "name": "process_name", "pid": "Spans", "tid": "x", "args": {"name": name()}},
        lambda: {"ph": "X", "cat": "cpu_op", "name": name(), "ts": 1, "dur": 2, "pid": 1, "tid": 1,
                 "args": {"Input Dims": [[1, 2], []], "nested": [{"a": 1}, {"a": {"b": name()}}, {}]}},
        lambda: {"ph": "s", "id": 3, "pid": 1, "tid": 1, "ts": 2, "cat": "ac2g", "name": "ac2g"},
    ]
    return [draw.choice(makers)() for _ in range(draw.randrange(40, 200))]


def expected(events: Sequence[Event]) -> list[tuple[object, ...]]:
    """What must be kept of the GPUs' work, in order of the GPUs and the file."""
    kept = [event for event in events if event.get("cat") in traces.ON_GPU]
    return [(event["args"]["device"], event["name"], event["ts"], event["dur"], event["args"]["stream"],
             event["args"]["correlation"]) for event in sorted(kept, key=lambda event: int(event["args"]["device"]))]


def kept(recording: Recording) -> list[tuple[object, ...]]:
    return [(device, recording.names[number], *others) for device, kernels in sorted(recording.gpus.items())
            for number, *others in zip(kernels.name, kernels.start, kernels.duration, kernels.stream,
                                       kernels.correlation, strict=True)]


@pytest.mark.parametrize("trial", range(TRIALS))
@pytest.mark.parametrize("indent", [1, 2, None])
def test_all_kernels_are_read_whatever_the_names_the_layout_and_the_blocks(
        trial: int, indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(f"{trial} {indent}")  # noqa: S311
    for suffix in (".json", ".json.gz"):
        monkeypatch.setattr(reading, "BLOCK", draw.choice([17, 300, 1000, 5000, 1 << 17]))
        events = soup(draw)
        recording = read(traces.write(tmp_path / f"t{suffix}", events, indent=indent))
        assert kept(recording) == expected(events)
        calls = [event for event in events if event.get("cat") == "cuda_runtime"]
        assert list(recording.launch_start) == [event["ts"] for event in calls]
        assert list(recording.launch_correlation) == [event["args"]["correlation"] for event in calls]
        marks = [event["name"][:7] for event in events if event["name"].startswith(("ProfilerStep", "execute_"))]
        assert {kind: len(found) for kind, found in recording.marks.items()} == {
            kind: marks.count(begin) for kind, begin in (("schedule", "Profile"), ("runner", "execute"))
            if begin in marks}


def test_a_kernel_that_tells_nothing_but_its_time_is_the_first_gpus(tmp_path: Path) -> None:
    bare = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1.0, "dur": 2.0}
    assert kept(read(traces.write(tmp_path / "t.json", [bare]))) == [(0, "k", 1.0, 2.0, 0, -1)]


def test_what_stands_before_the_events_tells_the_rank_and_the_gpu(tmp_path: Path) -> None:
    head = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "distributedInfo": {"backend": "nccl", "rank": 3}}
    told = read(traces.write(tmp_path / "t.json", [], **head))
    assert (told.rank, told.gpu, told.gpus) == (3, "NVIDIA H200", {})
    silent = read(traces.write(tmp_path / "t.json", [call("f")]))
    assert (silent.rank, silent.gpu) == (None, None)


def test_the_profilers_own_marks_go_before_the_engines(tmp_path: Path) -> None:
    engine = mark("execute_context_0(0)_generation_8(8)", 5.0, 1.0)
    recording = read(traces.write(tmp_path / "t.json", [engine]))
    assert recording.marked().tolist() == [[5.0, 6.0]]
    recording = read(traces.write(tmp_path / "t.json", [engine, mark("ProfilerStep#2", 3.0, 2.0),
                                                        mark("ProfilerStep#1", 1.0, 2.0)]))
    assert recording.marked().tolist() == [[1.0, 3.0], [3.0, 5.0]]
    assert read(traces.write(tmp_path / "t.json", [])).marked().shape == (0, 2)


@pytest.mark.parametrize("content", [b"", b"hello", b"[]", b"{}", b'{"events": []}', b'{"traceEvents": 3}',
                                     b"\x00\x01\x02", b'[{"ph": "X"}]', b"{" + b" " * 3000 + b"}"])
def test_a_file_that_is_no_trace_is_refused(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST", 2000)
    monkeypatch.setattr(reading, "BLOCK", 100)
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(UsageError, match="is not a trace of the torch profiler"):
        read(tmp_path / "t.json")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"t\.json: cannot be read: No such file"):
        read(tmp_path / "t.json")


@pytest.mark.parametrize("indent", [1, None])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_torn_trace_is_never_taken_for_a_whole_one(suffix: str, indent: int | None, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK", 500)
    path = traces.write(tmp_path / f"t{suffix}", traces.steps(4), indent=indent)
    whole = path.read_bytes()
    behind = traces.text([], indent=indent).index(b"[") + 1  # from here on it is known to be a trace
    for cut in range(behind if suffix == ".json" else 20, len(whole) - 1, len(whole) // 97):
        path.write_bytes(whole[:cut])
        with pytest.raises(ServeError, match=r"torn or damaged|is not a trace"):
            read(path)


def test_a_damaged_block_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK", 500)
    path = traces.write(tmp_path / "t.json", traces.steps(4))
    path.write_bytes(path.read_bytes().replace(b'"dur": 20.0', b'"dur": 20.0.0', 1))
    with pytest.raises(ServeError, match="torn or damaged"):
        read(path)
    path = traces.write(tmp_path / "t.json.gz", traces.steps(4))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ServeError, match="torn or damaged"):
        read(path)


def test_a_trace_without_an_event_s_end_in_sight_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK", 500)
    monkeypatch.setattr(reading, "LONGEST", 5000)
    path = traces.write(tmp_path / "t.json", [kernel("x" * 9000, 0.0, 1.0)])
    with pytest.raises(ServeError, match="longer than 5000 bytes"):
        read(path)


def test_a_trace_of_more_than_is_kept_is_refused_and_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST", 20)
    with pytest.raises(ServeError, match="more than 20 kernels and launches"):
        read(traces.write(tmp_path / "t.json", traces.steps(3)))


def test_memory_is_bounded_by_the_blocks_and_what_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    content = traces.text([call("x" * 300) for _ in range(100)])
    calls = content[content.index(b"[") + 1 : content.rindex(b"\n ]")]
    size = 0
    with gzip.open(path, "wb", compresslevel=1) as file:
        for part in (b'{"traceEvents": [', *[calls + b","] * 400, json.dumps(kernel("last", 1.0, 2.0)).encode(), b"]}"):
            size += file.write(part)
    tracemalloc.start()
    recording = read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept(recording) == expected([kernel("last", 1.0, 2.0)])
    assert size > 15_000_000
    assert peak < 2_000_000


@pytest.mark.parametrize("changes", [
    {"dur": -8.0}, {"ts": 1e300}, {"dur": 1e18}, {"args": {"device": 0, "stream": 2**70, "correlation": 1}},
    {"args": {"device": 0, "stream": 7, "correlation": 2**64 - 1}}])
def test_what_no_gpu_can_have_done_is_not_made_figures_of(changes: Event, tmp_path: Path) -> None:
    path = traces.write(tmp_path / "odd.json", [kernel("a", 1.0, 2.0), {**kernel("a", 4.0, 2.0), **changes}])
    with pytest.raises(ServeError, match="torn or damaged"):
        read(path)


def test_a_trace_that_is_nested_without_end_is_damaged_and_what_stands_before_the_events_may_be(tmp_path: Path) -> None:
    path, nested = tmp_path / "deep.json", b"[" * 5000 + b"]" * 5000
    path.write_bytes(b'{"traceEvents":[{"cat":"kernel","args":{"x":%s}}]}' % nested)
    with pytest.raises(ServeError, match="torn or damaged"):
        read(path)
    path.write_bytes(b'{"x":%s,"traceEvents":[{"cat":"kernel"}]}' % nested)
    assert len(read(path).gpus[0].start) == 1
