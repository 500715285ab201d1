"""The simulated engine's core: what continuous batching must keep, and the published figures."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from isambard_serve.sim import fitted, settings
from isambard_serve.sim.load import ClosedLoop, Load
from isambard_serve.sim.scheduler import Engine, Limits, Request

SMALL = Limits(ranks=2, kv_blocks=24, block_size=4, max_num_seqs=8, max_num_batched_tokens=16)
FLAGS = "deepseek-ai/DeepSeek-V4-Flash --max-model-len 128000 --max-num-batched-tokens 8192 --moe-backend"
TP4 = f"{FLAGS} marlin --tensor-parallel-size 4 --max-num-seqs 2048 --gpu-memory-utilization 0.92"
DP4 = f"{FLAGS} marlin --data-parallel-size 4 --max-num-seqs 1024 --gpu-memory-utilization 0.95"
DP4_HUMMING = DP4.replace("marlin", "humming")


def engine(limits: Limits = SMALL) -> Engine:
    return Engine(limits, lambda batch, busiest, context: 0.01 + 0.001 * batch + 0.001 * busiest + 1e-6 * context)


def load(**changes: int) -> Load:
    return msgspec.structs.replace(Load(prompts=40, concurrency=12, input_tokens=10, output_tokens=20), **changes)


def measured(flags: str, concurrency: int) -> tuple[float, float]:
    """Output tok/s of a closed loop of 2 × ``concurrency`` prompts of 1024/1024, and the KV cache's peak."""
    asked = settings.parse(flags.split(), {})
    sim = Engine(asked.limits, lambda *step: fitted.step_time_s(asked.shape, *step))
    peak = 0.0

    def observe(*_: float) -> None:
        nonlocal peak
        peak = max(peak, *(rank.kv_usage for rank in sim.ranks))

    sim.observers.append(observe)
    loop = ClosedLoop(load(prompts=2 * concurrency, concurrency=concurrency, input_tokens=1024, output_tokens=1024),
                      sim)
    loop.run()
    assert all(outcome.output_tokens == 1024 for outcome in loop.outcomes)
    return 2 * concurrency * 1024 / sim.now, peak


def test_tp4_gives_the_published_figure_with_its_kv_cache_full_and_no_more_beyond() -> None:
    rates = [measured(TP4, concurrency)[0] for concurrency in (256, 512, 1024)]
    rate, peak = measured(TP4, 2048)
    assert [*rates, rate] == sorted([*rates, rate])
    assert rate == pytest.approx(5856, rel=0.1)
    assert peak > 0.99
    assert measured(TP4, 3072)[0] < rate * 1.02


def test_dp4_gives_the_published_figure_at_its_knee_and_less_beyond() -> None:
    rates = [measured(DP4, concurrency)[0] for concurrency in (512, 1024, 2048)]
    rate, peak = measured(DP4, 2752)
    assert [*rates, rate] == sorted([*rates, rate])
    assert rate == pytest.approx(12_802, rel=0.1)
    assert 0.95 < peak <= 1
    assert measured(DP4, 4096)[0] < rate


def test_humming_gives_forty_percent_more() -> None:
    assert measured(DP4_HUMMING, 2752)[0] == pytest.approx(1.4 * 12_802, rel=0.1)


def test_every_request_is_answered_in_full_though_the_kv_cache_is_small() -> None:
    sim = engine()
    loop = ClosedLoop(load(), sim)
    while not loop.done:
        sim.step()
        assert all(0 <= rank.kv_usage <= 1 for rank in sim.ranks)
        assert all(len(rank.running) <= SMALL.max_num_seqs for rank in sim.ranks)
    assert sorted(outcome.index for outcome in loop.outcomes) == list(range(40))
    assert all(outcome.output_tokens == 20 for outcome in loop.outcomes)
    assert sum(rank.statistics.preemptions for rank in sim.ranks) > 0
    assert sum(rank.statistics.generation_tokens for rank in sim.ranks) == 40 * 20
    assert sum(rank.statistics.prompt_tokens for rank in sim.ranks) == 40 * 10


@pytest.mark.parametrize("seed", range(20))
def test_requests_of_any_size_leave_an_empty_engine_behind(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    sim = engine(replace(SMALL, preempt_every=chance.choice([0, 1, 5])))
    requests = [Request(prompt_tokens=chance.randint(1, 60), output_tokens=chance.randint(1, 30), key=index)
                for index in range(60)]
    for request in requests:
        sim.submit(request)
        if chance.random() < 0.3:
            sim.advance(sim.now + chance.random() / 10)
        if chance.random() < 0.2:
            sim.abort(chance.choice(requests[: requests.index(request) + 1]))
    while sim.in_flight:
        sim.advance(sim.now + 1)
    assert all(request.generated == request.output_tokens for request in requests if request.reason == "length")
    assert {request.reason for request in requests} <= {"length", "abort"}
    assert [(rank.used_blocks, rank.decoding, rank.context) for rank in sim.ranks] == [(0, 0, 0)] * 2
    assert sim.next_event_s is None


def test_blocks_in_use_are_those_that_the_running_sequences_fill() -> None:
    sim = engine(replace(SMALL, ranks=1, kv_blocks=400))
    requests = [Request(prompt_tokens=3 + index, output_tokens=50, key=index) for index in range(5)]
    for request in requests:
        sim.submit(request)
    for _ in range(4):
        sim.step()
    for _ in range(30):
        # The newest token's entry is computed in the step in flight.
        computed = [request.prompt_tokens + sim.tokens_of(request) for request in requests]
        assert sim.ranks[0].used_blocks == sum(-(-tokens // 4) for tokens in computed)
        assert sim.ranks[0].context == sum(computed)
        sim.step()


def test_the_same_load_gives_the_same_times() -> None:
    def outcomes() -> list[object]:
        loop = ClosedLoop(load(), engine())
        loop.run()
        return [loop.outcomes, loop.pace]

    assert outcomes() == outcomes()


def test_it_does_not_matter_how_often_the_clock_is_looked_at() -> None:
    at_once, in_bits = engine(), engine()
    first, second = ClosedLoop(load(), at_once), ClosedLoop(load(), in_bits)
    at_once.advance(100)
    while in_bits.now < 100:
        in_bits.advance(in_bits.now + 0.0137)
    assert first.done
    assert first.outcomes == second.outcomes


def test_time_only_goes_forward_and_each_token_comes_after_the_one_before() -> None:
    sim = engine()
    loop = ClosedLoop(load(), sim)
    loop.run()
    for outcome in loop.outcomes:
        assert 0 <= outcome.sent_s < outcome.first_token_s < outcome.end_s <= sim.now
    gaps = sum(count for _, count in loop.pace.gaps)
    assert gaps == 40 * 19
    total_s = sum(outcome.end_s - outcome.first_token_s for outcome in loop.outcomes)
    assert sum(gap_s * count for gap_s, count in loop.pace.gaps) == pytest.approx(total_s, rel=1e-3)


def test_as_many_requests_are_in_flight_as_the_load_asks_for() -> None:
    sim = engine(replace(SMALL, kv_blocks=400))
    ClosedLoop(load(concurrency=7), sim)
    sim.advance(0.5)
    assert sim.in_flight == 7
    assert {len(rank.running) + len(rank.waiting) for rank in sim.ranks} == {3, 4}


def test_a_prompt_that_comes_again_is_found_but_for_its_last_block() -> None:
    sim = engine(replace(SMALL, ranks=1, kv_blocks=400))
    for _ in range(2):
        ClosedLoop(load(seed=3), sim).run()
    found = sim.ranks[0].statistics
    assert (found.prefix_queries, found.prefix_hits) == (2 * 40 * 10, 40 * 8)
    assert found.prompt_tokens_cached == found.prefix_hits
    ClosedLoop(load(seed=4), sim).run()
    assert found.prefix_hits == 40 * 8


def test_without_prefix_caching_nothing_is_found() -> None:
    sim = engine(replace(SMALL, ranks=1, kv_blocks=400, prefix_caching=False))
    for _ in range(2):
        ClosedLoop(load(), sim).run()
    assert sim.ranks[0].statistics.prefix_queries == 0


def test_old_prompts_are_forgotten_once_the_cache_is_full() -> None:
    sim = engine(replace(SMALL, ranks=1))
    for _ in range(2):
        ClosedLoop(load(prompts=40, concurrency=1), sim).run()
    assert sim.ranks[0].statistics.prefix_hits == 0


def test_a_prompt_longer_than_a_step_takes_several() -> None:
    sim = engine(replace(SMALL, ranks=1))
    request = Request(prompt_tokens=40, output_tokens=1, key=0)
    sim.submit(request)
    sim.step()
    sim.step()
    assert request.first_token_s is None
    sim.step()
    assert (request.generated, request.reason) == (1, "length")


def test_a_request_that_could_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        engine().submit(Request(prompt_tokens=90, output_tokens=7, key=0))


def test_a_cancelled_load_leaves_nothing_behind() -> None:
    sim = engine()
    loop = ClosedLoop(load(), sim)
    sim.advance(0.3)
    loop.cancel()
    assert sim.next_event_s is None or sim.next_event_s > sim.now
    sim.advance(sim.now + 1)
    assert (sim.in_flight, [rank.used_blocks for rank in sim.ranks]) == (0, [0, 0])
    assert sim.observers == []
