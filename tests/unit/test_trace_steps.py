"""Steps are found on the GPU, however the program marked them, launched them, or did neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from isambard_serve.records import RankTrace
from isambard_serve.trace import breakdown, buckets
from tests.unit import traces
from tests.unit.traces import Event, kernel, launch, mark

STEP = 120.0
"""What the kernels of one of :func:`traces.steps`' steps take, in µs."""


def found(events: list[Event], tmp_path: Path) -> RankTrace:
    (rank,) = breakdown.of_file(traces.write(tmp_path / "t.json", events), buckets.load())
    return rank


def test_steps_without_marks_or_graphs_are_found_by_what_comes_back(tmp_path: Path) -> None:
    rank = found(traces.steps(8), tmp_path)
    assert (rank.found_by, rank.steps, rank.left_out, rank.launches) == ("repetition", 8, 0, 12)
    assert rank.busy_ms == pytest.approx(STEP / 1000)
    assert rank.step_ms == pytest.approx((8 * STEP + 7 * 10) / 8 / 1000)  # no one knows how long the last one idles


def test_a_layer_is_not_a_step(tmp_path: Path) -> None:
    assert found(traces.steps(5, layers=43), tmp_path).steps == 5


def test_a_recording_that_begins_and_ends_within_a_step_counts_the_whole_ones(tmp_path: Path) -> None:
    events = [event for event in traces.steps(8) if event["cat"] == "kernel"]
    rank = found(events[5:-5], tmp_path)
    assert (rank.steps, rank.launches) == (6, 12)
    assert rank.busy_ms == pytest.approx(STEP / 1000)


def test_marks_count_by_when_the_kernels_were_launched_since_the_gpu_lags_behind(tmp_path: Path) -> None:
    # traces.steps launches 900 µs, seven steps, ahead.
    events = traces.steps(20)
    begins = [event["ts"] for event in events if event["cat"] == "cuda_runtime"][::12]
    marks = [mark(f"ProfilerStep#{number}", begin - 1.0, 129.0) for number, begin in enumerate(begins)]
    rank = found([*marks[2:12], *events], tmp_path)
    assert (rank.found_by, rank.steps, rank.left_out, rank.launches) == ("marks", 10, 0, 12)
    assert rank.busy_ms == pytest.approx(STEP / 1000)
    assert rank.kernels == 240


def test_the_engines_own_marks_are_used_too(tmp_path: Path) -> None:
    events = traces.steps(6)
    begins = [event["ts"] for event in events if event["cat"] == "cuda_runtime"][::12]
    marks = [mark("execute_context_0(0)_generation_256(256)", begin - 1.0, 60.0) for begin in begins]
    rank = found([*marks, *events], tmp_path)
    # The last mark ends before its step's last launches, and there is no next one to end it.
    assert (rank.found_by, rank.steps, rank.left_out) == ("marks", 5, 1)
    assert rank.busy_ms == pytest.approx(STEP / 1000)


def test_marks_of_which_no_launch_is_recorded_are_not_used(tmp_path: Path) -> None:
    kernels = [event for event in traces.steps(6) if event["cat"] == "kernel"]
    rank = found([mark("ProfilerStep#1", 0.0, 1e6), *kernels], tmp_path)
    assert (rank.found_by, rank.steps) == ("repetition", 6)


def test_a_copy_for_the_next_step_on_another_stream_does_not_begin_it(tmp_path: Path) -> None:
    events = traces.steps(6, gap=50.0)
    begins = [event["ts"] for event in events if event.get("name") == "embedding"]
    copies = [kernel("Memcpy HtoD", begin - 30.0, 5.0, stream=13, category="gpu_memcpy") for begin in begins]
    rank = found([*events, *copies], tmp_path)
    assert (rank.steps, rank.launches) == (6, 13)
    assert rank.step_ms == pytest.approx((30.0 + 6 * STEP + 5 * 50.0) / 6 / 1000)


def graphs(sizes: list[int], count: int, *, before: int = 1, kernel_us: float = 5.0) -> list[Event]:
    """``count`` steps of CUDA graphs of ``sizes`` kernels, all alike, with ``before`` others before the first."""
    events, now, correlation = [], 1000.0, 0
    for _ in range(count):
        for size in [*[1] * before, *sizes]:
            correlation += 1
            events.append(launch(correlation, now - 500.0, "cudaGraphLaunch"))
            for _ in range(size):
                events.append(kernel("same", now, kernel_us, launch=correlation))
                now += kernel_us
        now += 7.0
    return events


@pytest.mark.parametrize(("sizes", "steps"), [([30], 50), ([31], 3), ([4, 9, 9, 9, 6], 12), ([10, 5] + [25] * 40, 4)])
def test_graphs_are_steps_one_by_one_or_some_in_a_fixed_order(sizes: list[int], steps: int, tmp_path: Path) -> None:
    rank = found(graphs(sizes, steps), tmp_path)
    assert (rank.found_by, rank.steps, rank.left_out, rank.launches) == ("graphs", steps, 0, sum(sizes) + 1)
    assert rank.step_ms == pytest.approx((steps * (sum(sizes) + 1) * 5.0 + (steps - 1) * 7.0) / steps / 1000)


def test_a_step_that_prefills_or_is_cut_is_left_out(tmp_path: Path) -> None:
    events = graphs([30], 20)
    last = max(event["ts"] for event in events) + 10.0
    prefill = [kernel("same", last + 100.0 * place, 100.0, launch=9000) for place in range(30)]
    cut = [kernel("same", last + 5000.0 + place, 1.0, launch=9001) for place in range(12)]
    rank = found([*events, *prefill, *cut], tmp_path)
    assert (rank.found_by, rank.steps, rank.left_out) == ("graphs", 20, 1)
    assert rank.busy_ms == pytest.approx(31 * 5.0 / 1000)


def test_where_nothing_comes_back_all_counts_as_one_step(tmp_path: Path) -> None:
    rank = found([kernel("a", 0.0, 4.0), kernel("b", 6.0, 4.0)], tmp_path)
    assert (rank.found_by, rank.steps, rank.launches) == ("nothing", 1, 2)
    assert [rank.busy_ms, rank.step_ms] == pytest.approx([0.008, 0.010])
