"""What a step must do: more in it takes longer, parts add up, units are right, and the published ladder is told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from isambard_serve import roofline
from isambard_serve.roofline import (
    ACT,
    ATTENTION,
    BUCKETS,
    COMMS,
    COPIES,
    DENSE,
    IDLE,
    KV,
    MOE,
    NORM,
    SAMPLING,
    Rates,
    Shape,
    Step,
    critical_batch,
    expected,
    floors,
    work,
)
from isambard_serve.shipped import folder
from tests.unit.test_modelconfig import flash, model

GH200 = Rates(bf16_flop_s=583e12, fp8_flop_s=1166e12, hbm_byte_s=4e12, link_byte_s=450e9, memory_bytes=95 * 2**30)
MODELS = {"flash": flash(), **{name: model(name) for name in ("qwen3-32b", "qwen3-30b-a3b", "deepseek-v3")}}
TP4, DP4 = Shape(tensor_parallel=4, moe_backend="marlin"), Shape(data_parallel=4, moe_backend="marlin")
EACH = [(name, shape) for name in MODELS for shape in (TP4, DP4, Shape())]


@pytest.mark.parametrize(("name", "shape"), EACH)
def test_more_of_anything_takes_no_less_in_any_bucket(name: str, shape: Shape) -> None:
    one = Step(decoding=256, context=1000, prefill=512, prefill_context=500)
    less = floors(MODELS[name], shape, GH200, one)
    for more in (replace(one, decoding=300), replace(one, context=2000), replace(one, prefill=600),
                 replace(one, prefill_context=600)):
        greater = floors(MODELS[name], shape, GH200, more)
        assert all(greater[bucket] >= less[bucket] for bucket in BUCKETS)
        assert sum(greater.values()) > sum(less.values()) or more.tokens == one.tokens


@pytest.mark.parametrize(("name", "shape"), EACH)
def test_a_larger_batch_gives_more_tokens_a_second(name: str, shape: Shape) -> None:
    speeds = [batch / sum(floors(MODELS[name], shape, GH200, Step(decoding=batch, context=1000)).values())
              for batch in (16, 64, 256, 1024, 4096)]
    assert speeds == sorted(speeds)


@pytest.mark.parametrize("name", MODELS)
def test_operations_of_the_products_add_up_to_two_a_weight_that_a_token_meets(name: str) -> None:
    found = MODELS[name]
    done = work(found, Shape(), Step(decoding=1, context=1))
    experts = found.experts
    met = sum(each.weights for each in found.matrices) + (
        3 * experts.layers * experts.top_k * found.hidden * experts.intermediate if experts else 0)
    flop = sum(done[bucket].bf16_flop + done[bucket].fp8_flop for bucket in (MOE, DENSE))
    assert flop == pytest.approx(2 * met)


@pytest.mark.parametrize("name", MODELS)
def test_a_full_step_reads_every_weight_once(name: str) -> None:
    found = MODELS[name]
    done = work(found, Shape(), Step(decoding=10_000, context=1))
    embedding = found.vocabulary * found.hidden * 2
    assert done[MOE].memory_bytes + done[DENSE].memory_bytes == pytest.approx(
        found.weight_bytes(1, 1) - found.tables_bytes - embedding, rel=1e-6)


@pytest.mark.parametrize("name", ["qwen3-32b", "qwen3-30b-a3b"])
def test_four_gpus_do_together_what_one_does_alone(name: str) -> None:
    step = Step(decoding=512, context=1000)
    alone, shared = work(MODELS[name], Shape(), step), work(MODELS[name], TP4, step)
    routers = sum(each.weights for each in MODELS[name].matrices if not each.sharded) * 2 * 512
    assert 4 * shared[DENSE].bf16_flop == pytest.approx(alone[DENSE].bf16_flop + 3 * routers)
    assert 4 * shared[MOE].bf16_flop == pytest.approx(alone[MOE].bf16_flop)
    assert 4 * shared[ATTENTION].memory_bytes == pytest.approx(alone[ATTENTION].memory_bytes)
    assert alone[COMMS].link_bytes == 0


def test_a_floor_is_the_greater_of_operations_and_bytes_in_seconds() -> None:
    done = roofline.Work(bf16_flop=583e12, fp8_flop=1166e12, memory_bytes=4e12, link_bytes=0)
    assert done.floor_s(GH200) == 2.0
    assert roofline.Work(memory_bytes=12e12).floor_s(GH200) == 3.0
    assert roofline.Work(link_bytes=4500e9).floor_s(GH200) == 10.0


def test_tensor_parallelism_copies_the_latent_and_all_that_a_rank_does_alone_and_data_parallelism_shares_it() -> None:
    step = Step(decoding=2048, context=1536)
    tensor, data = (floors(flash(), shape, GH200, step) for shape in (TP4, DP4))
    # Attention pads 16 heads to 64: each of four GPUs does all of it.
    for bucket in (ATTENTION, KV, NORM, SAMPLING):
        assert tensor[bucket] == pytest.approx(4 * data[bucket])
    assert tensor[MOE] == data[MOE]
    assert tensor[COMMS] > 1.9 * data[COMMS]
    assert tensor[COPIES] == tensor[IDLE] == 0


def test_the_published_floors_of_a_step_come_out() -> None:
    # Published of dp4-humming at concurrency 2048: comms about 3 ms at wire rate; of act+quant about 2 ms is moving
    # data; the MoE bucket is at 30 % of its roof.
    found = floors(flash(), replace(DP4, moe_backend="humming"), GH200, Step(decoding=2048, context=1536))
    assert found[COMMS] == pytest.approx(3e-3, rel=0.2)
    assert found[ACT] == pytest.approx(2e-3, rel=0.4)


def test_the_critical_batch_is_the_published_one_in_bf16_and_twice_that_in_fp8() -> None:
    # Published by pen and paper: about 1,300. This counts the weights' scales, and all 256 experts as met.
    bf16 = critical_batch(flash(), DP4, GH200)
    assert bf16 == pytest.approx(1300, rel=0.3)
    assert bf16
    assert critical_batch(flash(), replace(DP4, moe_backend="humming"), GH200) == pytest.approx(2 * bf16)
    assert critical_batch(model("qwen3-32b"), TP4, GH200) is None
    for batch, bound in ((bf16 / 2, "bytes"), (bf16 * 2, "operations")):
        done = work(flash(), DP4, Step(decoding=batch, context=1))[MOE]
        assert (done.bf16_flop / GH200.bf16_flop_s > done.memory_bytes / GH200.hbm_byte_s) is (bound == "operations")


def test_humming_takes_marlins_time_over_what_was_measured_between_them() -> None:
    step = Step(decoding=2048, context=1536)
    marlin = expected(flash(), DP4, GH200, step)
    humming = expected(flash(), replace(DP4, moe_backend="humming"), GH200, step)
    assert marlin[MOE] / humming[MOE] == pytest.approx(2.03)
    assert {name: value for name, value in marlin.items() if name != MOE} == {
        name: value for name, value in humming.items() if name != MOE}


@pytest.mark.parametrize(("tokens", "ratio"), [(1, 1.51), (64, 1.51), (128, 1.615), (4096, 3.09), (1_000_000, 2.86)])
def test_between_measured_batches_the_ratio_is_drawn_straight_and_beyond_them_kept(tokens: float, ratio: float) -> None:
    assert roofline.humming_over_marlin(tokens) == pytest.approx(ratio, rel=1e-3)


def test_the_efficiency_is_one_factor_between_a_fifth_and_one() -> None:
    assert 0.2 <= roofline.EFFICIENCY <= 1
    times, least = (function(flash(), DP4, GH200, Step(decoding=64, context=9)) for function in (expected, floors))
    assert times == {name: value / roofline.EFFICIENCY for name, value in least.items()}


def test_the_shipped_config_is_that_of_43_layers() -> None:
    assert json.loads((folder("models") / "DeepSeek-V4-Flash.json").read_text())["num_hidden_layers"] == 43
