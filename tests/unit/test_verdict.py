"""What a run came to, in words."""

from __future__ import annotations

from typing import Any

import pytest

from isambard_serve import verdict
from isambard_serve.outcome import Found
from isambard_serve.records import Repeats, Row
from isambard_serve.search import WORDS, Saturation
from tests.unit.helpers import some_row


def row(concurrency: int, tok_s: float | None, **changes: Any) -> Row:
    return some_row(recipe="dp4", concurrency=concurrency, output_tok_s=tok_s, **changes)


def found(saturation: Saturation | None, reason: str = "the knee is found") -> Found:
    return Found(knee=512, saturation=saturation, reason=reason, scouts=1, points=1, gpu_s=1.0)


BASE = [some_row(recipe="tp4", concurrency=256, output_tok_s=1000.0)]
RISING = [row(256, 1500.0), row(512, 2180.0), row(1024, 2200.0, kv_cache_usage_max=0.99)]


def said(rows: list[Row], *given: Any) -> str:
    made = verdict.of(rows, *given)
    assert made is not None
    return made.text


def test_a_rung_is_so_many_times_as_fast_as_the_first_at_its_knee() -> None:
    made = verdict.of(RISING, found("kv"), BASE)
    assert made is not None
    assert made.text == "2.2× tp4; KV-bound at c512"
    assert (made.concurrency, made.output_tok_s, made.ratio, made.over, made.bound) == (512, 2180.0, 2.18, "tp4", "kv")


def test_a_run_alone_says_its_throughput() -> None:
    assert said(RISING) == "2,180 tok/s; best at c512"


@pytest.mark.parametrize("saturation", [*WORDS, None])
def test_each_way_of_being_saturated_has_its_words(saturation: Saturation | None) -> None:
    assert "at c512" in said(RISING, found(saturation))
    assert len({said(RISING, found(word)) for word in (*WORDS, None)}) == len(WORDS) + 1


def test_without_a_search_the_rows_tell_what_the_knee_was_short_of() -> None:
    assert said([row(64, 10.0, kv_cache_usage_max=0.96)]) == "10 tok/s; KV-bound at c64"
    assert said([row(64, 10.0, preemptions=3)]) == "10 tok/s; KV-bound at c64, with preemptions"
    assert said([row(64, 10.0, kv_cache_usage_max=None)]) == "10 tok/s; best at c64"


def test_a_spent_budget_is_said() -> None:
    assert said(RISING, found(None, "the budget is spent")) == "2,180 tok/s; best at c512; the budget is spent"


def test_without_a_valid_point_the_codes_say_why() -> None:
    rows = [row(1, 10.0, valid=False, reasons=("client", "window")), row(2, None, valid=False, reasons=("window",))]
    made = verdict.of(rows, found("kv"), BASE)
    assert made is not None
    assert made.text == "no valid point: client, window"
    assert (made.concurrency, made.output_tok_s, made.ratio, made.bound) == (None, None, None, None)


def test_a_first_rung_without_a_valid_point_gives_no_ratio() -> None:
    base = [some_row(recipe="tp4", valid=False, reasons=("window",))]
    assert said(RISING, None, base) == "2,180 tok/s; best at c512; tp4 has no valid point"


def test_before_the_first_point_there_is_no_verdict() -> None:
    assert verdict.of([]) is None


def test_repeats_give_their_median_and_spread_and_those_that_are_not_valid_count_for_nothing() -> None:
    rows = [row(64, 90.0, repeat=1), row(64, 100.0, repeat=2), row(64, 105.0, repeat=3),
            row(64, 999.0, repeat=4, valid=False, reasons=("client",)), row(32, 50.0)]
    assert verdict.repeats(rows) == [
        Repeats(recipe="dp4", concurrency=32, measured=1, valid=1, output_tok_s_median=50.0, output_tok_s_spread=None),
        Repeats(recipe="dp4", concurrency=64, measured=4, valid=3, output_tok_s_median=100.0,
                output_tok_s_spread=0.15)]
    assert said(rows) == "100 tok/s (median of 3, spread 15.0%); best at c64"
