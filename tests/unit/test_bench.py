"""Numbers: the benchmark's command is the article's, and a row is valid only if no rule refutes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isambard_serve import bench, validity
from isambard_serve.plan import Point
from isambard_serve.records import Sample
from isambard_serve.validity import Measured
from tests.unit.helpers import RUN_ID, SAMPLES, good_bench, loaded, small_plan, small_recipe, some_sample

POINT = Point(concurrency=2048, repeat=1, prompts=4096, seed=7)
RUNS = Path("/shared/runs")


def window(**ends: float) -> tuple[Sample, ...]:
    """Two samples, the second with the counters given."""
    return (some_sample(), some_sample(**{"prefix_cache_queries_total": 2048, **ends}))


def measured(result: dict[str, Any] | None, returncode: int | None = 0, *, prompts: int = 32, osl: int = 64,
             concurrency: int = 4, min_window_s: float = 1, samples: tuple[Sample, ...] | None = None) -> Measured:
    point = Point(concurrency=concurrency, repeat=1, prompts=prompts, seed=1)
    return Measured(bench=result, returncode=returncode, point=point, isl=64, osl=osl, min_window_s=min_window_s,
                    window=window() if samples is None else samples)


REAL = json.loads((SAMPLES / "bench.json").read_text())
ALL_FAILED = json.loads((SAMPLES / "bench-all-failed.json").read_text())


def test_a_point_is_measured_as_the_article_does() -> None:
    plan = small_plan(RUNS, {"model": "deepseek-ai/DeepSeek-V4-Flash", "bench": {
        "isl": 1024, "osl": 1024, "args": {"temperature": 0}}})
    assert plan.bench_command == ("/opt/engine/bin/vllm", "bench", "serve")
    assert bench.words(plan, POINT, port="4711", folder=Path("/shared/p")) == [
        "--backend", "openai",
        "--base-url", "http://127.0.0.1:4711",
        "--endpoint", "/v1/completions",
        "--model", "deepseek-ai/DeepSeek-V4-Flash",
        "--dataset-name", "random",
        "--request-rate", "inf",
        "--random-input-len", "1024",
        "--random-output-len", "1024",
        "--ignore-eos",
        "--percentile-metrics", "ttft,tpot,itl,e2el",
        "--metric-percentiles", "50,90,95,99",
        "--temperature", "0",
        "--num-prompts", "4096",
        "--max-concurrency", "2048",
        "--seed", "7",
        "--save-result",
        "--result-dir", "/shared/p",
        "--result-filename", "bench.json",
        "--metadata", f"run_id={RUN_ID}", "point=c2048.r1",
    ]


def test_each_attempt_at_each_point_has_a_seed_of_its_own_and_is_the_same_command_else() -> None:
    plan = small_plan(RUNS, {"bench": {"concurrency": [512, 2048], "repeats": 3}})
    attempts = [bench.words(plan, point, port="1", folder=RUNS, attempt=attempt)
                for point in plan.points for attempt in range(6)]
    at = attempts[0].index("--seed") + 1
    assert len({argv[at] for argv in attempts}) == len(attempts)
    assert len({tuple(argv[:at] + argv[at + 1:]) for argv in attempts}) == len(plan.points)
    assert bench.words(plan, POINT, port="1", folder=RUNS) == bench.words(plan, POINT, port="1", folder=RUNS, attempt=0)


def test_the_articles_rungs_send_twice_the_concurrency_in_prompts() -> None:
    assert loaded("tp4").bench.prompts_per_concurrency == small_recipe().bench.prompts_per_concurrency == 2


def test_a_real_result_in_which_all_went_well_breaks_no_rule() -> None:
    assert validity.judge(measured(REAL)) == ([], [])


def test_a_benchmark_whose_every_request_failed_is_invalid_although_it_exits_0() -> None:
    refuted, unknown = validity.judge(measured(ALL_FAILED, prompts=4, osl=64))
    assert refuted == ["completed", "none_failed", "tokens_out", "in_flight", "window"]
    assert unknown == []


@pytest.mark.parametrize(("code", "good", "bad"), [
    ("bench_ended", measured(REAL), measured(REAL, 1)),
    ("bench_ended", measured(REAL), measured(REAL, None)),
    ("bench_ended", measured(REAL), measured(None)),
    ("bench_ended", measured(REAL), measured(REAL, -9)),
    ("completed", measured(REAL), measured({**REAL, "completed": 31})),
    ("completed", measured(REAL), measured(REAL, prompts=33)),
    ("none_failed", measured(REAL), measured({**REAL, "failed": 1})),
    ("tokens_out", measured({**REAL, "total_output_tokens": 2038}), measured({**REAL, "total_output_tokens": 2037})),
    ("tokens_out", measured({**REAL, "total_output_tokens": 2058}), measured({**REAL, "total_output_tokens": 2059})),
    ("in_flight", measured(REAL), measured(REAL, concurrency=5)),
    ("in_flight", measured({**REAL, "queue_times": [0, 0, 1], "latencies": [1, 1, 1]}, concurrency=2),
     measured({**REAL, "queue_times": [0, 1, 2], "latencies": [1, 1, 1]}, concurrency=2)),
    ("window", measured({**REAL, "duration": 60.0}, min_window_s=60), measured({**REAL, "duration": 59.9},
                                                                             min_window_s=60)),
    ("window", measured(REAL, prompts=8), measured(REAL, prompts=7)),
    ("prefix_hits", measured(REAL, samples=window(prefix_cache_hits_total=20)),
     measured(REAL, samples=window(prefix_cache_hits_total=21))),
    ("recomputed", measured(REAL, prompts=100, samples=window(preemptions_total=1)),
     measured(REAL, prompts=100, samples=window(preemptions_total=4))),
])
def test_each_rule_tells_the_good_from_the_bad(code: str, good: Measured, bad: Measured) -> None:
    assert validity.RULES[code](good) is True
    assert validity.RULES[code](bad) is False
    assert code in validity.judge(bad)[0]
    assert code not in validity.judge(good)[0]


@pytest.mark.parametrize(("code", "key"), [
    ("completed", "completed"), ("none_failed", "failed"), ("tokens_out", "total_output_tokens")])
@pytest.mark.parametrize("value", [None, "32", True, [], "missing"])
def test_what_cannot_be_read_is_unknown_and_never_true(code: str, key: str, value: object) -> None:
    result = {name: item for name, item in REAL.items() if name != key}
    if value != "missing":
        result[key] = value
    refuted, unknown = validity.judge(measured(result))
    assert (refuted, unknown) == ([], [code])
    assert validity.RULES[code](measured(result)) is None


def test_without_a_result_the_row_is_refuted_and_the_rest_is_unknown() -> None:
    refuted, unknown = validity.judge(measured(None, 0, samples=()))
    assert refuted == ["bench_ended"]
    assert unknown == [code for code in validity.RULES if code != "bench_ended"]


@pytest.mark.parametrize(("code", "samples"), [
    ("prefix_hits", ()), ("prefix_hits", window()[:1]), ("prefix_hits", window(prefix_cache_queries_total=0)),
    ("prefix_hits", (Sample(time=1, scrape_ms=1), Sample(time=2, scrape_ms=1))),
    ("recomputed", ()), ("recomputed", (Sample(time=1, scrape_ms=1), Sample(time=2, scrape_ms=1))),
    ("recomputed", window(preemptions_total=3)),  # 2 % lies between the least and the most that they can have cost
])
def test_what_the_samples_do_not_tell_is_unknown(code: str, samples: tuple[Sample, ...]) -> None:
    assert validity.RULES[code](measured(REAL, prompts=100, samples=samples)) is None


@pytest.mark.parametrize("change", [{"queue_times": []}, {"queue_times": [0.0]}, {"latencies": None}])
def test_without_the_times_of_each_request_nobody_knows_how_many_were_under_way(change: dict[str, Any]) -> None:
    assert validity.in_flight(measured({**REAL, **change})) is None


def test_every_rule_says_what_it_means_beginning_with_its_code() -> None:
    for code, rule in validity.RULES.items():
        assert str(rule.__doc__).startswith(f"``{code}``: ")


def test_a_row_holds_the_benchmarks_numbers_and_those_that_follow_from_them() -> None:
    plan = small_plan(RUNS, {"resources": {"gpus": 2}, "bench": {"osl": 64, "min_window": "1s"}})
    point = Point(concurrency=4, repeat=1, prompts=32, seed=1)
    window = [some_sample(kv_cache_usage=usage, preemptions_total=preemptions)
              for usage, preemptions in ((0.25, 3), (0.75, 4), (0.5, 9))]
    row = bench.row(plan, point, node="nid001", bench=REAL, returncode=0, window=window)
    assert (row.run_id, row.recipe, row.node, row.concurrency, row.repeat) == (RUN_ID, "small", "nid001", 4, 1)
    assert row.output_tok_s == pytest.approx(1504.57, abs=0.01)
    assert row.output_tok_s_per_gpu == pytest.approx(1504.57 / 2, abs=0.01)
    assert row.total_tok_s == pytest.approx(3022.37, abs=0.01)
    assert row.tok_s_per_user == pytest.approx(1000 / 2.30597, rel=1e-4)
    assert (row.median_ttft_ms, row.p99_tpot_ms) == (REAL["median_ttft_ms"], REAL["p99_tpot_ms"])
    assert (row.kv_cache_usage_max, row.preemptions) == (0.75, 6)
    assert row.duration_s == pytest.approx(1.3612, abs=1e-4)
    assert row.node_hours == pytest.approx(1.3612 / 3600 * 2 / 4, rel=1e-4)
    assert row.output_tok_per_node_hour == pytest.approx(2048 / (1.3612 / 3600 / 2), rel=1e-4)
    assert (row.valid, row.reasons, row.unknown, row.ratio) == (False, ("recomputed",), ("prefix_hits",), None)


def test_a_row_of_nothing_says_so_and_has_no_numbers() -> None:
    row = bench.row(small_plan(RUNS), POINT, node="nid001", bench=None, returncode=None, window=[])
    assert not row.valid
    assert row.reasons == ("bench_ended",)
    assert row.unknown == tuple(code for code in validity.RULES if code != "bench_ended")
    assert {row.output_tok_s, row.output_tok_s_per_gpu, row.tok_s_per_user, row.kv_cache_usage_max, row.preemptions,
            row.node_hours, row.output_tok_per_node_hour, row.duration_s} == {None}


def test_a_row_of_failures_alone_divides_by_nothing() -> None:
    row = bench.row(small_plan(RUNS), POINT, node="nid001", bench={**ALL_FAILED, "duration": 0.0},
                    returncode=0, window=[])
    assert (row.valid, row.output_tok_s, row.tok_s_per_user, row.output_tok_per_node_hour) == (False, 0.0, None, None)


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "NaN"])
def test_a_result_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    assert bench.result(tmp_path) is None
    (tmp_path / bench.RESULT).write_text(content)
    assert bench.result(tmp_path) is None


def test_a_result_is_the_benchmarks_own(tmp_path: Path) -> None:
    (tmp_path / bench.RESULT).write_text(json.dumps(good_bench(2)))
    assert bench.result(tmp_path) == good_bench(2)
