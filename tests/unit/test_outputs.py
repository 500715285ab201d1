"""The fixed prompts: asked once, all together; only what is objectively broken is called so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from isambard_serve import outputs
from isambard_serve.engine import EngineUnreachableError
from isambard_serve.records import Answer
from tests.unit.fake_engine import FakeEngine
from tests.unit.helpers import some_outputs


def answering(*choices: dict[str, Any]) -> FakeEngine:
    return FakeEngine(completion=json.dumps({"choices": choices}).encode())


def test_all_prompts_are_asked_in_one_request_greedily() -> None:
    choices = [{"index": index, "text": f" answer {index}", "token_ids": [index, 1], "stop_reason": None}
               for index in reversed(range(len(outputs.PROMPTS)))]
    with answering(*choices) as engine:
        asked = outputs.ask(engine.client(), "m")
    ((path, key, body),) = engine.asked
    assert (path, key) == ("/v1/completions", "Bearer key")
    assert body == body | {"model": "m", "prompt": list(outputs.PROMPTS), "temperature": 0, "ignore_eos": True,
                           "max_tokens": 32, "return_token_ids": True}
    assert [answer.text for answer in asked.answers] == [f" answer {index}" for index in range(20)]
    assert asked.answers[3].tokens == (3, 1)
    assert outputs.broken(asked) == []


def test_there_are_twenty_prompts_and_no_two_begin_alike() -> None:
    assert len(outputs.PROMPTS) == len({prompt[:16] for prompt in outputs.PROMPTS}) == 20


@pytest.mark.parametrize("content", [b"{}", b"no JSON", b'{"choices": [{"text": "x"}]}', b'{"choices": null}'])
def test_an_answer_that_cannot_be_understood_is_an_error(content: bytes) -> None:
    with FakeEngine(completion=content) as engine, pytest.raises(EngineUnreachableError):
        outputs.ask(engine.client(), "m")


@pytest.mark.parametrize(("answer", "wrong"), [
    (Answer(text="", tokens=(1, 2, 3)), "empty"),
    (Answer(text=" \n ", tokens=None), "empty"),
    (Answer(text="\ufffd" * 9, tokens=tuple(range(9))), "no text"),
    (Answer(text="\x00\x01\x02 a", tokens=(1, 2, 3, 4)), "no text"),
    (Answer(text="!" * 32, tokens=(0,) * 32), "32 times the same token"),
    (Answer(text="x x x x x x x x", tokens=None), "8 times the same token"),
])
def test_an_answer_that_is_broken_says_how(answer: Answer, wrong: str) -> None:
    assert outputs.broken(some_outputs("good one", answers=(answer,))) == [f"the answer to 'p0' is {wrong}"]


@pytest.mark.parametrize("answer", [
    Answer(text=" Paris.", tokens=(1, 2)), Answer(text="no no no", tokens=(7, 7, 7)),
    Answer(text="die Sonne scheint \ufffd", tokens=(1, 2, 3, 4)), Answer(text="晴れ\n\t🙂", tokens=(1, 2, 3)),
    Answer(text="w1 w2 " * 16, tokens=(1, 2) * 16), Answer(text="\n" * 3 + "x", tokens=(1, 1, 1, 2)),
])
def test_an_odd_answer_is_not_broken(answer: Answer) -> None:
    assert outputs.broken(some_outputs("good one", answers=(answer,))) == []


def test_a_prompt_without_an_answer_is_named() -> None:
    asked = some_outputs("a b", "c d", answers=(Answer(text="a b", tokens=(1, 2)),))
    assert outputs.broken(asked) == ["'p1' has no answer"]


def test_where_two_engines_part_is_counted_in_tokens() -> None:
    first, second = some_outputs("a b c d", "e f", "g"), some_outputs("a b X d", "e f", "g h")
    assert [(each.prompt, each.agree, each.length, each.parted) for each in outputs.partings(first, second)] == [
        ("p0", 2, 4, True), ("p1", 2, 2, False), ("p2", 1, 2, True)]


def test_without_tokens_on_both_sides_words_are_counted() -> None:
    first = some_outputs("a b c")
    second = some_outputs("a b c", answers=(Answer(text="a b c", tokens=None),))
    assert [each.parted for each in outputs.partings(first, second)] == [False]


def test_only_prompts_that_both_were_asked_are_compared() -> None:
    first, second = some_outputs("a", "b"), some_outputs("b", "c", prompts=("p1", "p2"))
    assert [(each.prompt, each.parted) for each in outputs.partings(first, second)] == [("p1", False)]
