"""What recipes are expected to reach and cost: the published ladder from one fitted factor, and what is not known."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from isambard_serve import cost, modelconfig, roofline
from isambard_serve import site as sites
from isambard_serve.ceilings import Expected
from isambard_serve.cost import Setting
from isambard_serve.site import Site
from tests.unit.helpers import HERE, loaded, pretend_site, small_recipe
from tests.unit.test_modelconfig import flash, model


def isambard(**changes: Any) -> Site:
    site = sites.resolved(sites.load("isambard-ai"), {}, from_afar=True)[0]
    return msgspec.structs.replace(site, **changes)


def setting(name: str, *assignments: str) -> Setting:
    found = cost.setting(loaded(name, *assignments), isambard(), flash())
    assert found
    return found


def test_the_factor_gives_the_published_throughput_of_tp4_to_which_it_was_fitted() -> None:
    assert setting("tp4").point(2048, 4096).output_tok_s == pytest.approx(5856, rel=0.002)


# What the other rungs are then expected to reach. docs/roofline.md has these figures, and what is missing.
@pytest.mark.parametrize(("name", "published", "within"), [("dp4", 12_802, 0.15), ("dp4-humming", 17_900, 0.20)])
def test_the_other_rungs_follow_without_another_factor(name: str, published: float, within: float) -> None:
    assert setting(name).point(2752, 5504).output_tok_s == pytest.approx(published, rel=within)


def test_each_rung_gains_where_the_article_says() -> None:
    tp4, dp4, humming = (setting(name).point(concurrency, 2 * concurrency) for name, concurrency in (
        ("tp4", 2048), ("dp4", 2752), ("dp4-humming", 2752)))
    assert tp4.running < 2048       # copies of one latent fill its KV cache
    assert dp4.running == 2752
    assert dp4.buckets["attention"] < tp4.buckets["attention"]
    assert dp4.buckets["norm/elementwise"] < tp4.buckets["norm/elementwise"]
    assert humming.buckets["MoE GEMM"] < 0.6 * dp4.buckets["MoE GEMM"]
    assert 0.3 < humming.prefill_share < 0.6


def test_the_least_of_a_step_is_each_buckets_floor_for_as_many_requests_as_there_is_room_for() -> None:
    least = setting("dp4-humming").least_ms(2048)
    # The article's picture of this step: comms about 3 ms at wire rate, act+quant about 2 ms of moving data.
    assert 2 < least["comms"] < 3.5
    assert 1 < least["act+quant"] < 2.5
    assert "idle" not in least
    crowded = setting("tp4")
    assert crowded.least_ms(4096) == crowded.least_ms(crowded.sequences)


def test_of_a_profile_the_point_at_its_concurrency_is_forecast() -> None:
    found = cost.forecast(loaded("dp4", "bench.profile_at=2048"), isambard(), flash())
    assert found
    assert [point.concurrency for point in found.points] == [2048]


def test_requests_that_find_no_room_run_in_later_waves() -> None:
    known = setting("tp4")
    room = known.sequences
    full, over = known.point(room, 2 * room), known.point(2 * room, 4 * room)
    assert over.running == full.running == room
    assert over.duration_s == pytest.approx(2 * full.duration_s)
    assert over.output_tok_s == pytest.approx(full.output_tok_s)


def test_more_memory_or_a_smaller_model_holds_more_sequences() -> None:
    assert setting("tp4", "engine.args.gpu-memory-utilization=0.95").sequences > setting("tp4").sequences
    assert setting("dp4").kv_sequences > 3 * setting("tp4").kv_sequences
    assert setting("dp4").workspace_bytes > setting("tp4").workspace_bytes


def test_what_limits_a_recipe_is_named() -> None:
    tp4 = cost.forecast(loaded("tp4"), isambard(), flash())
    dp4 = cost.forecast(loaded("dp4"), isambard(), flash())
    assert tp4
    assert dp4
    assert (tp4.most_by, dp4.most_by, dp4.most) == ("kv", "max-num-seqs", 4096)
    assert tp4.bound_by == dp4.bound_by == "MoE GEMM"
    assert "1,217 run at once (KV cache full)" in cost.words(tp4)
    assert "4,096 run at once (max-num-seqs)" in cost.words(dp4)


def test_the_knee_is_the_smallest_concurrency_within_two_per_cent_of_the_best() -> None:
    known = setting("dp4")
    best, knee, below = (known.point(each, each).output_tok_s for each in (
        known.sequences, known.knee(), known.knee() - 1))
    assert below < 0.98 * best <= knee


def test_what_it_costs_is_the_usual_load_and_all_points() -> None:
    listed = "bench.concurrency=[512, 2048]"
    found = cost.forecast(loaded("dp4", listed), isambard(), flash())
    assert found
    assert [point.concurrency for point in found.points] == [512, 2048]
    assert found.node_hours * 3600 == pytest.approx(600 + sum(point.duration_s for point in found.points))
    twice = cost.forecast(loaded("dp4", listed, "bench.repeats=2"), isambard(), flash())
    assert twice
    assert twice.node_hours * 3600 == pytest.approx(600 + 2 * sum(point.duration_s for point in found.points))


def test_a_search_is_expected_to_measure_the_knee_and_to_look_for_it() -> None:
    found = cost.forecast(loaded("dp4"), isambard(), flash())
    assert found
    (point,) = found.points
    assert (point.concurrency, point.output_tok_s) == (found.knee, found.output_tok_s)
    assert found.node_hours * 3600 == pytest.approx(600 + 3 * point.duration_s)


def test_shares_add_up_to_one() -> None:
    for point in (setting(name).point(64, 128) for name in ("tp4", "dp4", "dp4-humming")):
        assert sum(point.buckets.values()) == pytest.approx(1)


def test_nothing_is_said_of_what_is_not_known() -> None:
    assert cost.forecast(loaded("tp4"), isambard(), None) is None
    assert cost.forecast(loaded("tp4"), isambard(ceilings=Expected(bf16_tflop_s=583)), flash()) is None
    assert cost.forecast(small_recipe(), pretend_site(), model("qwen3-32b")) is None
    too_large = loaded("dp4", "engine.args.data-parallel-size=1", "resources.gpus=1")
    assert cost.forecast(too_large, isambard(), flash()) is None       # 143 GiB of weights on one GPU
    tiny = loaded("tiny")
    config = modelconfig.find(tiny.model, {})
    assert config is not None
    assert cost.forecast(tiny, isambard(), config) is None             # steps too short for the host to keep up


def test_what_a_recipe_leaves_out_is_as_the_engine_has_it() -> None:
    known = cost.setting(small_recipe(), isambard(), model("qwen3-32b"))
    assert known
    assert (known.max_num_seqs, known.max_num_batched_tokens, known.gpu_memory_utilization) == (1024, 8192, 0.92)
    assert known.pages.groups[0].block_size == 16


def test_the_figures_in_the_document_are_those_that_come_out() -> None:
    text = (HERE.parents[1] / "docs" / "roofline.md").read_text()
    columns = {}
    for name, running in (("tp4", 1217), ("dp4", 2752), ("dp4-humming", 2752)):
        known = setting(name)
        columns[name] = roofline.floors(known.model, known.shape, known.rates,
                                        roofline.Step(decoding=running, context=1536))
    for bucket in roofline.BUCKETS[:-2]:
        cells = " | ".join(f"{floors[bucket] * 1e3:.2f}" for floors in columns.values())
        assert f"| {bucket} | {cells} |" in text
    for name, concurrency, published in (("dp4", 2752, 12_802), ("dp4-humming", 2752, 17_900)):
        reached = setting(name).point(concurrency, 2 * concurrency).output_tok_s
        assert f"| {reached:,.0f} | −{1 - reached / published:.1%} |".replace("%", " %") in text
    share, ratio = setting("dp4").point(2752, 2 * 2752).buckets[roofline.MOE], roofline.humming_over_marlin(2752)
    assert f"The experts are {share:.0%} of a decode step.".replace("%", " %") in text
    assert f"{ratio:.1f} times less, the step {1 / (1 - share + share / ratio):.2f} times." in text
    assert f"has room for {setting('dp4').kv_sequences:,}".replace("has", "finds") in text
    assert setting("tp4").sequences == 1217


def test_every_model_of_the_shipped_recipes_is_known_but_the_tiny_one() -> None:
    assert modelconfig.find(loaded("tp4").model, {}) is not None
