"""The engine over HTTP: healthy, answering, and what its metrics say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from isambard_serve import engine
from isambard_serve.engine import EngineClient, EngineUnreachableError
from tests.unit.fake_engine import FakeEngine
from tests.unit.helpers import SAMPLES

METRICS = (SAMPLES / "metrics-dp2.txt").read_text()


@pytest.fixture
def served() -> Iterator[Callable[..., FakeEngine]]:
    """Serve fake engines that are gone after the test."""
    with ExitStack() as stack:
        yield lambda **answers: stack.enter_context(FakeEngine(**answers))


def test_counters_and_gauges_of_a_real_engine_are_summed_over_its_two_ranks() -> None:
    sample = engine.parse_metrics(METRICS, now=5.0, scrape_ms=1.5)
    assert (sample.time, sample.scrape_ms) == (5.0, 1.5)
    assert sample.prompt_tokens_total == 1158 + 908
    assert sample.generation_tokens_total == 1152 + 896
    assert sample.requests_total == 18 + 14
    assert sample.prefix_cache_queries_total == 1158 + 908
    assert sample.prefix_cache_hits_total == 0
    assert (sample.running, sample.waiting, sample.preemptions_total, sample.kv_cache_usage) == (0, 0, 0, 0)


def test_the_kv_cache_is_that_of_the_fullest_rank_and_the_queues_are_those_of_all() -> None:
    text = (METRICS.replace('kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0',
                            'kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25')
            .replace('kv_cache_usage_perc{engine="1",model_name="tiny"} 0.0',
                     'kv_cache_usage_perc{engine="1",model_name="tiny"} 0.875')
            .replace('num_requests_running{engine="0",model_name="tiny"} 0.0',
                     'num_requests_running{engine="0",model_name="tiny"} 3.0')
            .replace('num_requests_waiting{engine="1",model_name="tiny"} 0.0',
                     'num_requests_waiting{engine="1",model_name="tiny"} 5.0'))
    sample = engine.parse_metrics(text, now=0, scrape_ms=0)
    assert (sample.kv_cache_usage, sample.running, sample.waiting) == (0.875, 3, 5)


def test_metrics_with_a_longer_name_are_other_metrics() -> None:
    text = 'vllm:num_requests_waiting_by_reason{reason="capacity"} 7\nvllm:prompt_tokens_cached_total{engine="0"} 9\n'
    sample = engine.parse_metrics(text, now=0, scrape_ms=0)
    assert (sample.waiting, sample.prompt_tokens_total) == (None, None)


def test_a_sample_is_stamped_and_says_how_long_its_reading_took(served: Callable[..., FakeEngine]) -> None:
    before = time.time()
    sample = served(metrics=METRICS).client().sample()
    assert before <= sample.time <= time.time()
    assert 0 < sample.scrape_ms < 5000
    assert sample.requests_total == 32


def test_the_key_goes_with_every_question(served: Callable[..., FakeEngine]) -> None:
    fake = served(metrics=METRICS)
    client = fake.client(key="secret")
    assert client.healthy()
    client.complete("small-model")
    client.sample()
    assert [path for path, _, _ in fake.asked] == ["/health", "/v1/completions", "/metrics"]
    assert {authorization for _, authorization, _ in fake.asked} == {"Bearer secret"}


def test_a_completion_is_short_and_asks_the_planned_model(served: Callable[..., FakeEngine]) -> None:
    fake = served()
    fake.client().complete("small-model")
    ((_, _, body),) = fake.asked
    assert body["model"] == "small-model"
    assert body["max_tokens"] <= 8


def test_an_engine_that_says_no_is_not_healthy(served: Callable[..., FakeEngine]) -> None:
    assert not served(health=503).client().healthy()


@pytest.mark.parametrize("answer", [b"", b"{", b"[]", b"null", b"{}", b'{"choices": []}', b"<html>"])
def test_an_answer_without_a_choice_in_it_is_no_completion(
        served: Callable[..., FakeEngine], answer: bytes) -> None:
    with pytest.raises(EngineUnreachableError, match="/v1/completions: no completion in"):
        served(completion=answer).client().complete("small-model")


def test_an_error_of_the_engine_is_told_with_its_path(served: Callable[..., FakeEngine]) -> None:
    client = served(status=500).client()
    with pytest.raises(EngineUnreachableError, match="/v1/completions: HTTP Error 500"):
        client.complete("small-model")
    with pytest.raises(EngineUnreachableError, match="/metrics: HTTP Error 500"):
        client.sample()


def test_an_engine_that_is_not_there_is_neither_healthy_nor_answers() -> None:
    with FakeEngine() as fake:
        client = fake.client()
    assert not client.healthy()
    with pytest.raises(EngineUnreachableError, match=r"/metrics: .*refused"):
        client.sample()


def test_an_engine_that_hangs_is_given_up_in_time(served: Callable[..., FakeEngine]) -> None:
    client = served(hang=True).client()
    assert not client.healthy(timeout_s=0.05)
    with pytest.raises(EngineUnreachableError):
        client.complete("small-model", timeout_s=0.05)


def test_an_engine_that_talks_something_else_is_unreachable(served: Callable[..., FakeEngine]) -> None:
    with pytest.raises(EngineUnreachableError):
        served(garbage=True).client().sample()


def test_a_proxy_for_the_outside_world_is_not_asked(
        served: Callable[..., FakeEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert served().client().healthy()


def test_a_client_names_its_engine() -> None:
    assert EngineClient("http://127.0.0.1:1", "k").url == "http://127.0.0.1:1"


def test_the_profiler_is_told_over_http_and_its_absence_is_an_error(served: Callable[..., FakeEngine]) -> None:
    engine = served()
    engine.client("secret").start_profile()
    engine.client("secret").stop_profile()
    assert engine.asked == [("/start_profile", "Bearer secret", {}), ("/stop_profile", "Bearer secret", {})]
    for tell in ("start_profile", "stop_profile"):
        with pytest.raises(EngineUnreachableError, match=f"/{tell}: HTTP Error 404"):
            getattr(served(status=404).client(), tell)()
