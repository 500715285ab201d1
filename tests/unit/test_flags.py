"""The engine's flags: what a value becomes on the command line, and which names a version knows."""

from __future__ import annotations

from typing import Any

import pytest

from isambard_serve import flags
from isambard_serve.errors import UsageError


@pytest.mark.parametrize(("value", "words"), [
    (True, ["--x"]),
    (False, ["--no-x"]),
    (0, ["--x", "0"]),
    (1, ["--x", "1"]),
    (0.95, ["--x", "0.95"]),
    ("a b", ["--x", "a b"]),
    ("", ["--x", ""]),
    ([1, "b c", 2.5], ["--x", "1", "b c", "2.5"]),
    ({"b": 1, "a": {"deep": [True, None]}}, ["--x", '{"b":1,"a":{"deep":[true,null]}}']),
])
def test_a_value_becomes_words(value: Any, words: list[str]) -> None:
    assert flags.argv({"x": value}) == words


def test_words_stand_in_the_order_of_the_recipe() -> None:
    assert flags.argv({"b": 1, "a": 2, "c": True}) == ["--b", "1", "--a", "2", "--c"]


def test_an_array_of_the_command_line_is_no_list_of_letters() -> None:
    assert flags.argv({"served": "abc"}) == ["--served", "abc"]


@pytest.mark.parametrize("version", flags.versions())
def test_every_version_knows_the_flags_that_all_engines_have(version: str) -> None:
    known = flags.known(version)
    assert known is not None
    assert {"tensor-parallel-size", "max-num-seqs", "no-enable-expert-parallel", "compilation-config"} <= known
    assert flags.OWNED - {"model"} <= known
    assert not any(name.startswith("-") for name in known)


def test_flags_differ_by_version() -> None:
    added = min((flags.known("0.33.0") or frozenset()) - (flags.known("0.26.0") or frozenset()))
    assert flags.check({added: 1}, "0.33.0", "f.yaml") is None
    with pytest.raises(UsageError, match=r"vllm serve 0\.26\.0 has no flag"):
        flags.check({added: 1}, "0.26.0", "f.yaml")


def test_a_known_flag_gives_neither_error_nor_warning() -> None:
    assert flags.check({"max-num-seqs": 1, "enable-expert-parallel": False}, "0.33.0", "f.yaml") is None


@pytest.mark.parametrize("name", sorted(flags.OWNED))
def test_what_only_the_node_knows_is_refused_whatever_the_version(name: str) -> None:
    for version in ("0.33.0", "9.9.9"):
        with pytest.raises(UsageError, match=f"f.yaml: engine.args.{name}: .* set by isambard-serve itself"):
            flags.check({name: 1}, version, "f.yaml")
