"""Numbers: the benchmark's command is the article's, and a row is valid only if no rule refutes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isambard_serve import bench, validity
from isambard_serve.evidence import Evidence
from isambard_serve.plan import Point
from isambard_serve.records import GpuSample
from tests.unit.helpers import (
    RUN_ID,
    SAMPLES,
    good_bench,
    loaded,
    small_plan,
    small_recipe,
    some_facts,
    some_sample,
)

POINT = Point(concurrency=2048, repeat=1, prompts=4096, seed=7)
RUNS = Path("/shared/runs")


REAL = json.loads((SAMPLES / "bench.json").read_text())
ALL_FAILED = json.loads((SAMPLES / "bench-all-failed.json").read_text())


def test_a_point_is_measured_as_the_article_does() -> None:
    plan = small_plan(RUNS, {"model": "deepseek-ai/DeepSeek-V4-Flash", "bench": {
        "isl": 1024, "osl": 1024, "args": {"temperature": 0}}})
    assert plan.bench_command == ("/opt/engine/bin/vllm", "bench", "serve")
    assert bench.words(plan, POINT, url="http://127.0.0.1:4711", folder=Path("/shared/p")) == [
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
    attempts = [bench.words(plan, point, url="u", folder=RUNS, attempt=attempt)
                for point in plan.points for attempt in range(6)]
    at = attempts[0].index("--seed") + 1
    assert len({argv[at] for argv in attempts}) == len(attempts)
    assert len({tuple(argv[:at] + argv[at + 1:]) for argv in attempts}) == len(plan.points)
    assert bench.words(plan, POINT, url="u", folder=RUNS) == bench.words(plan, POINT, url="u", folder=RUNS, attempt=0)


def test_a_server_that_is_measured_again_and_again_keeps_to_seeds_that_the_benchmark_takes() -> None:
    plan = small_plan(RUNS, {"bench": {"concurrency": [1, 64, 512, 2048], "repeats": 3}})
    each = [bench.words(plan, point, url="u", folder=RUNS, attempt=attempt)
            for point in plan.points for attempt in range(0, 600, 3)]
    seeds = {int(argv[argv.index("--seed") + 1]) for argv in each}
    assert len(seeds) == len(each)
    assert max(seeds) < 2**32  # beyond it numpy raises, and the point is lost


def test_the_articles_rungs_send_twice_the_concurrency_in_prompts() -> None:
    assert loaded("tp4").bench.prompts_per_concurrency == small_recipe().bench.prompts_per_concurrency == 2


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
    assert (row.valid, row.reasons, row.ratio, row.power_capped) == (False, ("recomputed",), None, None)
    assert set(row.unknown) == {"littles_law", "prefix_hits", "client", "expected", "binding", "compiled", "throttled",
                                "outputs"}
    assert row.not_applicable == ("window", "environment")  # its recipe asks for no window
    assert set(row.details) == {*row.reasons, *row.unknown, *row.not_applicable}
    assert row.details["recomputed"] == "6 preemptions: 2.1% to 18.8% of the tokens were computed again"


def test_a_row_takes_from_its_plan_and_its_evidence_what_it_is_judged_by() -> None:
    over = {"expect": {"moe_backend": "humming"}, "engine": {"args": {"data-parallel-size": 2}, "env": {"VLLM_X": "1"}},
            "resources": {"gpus": 2}}
    looks = tuple(GpuSample(time=1, gpu="GPU-0", sm_mhz=1, power_w=1, temperature_c=1, reasons=reasons)
                  for reasons in (0x4, 0x4, 0, 0x4))
    workers = tuple(some_facts(data_parallel_rank=rank, moe_backend=("humming",), environment={"VLLM_X": "1"})
                    for rank in range(2))
    row = bench.row(small_plan(RUNS, over), POINT, node="nid001", bench=REAL, returncode=0, window=[],
                    evidence=Evidence(facts=workers, looks=looks))
    assert not {"expected", "environment"} & {*row.reasons, *row.unknown, *row.not_applicable}
    assert row.power_capped == 0.75
    row = bench.row(small_plan(RUNS, over, engine_version="0.26.0"), POINT, node="nid001", bench=REAL, returncode=0,
                    window=[], evidence=Evidence(facts=workers[:1]))
    assert row.details["expected"] == "it is vLLM 0.33.0, 0.26.0 was asked for"
    assert "environment" in row.unknown


@pytest.mark.parametrize(("args", "where"), [({}, "unknown"), ({"load-format": "dummy"}, "not_applicable"),
                                             ({"load-format": "auto"}, "unknown")])
def test_random_weights_answer_nothing_that_could_be_judged(args: dict[str, str], where: str) -> None:
    plan = small_plan(RUNS, {"engine": {"args": args}})
    row = bench.row(plan, POINT, node="n", bench=REAL, returncode=0, window=[])
    assert "outputs" in getattr(row, where)


def test_a_row_of_the_simulated_engine_says_so_whatever_the_site_calls_it() -> None:
    made = {**good_bench(4096), "time_scale": 150.0}
    rows = [bench.row(small_plan(RUNS), POINT, node="n", bench=result, returncode=0, window=())
            for result in (made, REAL)]
    assert [row.simulated for row in rows] == [True, False]


def test_a_simulated_engine_has_no_version_that_could_be_wrong() -> None:
    row = bench.row(small_plan(RUNS, simulated=True, engine_version="0.26.0"), POINT, node="n", bench=REAL,
                    returncode=0, window=[], evidence=Evidence(facts=(some_facts(),)))
    assert "expected" in row.not_applicable


def test_a_row_of_nothing_says_so_and_has_no_numbers() -> None:
    row = bench.row(small_plan(RUNS), POINT, node="nid001", bench=None, returncode=None, window=[])
    assert not row.valid
    assert row.reasons == ("bench_ended",)
    assert set(row.unknown) == set(validity.RULES) - {"bench_ended", "environment"}
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
