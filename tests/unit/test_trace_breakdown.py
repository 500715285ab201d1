"""Every instant of a step is in one bucket, and none in two."""

from __future__ import annotations

import os
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from isambard_serve.errors import UsageError
from isambard_serve.records import RankTrace
from isambard_serve.trace import breakdown, buckets
from isambard_serve.trace.breakdown import exclusive
from tests.unit import traces
from tests.unit.traces import Event, kernel

TRIALS = int(os.environ.get("ISAMBARD_SERVE_TRIALS", "3"))

TABLE = buckets.load()


def shares(*spans: tuple[float, float], background: str = "") -> list[float]:
    """What each span gets; ``background`` has a ``b`` at the place of each that runs in the background."""
    behind = [background[place : place + 1] == "b" for place in range(len(spans))]
    took = exclusive(np.array([span[0] for span in spans], float), np.array([span[1] for span in spans], float),
                     np.array(behind, bool))
    return [float(each) for each in took]


@pytest.mark.parametrize(("spans", "background", "expected"), [
    ([], "", []),
    ([(0, 3), (3, 5), (7, 8)], "", [3, 2, 1]),
    ([(0, 5), (3, 8)], "", [5, 3]),                                     # the one that began first has what they share
    ([(0, 10), (2, 4), (3, 12)], "", [10, 0, 2]),                       # one within another
    ([(0, 10), (2, 4)], "b.", [8, 2]),                                  # behind: only what the other leaves
    ([(0, 10), (2, 4), (9, 12)], "b..", [7, 2, 3]),
    ([(0, 4), (1, 3), (5, 6)], ".bb", [4, 0, 1]),
    ([(0, 4), (2, 6), (3, 8)], "bb.", [3, 0, 5]),                       # two behind: again the first has it
    ([(0, 4), (4, 6)], "bb", [4, 2]),                                   # nothing in front at all
    ([(1, 1), (1, 2)], "", [0, 1]),
])
def test_the_time_that_several_share_counts_once(spans: list[tuple[float, float]], background: str,
                                                 expected: list[float]) -> None:
    assert shares(*spans, background=background) == pytest.approx(expected)


@pytest.mark.parametrize("trial", range(TRIALS * 20))
def test_the_shares_add_up_to_the_time_in_which_anything_ran(trial: int) -> None:
    draw = random.Random(trial)  # noqa: S311
    spans = [(begin, begin + draw.randrange(20)) for begin in sorted(draw.randrange(200) for _ in range(60))]
    background = "".join(draw.choice("b.") for _ in spans)
    took = shares(*spans, background=background)
    ran = {instant for begin, end in spans for instant in range(begin, end)}
    front = {instant for (begin, end), kind in zip(spans, background, strict=True) if kind == "."
             for instant in range(begin, end)}
    assert sum(took) == pytest.approx(len(ran))
    assert sum(share for share, kind in zip(took, background, strict=True) if kind == ".") == pytest.approx(len(front))
    assert all(0 <= share <= end - begin for share, (begin, end) in zip(took, spans, strict=True))


def broken_down(events: list[Event], tmp_path: Path, table: buckets.Table = TABLE) -> RankTrace:
    (rank,) = breakdown.of_file(traces.write(tmp_path / "t.json", events), table)
    return rank


def ms(rank: RankTrace) -> dict[str, float]:
    return {bucket.name: bucket.ms for bucket in rank.buckets if bucket.ms}


@pytest.mark.parametrize("trial", range(TRIALS * 4))
def test_buckets_and_what_is_unmatched_add_up_to_busy_time_and_with_idle_time_to_the_step(
        trial: int, tmp_path: Path) -> None:
    draw = random.Random(trial)  # noqa: S311
    names = ["fused_moe_kernel", "nvjet_a", "ncclDevKernel_AllReduce", "Memcpy DtoH", "rms_norm", "who_knows", "what"]
    events = [kernel(draw.choice(names), draw.uniform(0, 1000), draw.expovariate(0.1), stream=draw.randrange(3))
              for _ in range(draw.randrange(1, 300))]
    rank = broken_down(events, tmp_path)
    parts = sum(bucket.ms for bucket in rank.buckets) + rank.unmatched_ms
    assert parts == pytest.approx(rank.step_ms)
    assert sum(bucket.share for bucket in rank.buckets) + rank.unmatched_ms / rank.step_ms == pytest.approx(1)
    assert rank.busy_ms == pytest.approx(parts - rank.buckets[-1].ms)
    assert rank.kernel_ms == pytest.approx(sum(event["dur"] for event in events) / 1000)
    assert rank.kernels == len(events)
    if rank.found_by == "nothing":
        edges = sorted({edge for event in events for edge in (event["ts"], event["ts"] + event["dur"])})
        busy = sum(end - begin for begin, end in pairwise(edges)
                   if any(event["ts"] <= begin and end <= event["ts"] + event["dur"] for event in events))
        assert rank.busy_ms == pytest.approx(busy / 1000)


def test_a_step_s_buckets_launches_and_idle_time(tmp_path: Path) -> None:
    rank = broken_down(traces.steps(10, gap=40.0), tmp_path)
    assert ms(rank) == pytest.approx({"norm/elementwise": 0.017, "MoE GEMM": 0.060, "attention": 0.030,
                                      "dense GEMM": 0.010, "sampling": 0.003, "idle": 0.036})
    launches = {bucket.name: bucket.launches for bucket in rank.buckets if bucket.launches}
    assert launches == {"norm/elementwise": 4, "MoE GEMM": 3, "attention": 3, "dense GEMM": 1, "sampling": 1}
    assert rank.buckets[-1].launches is None
    assert (rank.unmatched, rank.unmatched_ms) == ((), 0)


def test_comms_behind_compute_are_hidden_and_those_that_stand_alone_are_not(tmp_path: Path) -> None:
    events = traces.steps(4, gap=100.0)
    for begin in [event["ts"] for event in events if event["name"] == "ArgMax"]:
        events += [kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", begin - 7.0, 30.0, stream=20)]
    rank = broken_down(events, tmp_path)
    assert rank.hidden_ms == pytest.approx({"comms": 0.010, "copies": 0})
    assert ms(rank)["comms"] == pytest.approx(0.020)
    assert ms(rank)["dense GEMM"] == pytest.approx(0.010)


def test_what_no_pattern_matches_is_named_that_which_takes_most_first(tmp_path: Path) -> None:
    events = traces.steps(4)
    for begin in [event["ts"] for event in events if event["name"] == "ArgMax"]:
        events += [kernel(f"who_knows_{number}", begin + 3.0 + 0.2 * number, 0.01 * number) for number in range(15)]
    rank = broken_down(events, tmp_path)
    assert [kernel.name for kernel in rank.unmatched] == [f"who_knows_{number}" for number in range(14, 4, -1)]
    assert rank.unmatched[0].ms == pytest.approx(0.14 / 1000)
    assert rank.unmatched[0].launches == 1
    assert rank.unmatched_ms == pytest.approx(0.01 * 105 / 1000)


def test_each_gpu_of_a_trace_is_a_rank_and_numbered_anew(tmp_path: Path) -> None:
    one, two = traces.steps(4), traces.steps(6, gap=50.0)
    for event in two:
        event["args"] |= {"device": 1, "correlation": event["args"]["correlation"] + 10_000}
    path = traces.write(tmp_path / "t.json", [*one, *two], distributedInfo={"rank": 5})
    ranks = breakdown.of_files([path], TABLE, lambda _: None)
    assert [(rank.rank, rank.steps) for rank in ranks] == [(0, 4), (1, 6)]


def test_ranks_are_read_beside_each_other_and_meet_in_their_order(tmp_path: Path) -> None:
    paths = [traces.write(tmp_path / f"x-rank{rank}.json.gz", traces.steps(4 + rank)) for rank in (2, 0)]
    paths.append(traces.write(tmp_path / "frontend.json", [traces.call("f")]))
    paths.append(traces.write(tmp_path / "told.json", traces.steps(5), distributedInfo={"rank": 1}))
    told: list[str] = []
    ranks = breakdown.of_files(paths, TABLE, told.append)
    assert [(rank.rank, rank.steps, Path(rank.path).name) for rank in ranks] == [
        (0, 4, "x-rank0.json.gz"), (1, 5, "told.json"), (2, 6, "x-rank2.json.gz")]
    assert sorted(told) == ["read frontend.json: no GPU kernels in it", "read told.json", "read x-rank0.json.gz",
                            "read x-rank2.json.gz"]


def test_an_error_in_one_rank_is_the_whole_s(tmp_path: Path) -> None:
    paths = [traces.write(tmp_path / "a.json", traces.steps(4)), tmp_path / "missing.json"]
    with pytest.raises(UsageError, match=r"missing\.json: cannot be read"):
        breakdown.of_files(paths, TABLE, lambda _: None)


def test_the_mean_over_ranks_stands_beside_the_least(tmp_path: Path) -> None:
    paths = [traces.write(tmp_path / f"rank{rank}.json", traces.steps(4 + rank, layers=3 + rank)) for rank in (0, 1)]
    ranks = breakdown.of_files(paths, TABLE, lambda _: None)
    trace = breakdown.combined(ranks, {"MoE GEMM": 0.05})
    moe = next(bucket for bucket in trace.buckets if bucket.name == "MoE GEMM")
    assert moe.ms == pytest.approx(0.07)
    assert (trace.steps, moe.launches, moe.floor_ms) == (4, 3.5, 0.05)
    assert trace.step_ms == pytest.approx((ranks[0].step_ms + ranks[1].step_ms) / 2)
    assert sum(bucket.ms for bucket in trace.buckets) == pytest.approx(trace.step_ms)
    assert trace.unmatched_share == 0
    assert [bucket.name for bucket in trace.buckets if bucket.floor_ms is None] == [
        bucket.name for bucket in trace.buckets if bucket.name != "MoE GEMM"]
