"""The search for the knee, on engines whose whole curve is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
import pytest

from isambard_serve import search
from isambard_serve.search import Measure, Scout, Space, Step, Stop, decide

SPACE = Space(isl=1024, osl=1024, start=8, most=None, gpus=4, prompts_per_concurrency=2, repeats=1,
              budget_gpu_s=float("inf"))


@dataclass(frozen=True)
class Curve:
    """An engine: seconds a step takes at a concurrency, and how many sequences of full length its KV cache holds."""

    step_s: Callable[[int], float]
    holds: float = math.inf
    most: float = math.inf

    def rate(self, concurrency: int) -> float:
        """Output tokens a second; what does not fit slows the rest down."""
        running = min(concurrency, self.holds, self.most)
        lost = 0.9 if concurrency > self.holds else 1.0
        return lost * running / self.step_s(int(running))

    def answer(self, action: Scout | Measure, space: Space) -> Step:
        """What `action` would find."""
        concurrency = action.concurrency
        running = min(concurrency, self.holds, self.most)
        length = action.prompt_tokens + action.output_tokens if isinstance(action, Scout) else space.isl + space.osl
        held = running / self.holds * length / (space.isl + space.osl)
        rate = self.rate(concurrency)
        whole_s = concurrency * space.prompts_per_concurrency * space.osl / rate
        return Step(kind="scout" if isinstance(action, Scout) else "point", concurrency=concurrency,
                    repeat=action.repeat if isinstance(action, Measure) else 1, output_tok_s=rate, running=running,
                    waiting=running < concurrency, kv_cache_usage=None if math.isinf(self.holds) else min(1.0, held),
                    preemptions=float(max(0, concurrency - self.holds)), valid=True,
                    gpu_s=space.gpus * (10.0 if isinstance(action, Scout) else whole_s))


SATURATES = Curve(lambda running: 0.03 + running * 20e-6, holds=1000)
FLATTENS = Curve(lambda running: 0.002 + running * 50e-6)
LIMITED = Curve(lambda running: 0.03 + running * 20e-6, holds=5000, most=256)


def searched(curve: Curve, **changes: Any) -> tuple[list[Step], Stop]:
    """All steps on `curve`, and the end."""
    space = msgspec.structs.replace(SPACE, **changes)
    steps: list[Step] = []
    while not isinstance(action := decide(space, steps), Stop):
        steps.append(curve.answer(action, space))
        assert len(steps) < 40, "it does not end"
    return steps, action


def points(steps: list[Step]) -> list[int]:
    return [step.concurrency for step in steps if step.kind == "point"]


def test_the_first_look_is_at_the_full_length_of_a_sequence() -> None:
    action = decide(SPACE, [])
    assert isinstance(action, Scout)
    assert action.concurrency == SPACE.start
    assert action.prompt_tokens + action.output_tokens == SPACE.isl + SPACE.osl
    assert action.output_tokens < SPACE.osl / 16


def test_the_first_point_is_where_the_kv_cache_is_just_not_overfull() -> None:
    steps, end = searched(SATURATES)
    assert points(steps)[0] == math.floor(search.SPARE * 1000)
    assert (end.saturation, end.reason) == ("kv", "the knee is found")


def test_scouts_double_until_the_next_would_not_fit() -> None:
    steps, _ = searched(SATURATES)
    assert [step.concurrency for step in steps if step.kind == "scout"] == [8, 16, 32, 64, 128, 256, 512]


def test_where_throughput_stops_to_rise_first_the_end_is_a_plateau_and_the_kv_cache_is_never_filled() -> None:
    steps, end = searched(Curve(FLATTENS.step_s, holds=100_000))
    assert end.saturation == "plateau"
    assert end.knee is not None
    assert FLATTENS.rate(end.knee) >= 0.98 * max(FLATTENS.rate(concurrency) for concurrency in (512, 1024, 2048, 4096))
    assert max(step.concurrency for step in steps) < 10_000


def test_it_never_asks_for_more_than_the_engine_runs_at_once() -> None:
    steps, end = searched(LIMITED, most=256)
    assert max(step.concurrency for step in steps) == 256
    assert end.saturation == "max_num_seqs"


def test_an_engine_that_runs_fewer_than_it_said_is_found_out_by_those_that_wait() -> None:
    steps, end = searched(LIMITED)
    assert end.saturation == "waiting"
    assert 0.98 * LIMITED.rate(256) <= LIMITED.rate(end.knee or 0)
    assert max(points(steps)) == 256


def test_an_engine_that_tells_nothing_of_its_kv_cache_is_searched_by_throughput_alone() -> None:
    _, end = searched(FLATTENS)
    assert end.saturation == "plateau"


@pytest.mark.parametrize("curve", [SATURATES, FLATTENS, LIMITED])
def test_the_knee_is_the_smallest_measured_concurrency_within_two_percent_of_the_best(curve: Curve) -> None:
    steps, end = searched(curve)
    rates = {step.concurrency: step.output_tok_s or 0.0 for step in steps if step.kind == "point"}
    assert end.knee == min(concurrency for concurrency, rate in rates.items() if rate >= 0.98 * max(rates.values()))


def test_only_the_knee_is_repeated() -> None:
    steps, end = searched(SATURATES, repeats=3)
    assert [(step.concurrency, step.repeat) for step in steps[-2:]] == [(end.knee, 2), (end.knee, 3)]
    assert sum(step.repeat > 1 for step in steps) == 2


def test_a_budget_that_is_spent_ends_it_with_what_there_is() -> None:
    whole, _ = searched(SATURATES, repeats=3)
    spent = sum(step.gpu_s for step in whole)
    for budget in (1.0, 45.0, 500.0, spent / 2, spent - 1, spent):
        steps, end = searched(SATURATES, budget_gpu_s=budget, repeats=3)
        assert sum(step.gpu_s for step in steps if step.kind == "point") <= budget
        assert end.reason.startswith("the budget has no room for") == (steps != whole)


def test_an_engine_that_does_not_tell_how_fast_it_is_is_not_asked_for_ever_more() -> None:
    scouts = [curve_step("scout", concurrency, 0.0, output_tok_s=None) for concurrency in (8, 16)]
    assert decide(SPACE, scouts) == Measure(concurrency=16, repeat=1)


def test_too_many_at_once_is_mended_by_fewer() -> None:
    """A point that is not valid because running requests lost their room is followed by smaller ones."""
    space = msgspec.structs.replace(SPACE, most=2000)
    steps = [curve_step("scout", 8, 100.0), curve_step("point", 1000, 90.0, preemptions=900.0, valid=False)]
    action = decide(space, steps)
    assert isinstance(action, Measure)
    assert 800 < action.concurrency < 1000


def test_points_that_are_not_valid_for_other_reasons_end_it_without_a_knee() -> None:
    steps = [curve_step("scout", 8, 100.0, kv_cache_usage=0.5), curve_step("point", 15, 90.0, valid=False)]
    assert decide(SPACE, steps) == Stop(knee=None, saturation=None, reason="no point was valid")


def test_it_goes_on_from_points_alone() -> None:
    """The scouts of a lost run may be gone; its points still count."""
    steps, _ = searched(SATURATES)
    alone = [step for step in steps if step.kind == "point"]
    assert isinstance(decide(SPACE, alone), Stop | Measure)


def test_no_knee_is_called_found_where_more_at_once_would_give_more() -> None:
    steps = [curve_step("point", 64 * 2 ** power, 100.0 * 1.5 ** power, kv_cache_usage=0.02 * 2 ** power)
             for power in range(search.POINTS)]
    assert decide(SPACE, steps) == Stop(knee=1024, saturation=None, reason="the budget of 5 concurrencies is spent")


def test_what_to_do_next_depends_on_nothing_but_the_steps_so_far() -> None:
    steps, end = searched(SATURATES, repeats=2)
    space = msgspec.structs.replace(SPACE, repeats=2)
    for count in range(len(steps)):
        action = decide(space, steps[:count])
        assert not isinstance(action, Stop)
        assert SATURATES.answer(action, space) == steps[count]
    assert decide(space, steps) == end


@pytest.mark.parametrize("seed", range(60))
def test_on_any_engine_it_ends_near_the_best_with_few_points(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    fixed, each = 10 ** draw.uniform(-2.5, -1), 10 ** draw.uniform(-5.5, -4)
    free, most = draw.choice([0, 0, 100, 1000]), draw.choice([64, 1024, 4096])
    curve = Curve(lambda running: fixed + max(0, running - free) * each, holds=10 ** draw.uniform(1, 4), most=most)
    steps, end = searched(curve, most=most)
    assert end.knee is not None
    best = max(curve.rate(concurrency) for concurrency in range(1, 2 * most, max(1, most // 256)))
    assert curve.rate(end.knee) >= 0.94 * best
    assert max(step.output_tok_s or 0.0 for step in steps if step.kind == "point") >= 0.96 * best
    assert len(set(points(steps))) <= search.POINTS


def test_every_kind_of_saturation_has_words() -> None:
    assert set(search.WORDS) == set(get_args(search.Saturation))


def curve_step(kind: Any, concurrency: int, rate: float, **changes: Any) -> Step:
    """A step that found `rate`."""
    step = Step(kind=kind, concurrency=concurrency, repeat=1, output_tok_s=rate, running=float(concurrency),
                waiting=False, kv_cache_usage=None, preemptions=0.0, valid=True, gpu_s=1.0)
    return msgspec.structs.replace(step, **changes)


def test_a_knee_beyond_which_a_point_gave_no_more_has_a_plateau_behind_it() -> None:
    # Of a short point the samples may have missed that the KV cache was full.
    steps = [curve_step("scout", 8, 400.0, kv_cache_usage=0.8), curve_step("point", 9, 100.0, kv_cache_usage=0.9),
             curve_step("point", 10, 60.0, kv_cache_usage=0.5)]
    assert decide(SPACE, steps) == Stop(knee=9, saturation="plateau", reason="the knee is found")
