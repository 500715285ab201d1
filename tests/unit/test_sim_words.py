"""The simulated engine's command lines, faults and reports: words in, words out."""

from __future__ import annotations

import io
import json
import math
import statistics
from pathlib import Path

import msgspec
import pytest

from isambard_serve import flags, recipe
from isambard_serve.errors import UsageError
from isambard_serve.records import EngineFacts
from isambard_serve.sim import facts, faults, report, settings
from isambard_serve.sim.arguments import Arguments
from isambard_serve.sim.faults import Faults
from isambard_serve.sim.load import Outcome, Pace
from isambard_serve.sim.log import BANNER, Log
from isambard_serve.sim.report import Distribution
from tests.unit.helpers import SAMPLES


def parsed(*words: str, **environment: str) -> settings.Settings:
    return settings.parse(words, environment)


def logged(*words: str, **environment: str) -> str:
    stream = io.StringIO()
    asked = parsed(*words, **environment)
    Log(stream).begin(asked)
    Log(stream).loaded(asked, 1.5)
    return stream.getvalue()


def test_flags_are_taken_in_every_way_that_vllm_takes_them() -> None:
    words = Arguments(["model", "--a", "1", "--b_c=2", "--bare", "--no-off", "-tp", "4", "--metadata", "x=1", "y=2",
                       "--a", "3", "--metadata", "z=3", "--seed", "-1"])
    assert words.positional == ["model"]
    assert (words.whole("a", 0), words.whole("b-c", 0), words.whole("tensor-parallel-size", 1)) == (3, 2, 4)
    assert (words.on("bare"), words.on("off", default=True), words.on("never"), words.on("never", default=True)) == (
        True, False, False, True)
    assert words.every("metadata") == ["x=1", "y=2", "z=3"]
    assert (words.number("seed", 0), words.text("none", "default")) == (-1, "default")


def test_a_number_that_is_none_is_named() -> None:
    with pytest.raises(UsageError, match="'many' is not a number"):
        Arguments(["--a", "many"]).whole("a", 0)


@pytest.mark.parametrize("name", ["tp4", "dp4", "dp4-humming", "tiny"])
def test_every_shipped_recipe_makes_an_engine_that_can_serve_it(name: str) -> None:
    made, *_ = recipe.load(name)
    asked = parsed(made.model, *flags.argv(made.engine.args), **made.engine.env)
    assert asked.kv_tokens >= asked.max_model_len >= made.bench.isl + made.bench.osl
    assert asked.limits.ranks * asked.shape.tensor_parallel >= made.resources.gpus
    assert asked.faults == Faults()


QUANT = '{"dtype":"float8e4m3","input_scale_group_size":128}'
HUMMING = ["deepseek-ai/DeepSeek-V4-Flash", "-dp", "2", "-tp", "2", "--moe-backend", "humming"]


def written(folder: Path, *words: str) -> list[EngineFacts]:
    """The facts that the simulated processes write, the API server's first, then by rank."""
    facts.write(parsed(*words, ISAMBARD_SERVE_FACTS=str(folder), VLLM_HUMMING_INPUT_QUANT_CONFIG=QUANT))
    every = [msgspec.json.decode(path.read_bytes(), type=EngineFacts) for path in folder.glob("*.json")]
    return sorted(every, key=lambda each: -1 if each.local_rank is None else each.local_rank)


def test_every_simulated_process_writes_facts_as_the_plugin_does(tmp_path: Path) -> None:
    server, *workers = written(tmp_path, *HUMMING)
    assert (server.roles, server.moe_backend, server.engine_version) == (("api_server",), None, settings.VERSION)
    assert [(each.data_parallel_rank, each.tensor_parallel_rank) for each in workers] == [
        (0, 0), (0, 1), (1, 0), (1, 1)]
    assert {(each.moe_backend, each.input_quant) for each in workers} == {(("humming",), ("float8e4m3 group 128",))}
    assert {each.environment["VLLM_HUMMING_INPUT_QUANT_CONFIG"] for each in workers} == {QUANT}


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    _, worker = written(tmp_path, "tiny", "--kv-cache-dtype", "fp8")
    assert (worker.moe_backend, worker.input_quant, worker.kv_cache_dtype) == ((), (), ("fp8",))


def test_one_rank_may_differ_and_a_variable_may_be_lost(tmp_path: Path) -> None:
    _, *workers = written(tmp_path, *HUMMING, "--sim-fault", "odd-rank=2", "--sim-fault", "lost-variable")
    assert [each.moe_backend for each in workers] == [("humming",), ("humming",), ("marlin",), ("humming",)]
    assert {each.input_quant for each in workers} == {("none",)}
    assert all("VLLM_HUMMING_INPUT_QUANT_CONFIG" not in each.environment for each in workers)


def test_no_facts_are_written_where_nobody_asked_or_where_they_shall_be_missing(tmp_path: Path) -> None:
    facts.write(parsed(*HUMMING))
    assert written(tmp_path / "facts", *HUMMING, "--sim-fault", "no-facts") == []


def test_what_is_not_said_is_as_vllm_has_it() -> None:
    asked = parsed("m")
    assert (asked.port, asked.served_name, asked.api_key, asked.time_scale) == (8000, "m", "", 1)
    assert asked.limits.prefix_caching
    assert parsed("deepseek-ai/DeepSeek-V4-Flash").shape.moe_backend == "humming"
    assert parsed("m", VLLM_API_KEY="secret").api_key == "secret"
    assert not parsed("m", "--no-enable-prefix-caching").limits.prefix_caching
    assert parsed("m", "--num-gpu-blocks-override", "7").kv_tokens == 7 * 16


@pytest.mark.parametrize("words", [[], ["m", "--sim-time-scale", "0"], ["m", "--sim-time-scale", "inf"],
                                   ["m", "--port", "high"]])
def test_a_command_line_that_cannot_be_used_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        parsed(*words)


def test_the_log_says_first_what_it_is_and_then_what_vllm_would() -> None:
    text = logged("deepseek-ai/DeepSeek-V4-Flash", "--data-parallel-size", "4", "--moe-backend", "humming",
                  "--max-model-len", "128000", "--gpu-memory-utilization", "0.95", "--enable-expert-parallel",
                  "--api-key", "secret", VLLM_HUMMING_MOE_GEMM_TYPE="indexed")
    assert text.startswith(f"{BANNER}\n")
    assert "Using 'HUMMING' Mxfp4 MoE backend." in text
    assert "Using indexed gemm for humming moe" in text
    assert "'data_parallel_size': '4'" in text
    assert text.count(" tokens, Maximum concurrency for 128,000 tokens per request: ") == 4
    assert "DP rank 3, PP rank 0, PCP rank 0, TP rank 0, EP rank 3" in text
    assert "secret" not in text


def test_humming_groups_its_work_by_expert_unless_told_otherwise() -> None:
    assert "Using grouped_contiguous gemm" in logged("deepseek-v4", "-dp", "4", "--enable-expert-parallel")
    assert "Using indexed gemm" in logged("deepseek-v4", "-dp", "4")


def test_faults_are_read_with_and_without_their_values() -> None:
    assert faults.parse(["die-at-start", "hang", "short-output", "compile-in-window"]) == Faults(
        die_at_start=1, hang=0, short_output=0.5, compile_in_window=5)
    assert faults.parse(["die-at-start=-9", "die-in-point=2:0", "hang=3", "slow-start=1.5", "fail-requests=0.25"]) == (
        Faults(die_at_start=-9, die_in_point=(2, 0), hang=3, slow_start=1.5, fail_requests=0.25))
    assert faults.parse(["die-in-point=1"]).die_in_point == (1, 1)


@pytest.mark.parametrize("text", ["die-in-point", "die-in-point=0", "die-in-point=1:x", "fail-requests=2", "hang=-1",
                                  "slow-start=long", "slow-start=inf", "preempt=0", "slow-client=-1"])
def test_a_value_that_cannot_be_used_is_an_error_that_says_how_to_write_it(text: str) -> None:
    name = text.partition("=")[0]
    with pytest.raises(UsageError) as error:
        faults.parse([text])
    assert f"write {name}=" in str(error.value)


def test_an_unknown_fault_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UsageError) as error:
        parsed("m", "--sim-fault", "explode")
    assert all(name in str(error.value) for name in faults.KNOWN)


def test_the_help_explains_every_fault() -> None:
    text = faults.help_text()
    assert all(f"  {name}" in text and known.does in text for name, known in faults.KNOWN.items())
    assert "die-in-point=N[:CODE]" in text


def test_the_wrong_backend_is_another_one_than_was_asked_for() -> None:
    fault = ("--sim-fault", "wrong-moe-backend")
    assert parsed("deepseek-v4", "--moe-backend", "humming", *fault).shape.moe_backend == "marlin"
    assert parsed("deepseek-v4", "--moe-backend", "marlin", *fault).shape.moe_backend == "humming"
    assert parsed("m", "--sim-fault", "wrong-moe-backend=triton").shape.moe_backend == "triton"


def test_a_distribution_is_that_of_the_numbers_written_out() -> None:
    numbers = [1.0, 1.0, 1.0, 2.0, 5.0, 5.0, 9.0]
    counted = Distribution([(5.0, 2), (1.0, 3), (9.0, 1), (2.0, 1)])
    assert counted.mean == pytest.approx(statistics.fmean(numbers))
    assert counted.deviation == pytest.approx(statistics.pstdev(numbers))
    assert [counted.percentile(percent) for percent in (0, 50, 100)] == [1, 2, 9]
    assert counted.percentile(90) == pytest.approx(5 + 0.4 * 4)
    assert [Distribution([]).mean, Distribution([]).deviation, Distribution([]).percentile(50)] == [0, 0, 0]


def outcome(index: int, sent_s: float, end_s: float, error: str | None = None) -> Outcome:
    return Outcome(index=index, sent_s=sent_s, first_token_s=sent_s + 1, end_s=end_s, error=error,
                   output_tokens=0 if error else 5)


def result(outcomes: list[Outcome], **asked: object) -> dict[str, object]:
    return report.result(asked, outcomes, Pace(gaps=[(0.25, 8)], peak_tok_s=9.0), duration_s=4.0, input_tokens=3,
                         metrics=["ttft", "tpot", "itl"], percentiles=[99, 99.9], time_scale=10.0)


def test_failed_requests_count_as_failed_and_as_nothing_else() -> None:
    document = result([outcome(1, 0.0, 4.0), outcome(0, 0.0, 2.0), outcome(2, 2.0, 2.0, "refused")])
    assert (document["completed"], document["failed"], document["latencies"]) == (2, 1, [2.0, 4.0, 0.0])
    assert (document["total_input_tokens"], document["total_output_tokens"]) == (6, 10)
    assert (document["output_throughput"], document["total_token_throughput"]) == (2.5, 4.0)
    assert (document["median_ttft_ms"], document["median_tpot_ms"]) == (1000.0, 500.0)
    assert (document["mean_itl_ms"], document["p99.9_itl_ms"]) == (250.0, 250.0)
    assert document["max_concurrent_requests"] == 2
    assert "mean_e2el_ms" not in document


def test_a_result_says_that_it_is_simulated() -> None:
    document = result([])
    assert (document["simulated"], document["time_scale"]) == (True, 10.0)
    assert "Successful requests:" in report.table(document)


def test_a_result_without_a_good_request_is_all_zeros_as_vllm_has_it() -> None:
    document = report.result({}, [outcome(0, 0.0, 0.0, "refused")], Pace(gaps=[], peak_tok_s=0.0), duration_s=0.01,
                             input_tokens=3, metrics=["ttft", "tpot", "itl"], percentiles=[99], time_scale=1.0)
    real = json.loads((SAMPLES / "bench-all-failed.json").read_text())
    asked_only = {"date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts",
                  "request_rate", "burstiness", "max_concurrency"}
    assert document.keys() - {"simulated", "time_scale"} == real.keys() - asked_only
    assert all(document[key] == 0 for key in real if key.endswith("_ms"))
    assert math.isclose(document["duration"], 0.01)


@pytest.mark.parametrize("config", ["torch", "[1]", "3"])
def test_a_profiler_config_that_is_no_object_is_refused(config: str) -> None:
    with pytest.raises(UsageError, match="--profiler-config: is no JSON object"):
        parsed("model", "--profiler-config", config)
    assert parsed("model", "--profiler-config", "{}").profiles is None
