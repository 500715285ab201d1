"""Step times and KV caches: what must hold whatever the constants are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isambard_serve.sim import fitted
from isambard_serve.sim.fitted import DEEPSEEK_V4_FLASH, GENERIC, Shape, kv_tokens, step_time_s

TP4 = Shape(DEEPSEEK_V4_FLASH, tensor_parallel=4, moe_backend="marlin")
DP4 = Shape(DEEPSEEK_V4_FLASH, data_parallel=4, moe_backend="marlin", gpu_memory_utilization=0.95)
SHAPES = [TP4, DP4, Shape(GENERIC)]


@pytest.mark.parametrize("shape", SHAPES)
def test_more_of_anything_takes_longer(shape: Shape) -> None:
    alone = step_time_s(shape, 512, 128, 100_000)
    assert step_time_s(shape, 512, 256, 100_000) > alone
    assert step_time_s(shape, 512, 128, 200_000) > alone
    assert step_time_s(shape, 1024, 128, 100_000) >= alone


@pytest.mark.parametrize("shape", SHAPES)
def test_a_larger_batch_gives_more_tokens_a_second(shape: Shape) -> None:
    rates = [batch / step_time_s(shape, batch, batch // shape.data_parallel, 0) for batch in (64, 256, 1024, 4096)]
    assert rates == sorted(rates)


def test_data_parallel_attention_and_humming_each_make_a_step_shorter() -> None:
    tp4 = step_time_s(TP4, 2048, 2048, 0)
    dp4 = step_time_s(DP4, 2048, 512, 0)
    assert step_time_s(replace(DP4, moe_backend="humming"), 2048, 512, 0) < dp4 < tp4


def test_an_unknown_moe_backend_costs_what_the_first_one_does() -> None:
    assert step_time_s(replace(TP4, moe_backend="new"), 64, 64, 0) == step_time_s(TP4, 64, 64, 0)


def test_each_rank_has_a_kv_cache_of_its_own_and_tensor_parallelism_copies_one() -> None:
    assert kv_tokens(DP4) * DP4.data_parallel > kv_tokens(TP4) > kv_tokens(DP4)


def test_more_memory_holds_more_tokens() -> None:
    assert kv_tokens(TP4) < kv_tokens(replace(TP4, gpu_memory_utilization=0.95))


def test_weights_that_do_not_fit_leave_no_room() -> None:
    assert kv_tokens(Shape(DEEPSEEK_V4_FLASH)) == 0


@pytest.mark.parametrize(("name", "model"), [
    ("deepseek-ai/DeepSeek-V4-Flash", DEEPSEEK_V4_FLASH),
    ("/models/deepseek-v4-flash", DEEPSEEK_V4_FLASH),
    ("./tiny-model", GENERIC),
])
def test_a_model_is_known_by_its_name(name: str, model: fitted.Model) -> None:
    assert fitted.model_for(name) is model
