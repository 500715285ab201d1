"""The KV cache's pages against what vLLM 0.26 logged of them on two H200s: DeepSeek-V4-Flash's first 11 layers."""

from __future__ import annotations

import pytest

from isambard_serve import kvpages
from isambard_serve.kvpages import Group
from tests.unit.test_modelconfig import GIB, flash, model

AVAILABLE = 104.53 * GIB        # "Available KV cache memory: 104.53 GiB"


def test_the_engines_own_figures_come_out() -> None:
    # "GPU KV cache size: 1,155,527 tokens", "Maximum concurrency for 4,096 tokens per request: 282.11x"
    pages = kvpages.pages(flash(layers=11), tensor_parallel=2, block_size=256)
    assert pages.engines_concurrency(AVAILABLE, 4096, in_flight=8192) == pytest.approx(282.11, rel=1e-4)


def test_a_short_sequence_holds_as_many_blocks_as_the_cache_usage_said() -> None:
    # "Running: 447 reqs, GPU KV cache usage: 3.2%", sequences of 512 tokens and 0 to 256 behind them. The usage is
    # rounded to a tenth of a per cent.
    pages = kvpages.pages(flash(layers=11), tensor_parallel=2, block_size=256)
    assert pages.held(640) * 447 / pages.blocks(AVAILABLE) == pytest.approx(0.032, rel=0.04)


def test_entries_times_their_bytes_say_far_too_little_of_a_short_sequence() -> None:
    pages = kvpages.pages(flash(layers=11), tensor_parallel=2, block_size=256)
    entries = sum(each.entries(640) * each.entry_bytes * each.layers for each in flash(layers=11).attention)
    assert pages.held(640) * pages.block_bytes > 5 * entries


def test_the_engines_maximum_concurrency_is_far_below_what_short_sequences_reach() -> None:
    pages = kvpages.pages(flash(layers=11), tensor_parallel=2, block_size=256)
    assert pages.blocks(AVAILABLE) / pages.held(640) > 40 * pages.engines_concurrency(AVAILABLE, 4096, 8192)


def test_a_latent_is_on_every_gpu_and_kv_heads_are_shared_out() -> None:
    for name, shared in (("deepseek-v3", True), ("qwen3-32b", False)):
        alone = kvpages.pages(model(name), 1, 64).block_bytes
        of_four = kvpages.pages(model(name), 4, 64).block_bytes
        assert alone == of_four * (1 if shared else 4)
    # 576 values in bf16, 61 layers; 2 × 8 heads × 128 in bf16, 64 layers.
    assert kvpages.pages(model("deepseek-v3"), 1, 1).block_bytes == 576 * 2 * 61
    assert kvpages.pages(model("qwen3-32b"), 1, 1).block_bytes == 2 * 8 * 128 * 2 * 64
    assert kvpages.pages(model("qwen3-32b"), 1, 1, entry_scale=0.5).block_bytes == 8 * 128 * 2 * 64


def test_a_longer_sequence_holds_more_and_a_window_no_more_than_itself() -> None:
    pages = kvpages.pages(flash(), 1, 256)
    held = [pages.held(tokens) for tokens in (300, 640, 2048, 100_000)]
    assert held == sorted(held)
    window = Group(block_size=8, window=128, page_bytes=1)
    assert window.blocks(1000) == window.blocks(100_000)
    assert pages.prefilling(1024) > 10 * pages.held(1024)


def test_no_memory_holds_nothing() -> None:
    assert kvpages.pages(flash(), 1, 256).blocks(-5.0) == 0
