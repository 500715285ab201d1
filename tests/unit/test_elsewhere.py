"""Commands that may be done elsewhere: on which host, and by what words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from isambard_serve import recipe, remote, shipped
from isambard_serve.cli import elsewhere, main
from isambard_serve.errors import HostError, UsageError
from tests.unit.helpers import small_recipe

UserFile = Callable[[str, str], Path]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], bytes]]:
    """What goes to other hosts, which all answer with exit code 7."""
    calls: list[tuple[str, list[str], bytes]] = []

    def relay(alias: str, words: list[str], *, stdin: bytes = b"", again: Any = None) -> int:
        calls.append((alias, words, stdin))
        return 7

    monkeypatch.setattr(remote, "relay", relay)
    return calls


def test_the_words_are_those_that_were_given(sent: list[tuple[str, list[str], bytes]]) -> None:
    done = CliRunner().invoke(main, ["cancel", "--ladder", "--host", "there", "--site", "a b", "4711", "--json"])
    assert done.exit_code == 7
    assert sent == [("there", ["cancel", "--site=a b", "--ladder", "--json", "--", "4711"], b"")]


def test_recipes_are_resolved_here_with_what_changes_them(sent: list[tuple[str, list[str], bytes]]) -> None:
    CliRunner().invoke(main, ["submit", "--host", "there", "dp4", "--set", "bench.repeats=2", "--time", "90m",
                              "--max-node-hours", "2"])
    ((alias, words, stdin),) = sent
    assert (alias, words) == ("there", ["submit", "--max-node-hours=2.0", "--", "-"])
    (unpacked,) = recipe.unpacked(stdin)
    assert unpacked == recipe.load("dp4", ("bench.repeats=2", "resources.time='90m'"))[0]


def test_a_run_is_resumed_there_with_its_own_recipe(sent: list[tuple[str, list[str], bytes]]) -> None:
    CliRunner().invoke(main, ["submit", "--host", "there", "--resume", "4711"])
    assert sent == [("there", ["submit", "--resume=4711"], b"")]


def test_a_recipe_that_cannot_be_used_is_told_before_anybody_is_asked(sent: list[tuple[str, list[str], bytes]]) -> None:
    done = CliRunner().invoke(main, ["submit", "--host", "there", "no-such"])
    assert done.exit_code == 2
    assert sent == []


def test_the_host_is_the_flags_then_the_environments_then_the_settings(user_file: UserFile,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    assert elsewhere.chosen(None, None) == (None, None)
    user_file("config.yaml", "host: settings\n")
    assert elsewhere.chosen(None, "isambard-ai") == ("settings", "isambard-ai")
    monkeypatch.setenv("ISAMBARD_SERVE_HOST", "environment")
    assert elsewhere.chosen(None, None) == ("environment", None)
    assert elsewhere.chosen("flag", None) == ("flag", None)


def test_what_is_of_this_machine_stays_here(user_file: UserFile, tmp_path: Path) -> None:
    user_file("config.yaml", "host: settings\n")
    assert elsewhere.chosen(None, "sandbox") == (None, "sandbox")
    assert elsewhere.chosen("flag", "sandbox") == ("flag", "sandbox")
    user_file("sites/mine.yaml", f"extends: isambard-ai\ndetect: {tmp_path}\n")
    assert elsewhere.chosen(None, None) == (None, None)


def test_a_site_that_only_the_host_knows_is_asked_for_there(user_file: UserFile) -> None:
    user_file("config.yaml", "host: settings\nsite: theirs\n")
    assert elsewhere.chosen(None, None) == ("settings", "theirs")


def test_the_site_of_the_settings_goes_with_the_words(user_file: UserFile,
                                                      sent: list[tuple[str, list[str], bytes]]) -> None:
    user_file("config.yaml", "host: there\nsite: isambard-ai\n")
    CliRunner().invoke(main, ["status"])
    assert sent == [("there", ["status", "--site=isambard-ai"], b"")]


def test_a_plan_stays_here_unless_a_host_is_named(user_file: UserFile,
                                                  sent: list[tuple[str, list[str], bytes]]) -> None:
    user_file("config.yaml", "host: there\n")
    assert CliRunner().invoke(main, ["plan", "dp4", "--site", "isambard-ai"]).exit_code == 0
    CliRunner().invoke(main, ["plan", "dp4", "--host", "there"])
    assert [words for _, words, _ in sent] == [["plan", "--", "-"]]


def test_a_command_for_a_host_wants_one() -> None:
    with pytest.raises(UsageError, match="name the login node"):
        elsewhere.needed(None)
    assert elsewhere.needed("there") == "there"


def test_flags_with_an_opposite_and_lists_are_given_again() -> None:
    @click.command()
    @click.option("--yes/--no", default=None)
    @click.option("--each", multiple=True)
    @click.argument("names", nargs=-1)
    @click.pass_context
    def command(ctx: click.Context, yes: bool | None, each: tuple[str, ...], names: tuple[str, ...]) -> None:
        click.echo(repr(elsewhere.words_of(ctx)))

    done = CliRunner().invoke(command, ["--no", "--each", "-x", "--each", "y", "--", "-z"])
    assert done.output.strip() == repr(["command", "--no", "--each=-x", "--each=y", "--", "-z"])


def test_what_goes_on_after_a_lost_connection() -> None:
    assert elsewhere.after(["logs", "-f", "--", "4711"], 5) == ["logs", "--skip=5", "-f", "--", "4711"]
    assert elsewhere.unless_begun(["status"], 0) == ["status"]
    with pytest.raises(HostError, match="in the middle of the answer"):
        elsewhere.unless_begun(["status"], 1)


def test_packed_recipes_are_the_same_on_the_other_side() -> None:
    mine = small_recipe({"engine": {"args": {"a": 1.0, "b": [1, "x"], "c": {"d": None}}, "env": {"X": "1"}}})
    assert recipe.unpacked(recipe.packed([mine, mine])) == [mine, mine]
    (changed,) = recipe.unpacked(recipe.packed([mine]), ("bench.repeats=3",))
    assert changed.bench.repeats == 3


def test_a_model_that_comes_with_the_package_is_the_other_sides_own(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, _ = recipe.load("tiny")
    line = recipe.packed([tiny])
    assert recipe.unpacked(line) == [tiny]
    monkeypatch.setattr(shipped, "folder", lambda name: tmp_path / name)
    assert recipe.unpacked(line)[0].model == str(tmp_path / "jobs" / "tiny-model")


@pytest.mark.parametrize("line", [b"", b"{}\n", b"not json\n", b'{"recipes": [{"name": "x"}]}\n'])
def test_what_is_no_packed_recipe_is_refused(line: bytes) -> None:
    with pytest.raises(UsageError, match="stdin: no recipes"):
        recipe.unpacked(line)


@pytest.mark.parametrize("words", [("status",), ("submit", "dp4"), ("collect", "latest"), ("deploy",),
                                   ("tunnel", "latest"), ("plan", "dp4")])
def test_a_host_without_a_name_is_not_this_machine(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, [*words, "--host", "", "--site", "sandbox"])
    assert done.exit_code == 2
    assert "--host: '' is no name of a host" in done.stderr
