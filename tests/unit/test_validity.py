"""A row is valid only if no rule refutes it; what cannot be judged is unknown, and what means nothing is neither."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from isambard_serve import validity
from isambard_serve.audit import Audit
from isambard_serve.enginelog import Log
from isambard_serve.evidence import Evidence, Measured
from isambard_serve.plan import Point
from isambard_serve.recipe import Expect
from isambard_serve.records import ClientFacts, Device, EngineFacts, GpuSample, Sample
from tests.unit.helpers import SAMPLES, some_facts, some_outputs, some_sample

REAL = json.loads((SAMPLES / "bench.json").read_text())
ALL_FAILED = json.loads((SAMPLES / "bench-all-failed.json").read_text())


def window(**ends: float) -> tuple[Sample, ...]:
    """Two samples, the second with the counters given."""
    return (some_sample(), some_sample(**{"prefix_cache_queries_total": 2048, **ends}))


def measured(result: dict[str, Any] | None = REAL, returncode: int | None = 0, *, prompts: int = 32, osl: int = 64,
             concurrency: int = 4, min_window_s: float = 1, samples: tuple[Sample, ...] | None = None,
             **more: Any) -> Measured:
    point = Point(concurrency=concurrency, repeat=1, prompts=prompts, seed=1)
    return Measured(bench=result, returncode=returncode, point=point, isl=64, osl=osl, min_window_s=min_window_s,
                    window=window() if samples is None else samples, **more)


def seen(ranks: int = 1, expect: Expect | None = None, version: str | None = None,
         variables: dict[str, str] | None = None, **evidence: Any) -> Measured:
    """A point that went well, with what was seen beside it."""
    return measured(ranks=ranks, expect=expect or Expect(), version=version, variables=variables or {},
                    evidence=Evidence(**evidence))


def ranks(*changes: dict[str, Any]) -> tuple[EngineFacts, ...]:
    """The facts of DP ranks that differ by ``changes``."""
    return tuple(some_facts(data_parallel_rank=rank, **change) for rank, change in enumerate(changes))


def under_way(*counts: float, step_s: float = 1.0) -> tuple[Sample, ...]:
    """Samples of an engine with so many requests."""
    return tuple(some_sample(time=number * step_s, running=count - 1 if count else 0, waiting=1 if count else 0)
                 for number, count in enumerate(counts))


def outcome(code: str, of: Measured) -> str:
    return validity.RULES[code](of).outcome


STEADY = under_way(0, *[4] * 30, 0)
LATENCIES = {"latencies": [15.0] * 8, "queue_times": [0.0] * 4 + [15.0] * 4}
NOBODY = Evidence()
HUMMING = {"moe_backend": ("humming",), "input_quant": ("float8e4m3 group 128",)}
MARLIN = {"moe_backend": ("marlin",), "input_quant": ("none",)}
SEVERAL = {"attention_backend": ("FLASH_ATTN", "X")}
ASKED = Expect(moe_backend="humming", input_quant="float8e4m3 group 128")
QUANT = {"VLLM_HUMMING_INPUT_QUANT_CONFIG": "{}"}
WATCHED = Log(version="0.33.0", known=True, monitors=True)


def look(gpu: int = 0, reasons: int = 0x4) -> GpuSample:
    return GpuSample(time=1.0, gpu=f"GPU-{gpu}", sm_mhz=1500, power_w=500, temperature_c=60, reasons=reasons)


def on_gpu(number: int = 0) -> dict[str, Any]:
    return {"device_type": "cuda", "device": Device(name="GH200", uuid=f"GPU-{number}", pci_bus_id="00000000:01:00.0")}


def requests_of(request_ms: float, **client: float) -> Measured:
    """A client whose requests take so long, the median of them."""
    return measured({**REAL, "median_e2el_ms": request_ms}, evidence=Evidence(client=ClientFacts(**client)))


TOLD = [
    ("bench_ended", measured(), measured(REAL, 1)),
    ("bench_ended", measured(), measured(REAL, None)),
    ("bench_ended", measured(), measured(None)),
    ("bench_ended", measured(), measured(REAL, -9)),
    ("bench_ended", measured(), measured({})),
    ("bench_ended", measured(), measured({**REAL, "output_throughput": None})),
    ("tokens_out", measured(), measured({**REAL, "output_throughput": 2 * REAL["output_throughput"]})),
    # Somebody else was streamed to from before the point until after it.
    ("alone", measured(samples=window(requests_total=32, generation_tokens_total=2058)),
     measured(samples=window(requests_total=32, generation_tokens_total=2059))),
    ("completed", measured(), measured({**REAL, "completed": 31})),
    ("completed", measured(), measured(prompts=33)),
    ("none_failed", measured(), measured({**REAL, "failed": 1})),
    ("tokens_out", measured({**REAL, "total_output_tokens": 2038}), measured({**REAL, "total_output_tokens": 2037})),
    ("tokens_out", measured({**REAL, "total_output_tokens": 2058}), measured({**REAL, "total_output_tokens": 2059})),
    ("in_flight", measured(), measured(concurrency=5)),
    ("in_flight", measured({**REAL, "queue_times": [0, 0, 1], "latencies": [1, 1, 1]}, concurrency=2),
     measured({**REAL, "queue_times": [0, 1, 2], "latencies": [1, 1, 1]}, concurrency=2)),
    ("window", measured({**REAL, "duration": 60.0}, min_window_s=60), measured({**REAL, "duration": 59.9},
                                                                             min_window_s=60)),
    ("window", measured({**REAL, "duration": 60.0}, prompts=8), measured({**REAL, "duration": 60.0}, prompts=7)),
    ("prefix_hits", measured(samples=window(prefix_cache_hits_total=20)),
     measured(samples=window(prefix_cache_hits_total=21))),
    ("alone", measured(samples=window(requests_total=32)), measured(samples=window(requests_total=33))),
    ("recomputed", measured(prompts=100, samples=window(preemptions_total=1)),
     measured(prompts=100, samples=window(preemptions_total=4))),
    # 8 requests of 15 s are 120 request-seconds, as are 4 under way for 30 s.
    ("littles_law", measured({**REAL, **LATENCIES}, samples=STEADY),
     measured({**REAL, "latencies": [18.0] * 8}, samples=STEADY)),
    ("littles_law", measured({**REAL, **LATENCIES}, samples=STEADY),
     measured({**REAL, "latencies": [12.0] * 8}, samples=STEADY)),
    # vLLM 0.26 leaves no times of each request, but their mean.
    ("littles_law", measured({**REAL, "latencies": None, "mean_e2el_ms": 15_000, "completed": 8}, samples=STEADY),
     measured({**REAL, "latencies": None, "mean_e2el_ms": 18_000, "completed": 8}, samples=STEADY)),
    ("client", seen(client=ClientFacts(cpu_share=0.79, loop_lag_p99_ms=0.1)),
     seen(client=ClientFacts(cpu_share=0.81, loop_lag_p99_ms=0.1))),
    ("client", requests_of(400, cpu_share=0.5, loop_lag_p99_ms=3.9),
     requests_of(400, cpu_share=0.5, loop_lag_p99_ms=4.0)),
    # 1,024 tokens at once every 150 ms, as ranks that decode in step send them: late by that burst, and no bottleneck.
    ("client", requests_of(150 * 1024, cpu_share=0.29, loop_lag_p99_ms=53.8),
     requests_of(150 * 1024, cpu_share=0.29, loop_lag_p99_ms=1600)),
    ("expected", seen(facts=ranks({}), version="0.33.0"), seen(facts=ranks({}), version="0.26.0")),
    ("expected", seen(facts=ranks({"engine_version": "0.32.0+cpu"}), version="0.32.0"),
     seen(log=Log(version="0.26.0"), version="0.32.0")),
    ("expected", seen(2, ASKED, facts=ranks(HUMMING, HUMMING)), seen(2, ASKED, facts=ranks(HUMMING, MARLIN))),
    ("expected", seen(2, ASKED, facts=ranks(HUMMING, HUMMING)),
     seen(2, ASKED, facts=ranks(HUMMING, {**HUMMING, "input_quant": ("float8e4m3",)}))),
    ("expected", seen(1, ASKED, facts=ranks(HUMMING)), seen(4, ASKED, facts=ranks(MARLIN))),  # one is enough to refute
    ("expected", seen(1, Expect(moe_backend="marlin"), facts=ranks(MARLIN)),
     seen(1, Expect(moe_backend="marlin"), facts=ranks({"moe_backend": ("humming", "marlin")}))),
    ("expected", seen(1, Expect(moe_backend="marlin"), facts=ranks(MARLIN)),
     seen(1, Expect(moe_backend="marlin"), facts=ranks({"moe_backend": ()}))),  # a model without experts
    ("expected", seen(1, Expect(kv_cache_dtype="fp8"), facts=ranks({"kv_cache_dtype": ("fp8_ds_mla",)})),
     seen(1, Expect(kv_cache_dtype="fp8_ds_mla"), facts=ranks({"kv_cache_dtype": ("fp8",)}))),
    ("expected", seen(1, Expect(attention_backend="flash_attn"), facts=ranks(SEVERAL)),
     seen(1, Expect(attention_backend="FLASH"), facts=ranks(SEVERAL))),
    ("expected", seen(1, Expect(moe_backend="MARLIN"), log=Log(moe_backend=("marlin",))),
     seen(1, Expect(moe_backend="humming"), log=Log(moe_backend=("marlin",)))),
    ("expected", seen(1, Expect(moe_backend="marlin"), facts=ranks(MARLIN)),
     seen(1, Expect(moe_backend="marlin"), facts=ranks(MARLIN), log=Log(moe_backend=("humming",)))),
    ("environment", seen(2, variables=QUANT | {"A": "b"}, facts=ranks({"environment": QUANT}, {"environment": QUANT})),
     seen(2, variables=QUANT, facts=ranks({"environment": QUANT}, {}))),
    ("environment", seen(variables=QUANT, facts=ranks({"environment": QUANT | {"VLLM_MORE": "1"}})),
     seen(variables=QUANT, facts=ranks({"environment": dict.fromkeys(QUANT, "other")}))),
    ("binding", seen(audit=Audit(verdict=True)), seen(audit=Audit(verdict=False, findings=("rank 1 roams",)))),
    ("compiled", seen(compiled=(), log=WATCHED), seen(compiled=("a kernel",), log=WATCHED)),
    ("compiled", seen(compiled=(), log=msgspec.structs.replace(WATCHED, compiled=("early",), verbose=True)),
     seen(compiled=("a kernel",), log=Log(version="0.33.0", known=True))),
    ("throttled", seen(2, facts=ranks(on_gpu(0), on_gpu(1)), looks=(look(0), look(1))),
     seen(2, facts=ranks(on_gpu(0), on_gpu(1)), looks=(look(0), look(1), look(1, 0x20)))),
    ("throttled", seen(looks=(look(0, 0x8C),)), seen(looks=(look(0, 0x40),))),
    ("outputs", seen(outputs=some_outputs("Paris", "100 degrees", *[" ! " * 9] * 2)),
     seen(outputs=some_outputs("Paris", "100 degrees", *[" ! " * 9] * 3))),
]


@pytest.mark.parametrize(("code", "good", "bad"), TOLD, ids=[f"{code}-{number}" for number, (code, *_) in
                                                             enumerate(TOLD)])
def test_each_rule_tells_the_good_from_the_bad(code: str, good: Measured, bad: Measured) -> None:
    assert (outcome(code, good), outcome(code, bad)) == ("verified", "refuted")
    assert code in validity.judge(bad).reasons
    assert validity.judge(bad).details[code]
    assert code not in {*validity.judge(good).reasons, *validity.judge(good).unknown, *validity.judge(good).details}


def test_each_rule_has_an_example_of_either() -> None:
    assert {code for code, *_ in TOLD} == set(validity.RULES)


@pytest.mark.parametrize(("code", "unclear"), [
    ("prefix_hits", measured(samples=())), ("prefix_hits", measured(samples=window()[:1])),
    ("prefix_hits", measured(samples=window(prefix_cache_queries_total=0))),
    ("prefix_hits", measured(samples=(Sample(time=1, scrape_ms=1), Sample(time=2, scrape_ms=1)))),
    # The engine was started anew within the window, and counts from 0: be it seen at the end, or in between.
    *((code, measured(samples=window(**{counter: -1})))
      for code, counter in (("prefix_hits", "prefix_cache_hits_total"), ("alone", "requests_total"),
                            ("recomputed", "preemptions_total"))),
    ("recomputed", measured(samples=(some_sample(), some_sample(preemptions_total=50), some_sample()))),
    ("alone", measured(samples=())),
    ("recomputed", measured(samples=())),
    ("recomputed", measured(samples=(Sample(time=1, scrape_ms=1), Sample(time=2, scrape_ms=1)))),
    # 2 % lies between the least and the most that they can have cost.
    ("recomputed", measured(prompts=100, samples=window(preemptions_total=3))),
    ("in_flight", measured({**REAL, "queue_times": []})), ("in_flight", measured({**REAL, "queue_times": [0.0]})),
    ("in_flight", measured({**REAL, "latencies": None})),
    ("in_flight", measured({**REAL, "latencies": [None] * 32})), ("window", measured({**REAL, "duration": 10**400})),
    ("littles_law", measured({**REAL, **LATENCIES}, samples=STEADY[:19])),
    ("littles_law", measured({**REAL, **LATENCIES, "latencies": [], "mean_e2el_ms": None}, samples=STEADY)),
    ("littles_law", measured({**REAL, **LATENCIES}, samples=tuple(
        Sample(time=number, scrape_ms=1) for number in range(30)))),
    ("littles_law", measured({**REAL, "latencies": [18.0] * 8}, samples=STEADY, evidence=Evidence(facts=ranks({})))),
    ("client", measured()), ("client", seen(client=ClientFacts(cpu_share=None, loop_lag_p99_ms=1))),
    ("client", seen(client=ClientFacts(cpu_share=0.1, loop_lag_p99_ms=None))),
    # The median request takes 163 ms: an idle loop may be later than a hundredth of that.
    ("client", seen(client=ClientFacts(cpu_share=0.1, loop_lag_p99_ms=1.8))),
    ("client", seen(client=ClientFacts(cpu_share=0.9, loop_lag_p99_ms=9), facts=ranks({}))),  # on the same CPUs
    ("client", measured({**REAL, "median_e2el_ms": None},
                        evidence=Evidence(client=ClientFacts(cpu_share=0.1, loop_lag_p99_ms=1)))),
    ("expected", seen(version="0.33.0")), ("expected", seen(expect=ASKED)),
    ("expected", seen(2, ASKED, facts=(*ranks(HUMMING), *ranks(HUMMING)))),  # the same rank twice
    ("expected", seen(2, ASKED, facts=ranks(HUMMING))),  # the second rank says nothing
    ("expected", seen(2, ASKED, facts=ranks(HUMMING, {"moe_backend": None, "input_quant": None}))),
    # The log's line is the first rank's: no proof for two.
    ("expected", seen(2, Expect(moe_backend="humming"), log=Log(moe_backend=("humming",)))),
    ("expected", seen(1, Expect(input_quant="none"), log=Log(moe_backend=("humming",)))),
    ("expected", seen(2, ASKED, facts=(*ranks(HUMMING), some_facts(roles=("api_server",), **HUMMING)))),
    ("environment", seen(variables=QUANT)), ("environment", seen(2, variables=QUANT,
                                                                 facts=ranks({"environment": QUANT}))),
    ("binding", measured()), ("binding", seen(audit=Audit(findings=("could not be looked at",)))),
    ("compiled", measured()), ("compiled", seen(compiled=None, log=Log(version="0.99.0"))),
    ("compiled", seen(compiled=(), log=Log(version="0.33.0", known=True))),
    ("compiled", seen(compiled=(), log=msgspec.structs.replace(WATCHED, compiled=("early",)))),
    ("throttled", measured()), ("throttled", seen(facts=ranks(on_gpu()))),
    ("throttled", seen(2, facts=ranks(on_gpu(0), on_gpu(1)), looks=(look(0),))),
    ("throttled", seen(facts=ranks(on_gpu(0)), looks=(look(1),))),
    ("throttled", seen(2, facts=ranks({}), looks=())),  # one rank is on a CPU, of the other nothing is known
    ("throttled", seen(facts=ranks({"device_type": None}))),
    ("outputs", measured()),
])
def test_what_was_not_seen_is_unknown_and_never_true(code: str, unclear: Measured) -> None:
    assert outcome(code, unclear) == "unknown"
    assert code in validity.judge(unclear).unknown
    assert validity.judge(unclear).details[code]


@pytest.mark.parametrize(("code", "elsewhere", "why"), [
    ("expected", measured(), "the recipe expects nothing"),
    ("environment", seen(variables={"HF_HOME": "x"}), "no such variable is set"),
    ("client", measured({**REAL, "time_scale": 150}), "in virtual time no client sends the requests"),
    ("littles_law", measured({**REAL, **LATENCIES, "time_scale": 150}, samples=STEADY),
     "the samples are not by the virtual clock"),
    ("binding", seen(audit=Audit(not_applicable="no GPU is visible here")), "no GPU is visible here"),
    ("throttled", seen(2, facts=ranks({}, {})), "the engine computes on no GPU"),
    ("outputs", measured(random_weights=True, evidence=Evidence(outputs=some_outputs("", "", ""))),
     "the model's weights are random"),
])
def test_what_means_nothing_is_neither_unknown_nor_true(code: str, elsewhere: Measured, why: str) -> None:
    judgement = validity.judge(elsewhere)
    assert code in judgement.not_applicable
    assert code not in {*judgement.reasons, *judgement.unknown}
    assert judgement.details[code] == why


def test_a_real_result_in_which_all_went_well_breaks_no_rule() -> None:
    assert validity.judge(measured()).reasons == ()


def test_a_benchmark_whose_every_request_failed_is_invalid_although_it_exits_0() -> None:
    judgement = validity.judge(measured(ALL_FAILED, prompts=4, osl=64))
    assert judgement.reasons == ("completed", "none_failed", "tokens_out", "in_flight", "window")
    assert judgement.details["completed"] == "0 requests were answered, 4 should have"


@pytest.mark.parametrize(("code", "key"), [
    ("completed", "completed"), ("none_failed", "failed"), ("tokens_out", "total_output_tokens")])
@pytest.mark.parametrize("value", [None, "32", True, [], "missing"])
def test_a_number_that_the_benchmark_does_not_give_is_unknown(code: str, key: str, value: object) -> None:
    result = {name: item for name, item in REAL.items() if name != key}
    if value != "missing":
        result[key] = value
    judgement = validity.judge(measured(result))
    assert judgement.reasons == ()
    assert code in judgement.unknown


def test_without_a_result_the_row_is_refuted_and_the_rest_is_unknown() -> None:
    judgement = validity.judge(measured(None, 0, samples=()))
    assert judgement.reasons == ("bench_ended",)
    assert {*judgement.unknown, *judgement.not_applicable} == set(validity.RULES) - {"bench_ended"}


def test_every_finding_names_its_rank() -> None:
    rank = some_facts(data_parallel_rank=3, tensor_parallel_rank=1, **MARLIN)
    details = validity.judge(seen(expect=ASKED, variables=QUANT, facts=(rank,))).details
    assert details["expected"] == ("DP rank 3, TP rank 1 has moe_backend marlin, not humming; "
                                   "DP rank 3, TP rank 1 has input_quant none, not float8e4m3 group 128")
    assert details["environment"] == "DP rank 3, TP rank 1 has no VLLM_HUMMING_INPUT_QUANT_CONFIG"


def test_of_many_findings_the_first_are_told() -> None:
    details = validity.judge(seen(8, Expect(moe_backend="humming"), facts=ranks(*[MARLIN] * 8))).details
    assert details["expected"].count("DP rank") == 3
    assert details["expected"].endswith("(and 5 more), not humming")


def test_every_rule_says_what_it_means_beginning_with_its_code() -> None:
    for code, rule in validity.RULES.items():
        assert str(rule.__doc__).startswith(f"``{code}``: ")


def test_a_window_that_is_long_enough_only_for_a_recipe_that_asks_for_less_says_so() -> None:
    judgement = validity.judge(measured({**REAL, "duration": 20.0}, min_window_s=10))
    assert "window" in judgement.not_applicable
    assert "bench.min_window" in judgement.details["window"]
    assert "window" in validity.judge(measured({**REAL, "duration": 9.0}, min_window_s=10)).reasons
