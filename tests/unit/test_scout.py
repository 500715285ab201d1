"""What a scout's samples tell, held against whole runs on the simulated core."""

from __future__ import annotations

from typing import Any

import pytest

from isambard_serve import scout
from isambard_serve.records import Sample
from isambard_serve.search import Scout, Space
from isambard_serve.sim.load import ClosedLoop, Load
from isambard_serve.sim.scheduler import Engine, Limits

SPACE = Space(isl=1024, osl=1024, start=8, most=None, gpus=1, prompts_per_concurrency=2, repeats=1, budget_gpu_s=1e9)
ROOMY = Limits(ranks=2, kv_blocks=100_000, block_size=16, max_num_seqs=1024, max_num_batched_tokens=8192)
TIGHT = Limits(ranks=1, kv_blocks=64 * 128, block_size=16, max_num_seqs=1024, max_num_batched_tokens=8192)  # 64 of 2048


def look(concurrency: int, prompt: int = 1024, output: int = 1024, requests: int | None = None) -> Scout:
    return Scout(concurrency=concurrency, requests=requests or 2 * concurrency, prompt_tokens=prompt,
                 output_tokens=output)


def core(limits: Limits) -> Engine:
    return Engine(limits, lambda batch, busiest, context: 0.02 + batch * 30e-6 + context * 2e-9)


def taken(limits: Limits, action: Scout, *, to_the_end: bool = False) -> list[Sample]:
    """A sample each second of a load on a fresh engine, until the scout has seen enough, or to the end."""
    engine = core(limits)
    samples = [read(engine)]
    loop = ClosedLoop(Load(prompts=action.requests, concurrency=action.concurrency, input_tokens=action.prompt_tokens,
                           output_tokens=action.output_tokens), engine)
    while not loop.done and (to_the_end or not scout.enough(scout.active(samples), action)):
        until = samples[-1].time + 1.0
        while not loop.done and engine.next_event_s is not None and engine.next_event_s <= until:
            engine.step()
        engine.now = engine.now if loop.done else max(engine.now, until)
        samples.append(read(engine))
    return samples


def read(engine: Engine) -> Sample:
    ranks = engine.ranks
    return some(engine.now, running=sum(len(rank.running) for rank in ranks),
                waiting=sum(len(rank.waiting) for rank in ranks), kv_cache_usage=max(rank.kv_usage for rank in ranks),
                preemptions_total=sum(rank.statistics.preemptions for rank in ranks),
                prompt_tokens_total=sum(rank.statistics.prompt_tokens for rank in ranks),
                generation_tokens_total=sum(rank.statistics.generation_tokens for rank in ranks))


def some(time: float, **values: Any) -> Sample:
    return Sample(time=time, scrape_ms=1.0, **values)


@pytest.mark.parametrize("concurrency", [32, 128, 512, 1024])
def test_a_short_window_foretells_a_whole_run_within_three_percent(concurrency: int) -> None:
    action = look(concurrency)
    window, whole = taken(ROOMY, action), taken(ROOMY, action, to_the_end=True)
    foretold = scout.step(window, action, SPACE, gpu_s=1.0)
    assert foretold is not None
    assert foretold.output_tok_s == pytest.approx(2 * concurrency * 1024 / whole[-1].time, rel=0.03)
    assert window[-1].time < whole[-1].time / 2


def test_the_kv_cache_is_read_at_full_length() -> None:
    action = look(32, prompt=2048 - 32, output=32, requests=640)
    found = scout.step(taken(TIGHT, action), action, SPACE, gpu_s=1.0)
    assert found is not None
    assert found.kv_cache_usage == pytest.approx(32 / 64, rel=0.02)


def test_requests_that_wait_for_room_all_the_while_are_seen_and_a_moment_between_two_waves_is_not() -> None:
    crowded, roomy = look(96, prompt=2048 - 32, output=32, requests=960), look(32)
    found = scout.step(taken(TIGHT, crowded), crowded, SPACE, gpu_s=1.0)
    assert found is not None
    assert found.waiting
    assert found.running <= 64
    assert not scout.seen(scout.active(taken(ROOMY, roomy, to_the_end=True)))[1]


def test_a_load_that_ends_before_it_is_steady_counts_as_a_whole() -> None:
    samples = [some(0.0, running=0.0, waiting=0.0, prompt_tokens_total=0.0, generation_tokens_total=0.0),
               some(1.0, running=4.0, waiting=0.0, prompt_tokens_total=400.0, generation_tokens_total=8.0),
               some(2.0, running=0.0, waiting=0.0, prompt_tokens_total=400.0, generation_tokens_total=100.0)]
    found = scout.step(samples, look(4, prompt=100, output=25), SPACE, gpu_s=2.0)
    assert found is not None
    assert found.output_tok_s == 50.0


def test_what_the_engine_ran_nothing_of_is_no_step() -> None:
    assert scout.step([some(0.0, running=0.0), some(1.0, running=0.0)], look(4), SPACE, gpu_s=1.0) is None
    assert scout.step([], look(4), SPACE, gpu_s=1.0) is None
    assert not scout.enough([], look(4))


def test_an_engine_with_a_clock_of_its_own_is_timed_by_it() -> None:
    samples = [some(0.0, engine_time_s=100.0), some(1.0, engine_time_s=250.0)]
    assert scout.elapsed_s(samples, 1.0) == 150.0
    assert scout.elapsed_s([some(0.0), some(1.0)], 1.2) == 1.2
