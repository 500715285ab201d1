"""The documents: what they say can be typed, what they point to is there, and what is made from the code is fresh."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from isambard_serve import recipe, run, validity
from isambard_serve.cli import main, options
from isambard_serve.run import RunDir
from tests.unit.helpers import HERE

ROOT = HERE.parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN = [ROOT / "README.md", ROOT / "docs" / "tutorial.md", ROOT / "docs" / "from-5856-to-17900.md"]


@pytest.fixture(scope="module")
def reference() -> Any:
    """The module that writes the reference."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_code_says_now() -> None:
    # In a process of its own: click remembers a command's help option from the first time that it is shown.
    done = subprocess.run([sys.executable, "docs/reference.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "docs/reference.md is stale: run `make docs`"


def test_the_reference_is_checked_and_written_by_its_command(
        reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "TARGET", tmp_path / "reference.md")
    monkeypatch.setattr("sys.argv", ["reference.py", "--check"])
    assert reference.main() == 1
    monkeypatch.setattr("sys.argv", ["reference.py"])
    assert reference.main() == 0
    monkeypatch.setattr("sys.argv", ["reference.py", "--check"])
    assert reference.main() == 0
    (tmp_path / "reference.md").write_text("# Reference\n")
    assert reference.main() == 1


def test_the_reference_has_every_command_key_file_and_reason_code(reference: Any) -> None:
    text = reference.document()
    for command in main.commands:
        assert f"Usage: isambard-serve {command} " in text
    for kind in (recipe.Recipe, recipe.Engine, recipe.Resources, recipe.Bench):
        for key in kind.__struct_fields__:
            assert re.search(rf"\| `(\w+\.)?{key}` \|", text), key
    for name in (*run.FILES, *validity.RULES):
        assert f"| `{name}` |" in text


def test_every_file_of_a_run_directory_is_described() -> None:
    paths = [path for path in vars(RunDir(Path("x"))).values() if isinstance(path, Path) and path != Path("x")]
    first = {path.relative_to("x").parts[0] for path in paths}
    assert first <= {name.rstrip("/") for name in run.FILES}
    assert {name for name in run.FILES if name.rstrip("/") not in first} == {"controller.log"}


def links(text: str) -> list[str]:
    """The targets of a document's links, but for those on the web."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if not target.startswith(("https://", "http://"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_links_to_is_there(document: Path) -> None:
    for target in links(document.read_text(encoding="utf-8")):
        path, _, heading = target.partition("#")
        linked = document.parent / path if path else document
        assert linked.is_file(), target
        headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
        assert not heading or heading in [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings]


def command_lines(text: str) -> list[list[str]]:
    """The words of every command line of isambard-serve: in code blocks (also after other commands), and in text."""
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    inline = re.findall(r"(?<!`)`(isambard-serve [^`]+)`(?!`)", text.replace("\n", " "))
    lines = [*re.findall(r"(?:^|&& |; )(isambard-serve .*)$", blocks, re.MULTILINE), *inline]
    # What follows a comment sign or a redirection is the shell's.
    return [shlex.split(re.split(r"\s(?:>>?|\||&&)\s", line)[0], comments=True) for line in lines]


LINES = [(document.name, words) for document in WRITTEN for words in command_lines(document.read_text("utf-8"))]


@pytest.mark.parametrize(("document", "words"), LINES, ids=[shlex.join(words) for _, words in LINES])
def test_a_command_line_in_a_document_can_be_typed(document: str, words: list[str]) -> None:
    with main.make_context("isambard-serve", words[1:]) as context:
        name, command, rest = main.resolve_command(context, words[1:])
        assert command
        with command.make_context(name, rest, parent=context) as inner:
            if isinstance(command, click.Group):
                name, command, rest = command.resolve_command(inner, rest)
                assert command
                inner = command.make_context(name, rest, parent=inner)
            assert not inner.args


def test_the_documents_command_lines_are_found_and_a_wrong_one_would_be_noticed() -> None:
    assert {document for document, _ in LINES} == {path.name for path in WRITTEN}
    assert len(LINES) > 20
    text = "x\n```\n. bin/activate && isambard-serve diff a b > c   # d\n```\n`isambard-serve show\nx`"
    assert command_lines(text) == [["isambard-serve", "diff", "a", "b"], ["isambard-serve", "show", "x"]]
    for wrong in (["diff", "tp4"], ["status", "--nonsense"], ["submit", "tp4", "--placement", "elsewhere"]):
        with pytest.raises(click.UsageError):
            test_a_command_line_in_a_document_can_be_typed("", ["isambard-serve", *wrong])


@pytest.mark.parametrize("document", WRITTEN, ids=lambda path: path.name)
def test_the_recipes_that_a_document_runs_are_shipped(document: Path) -> None:
    for words in command_lines(document.read_text(encoding="utf-8")):
        if words[1] in ("submit", "plan", "render", "diff", "show"):
            with main.make_context("isambard-serve", words[1:]) as context:
                name, command, rest = main.resolve_command(context, words[1:])
                assert command
                given = command.make_context(name, rest, parent=context).params
            names = [*given.get("names", ()), *(given[key] for key in ("name", "first", "second") if key in given)]
            assert {each for each in names if not each.isupper()} <= {*recipe.names(), *options.PROBE}


def test_the_tutorials_diff_is_what_the_command_prints() -> None:
    from isambard_serve import difference

    shown = [line for change in difference.between("tp4", "dp4") if change.engine for line in change.lines()]
    assert "```\n" + "\n".join(shown) + "\n```\n" in (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


def test_the_table_of_where_time_goes_is_what_the_command_prints() -> None:
    printed = CliRunner().invoke(main, ["trace", str(ROOT / "docs/samples/h200-moe-graph.trace.json.gz")]).stdout
    assert f"```\n{printed}```\n" in (ROOT / "docs" / "trace.md").read_text(encoding="utf-8")


def test_no_tracked_file_names_a_package_indexs_address() -> None:
    listed = subprocess.run(["git", "-c", "safe.directory=*", "ls-files", "-z"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout
    hosts = "|".join(("py" + "pi", "python" + "hosted", "arti" + "factory", "dev" + "pi", "anaconda"))
    address = re.compile(rf"https?://[^\s\"'`<>]*({hosts}|/simple\b|/whl\b)"
                         r"|(index-url|find-links)[ =]+['\"]?(https?:|file:|/)", re.IGNORECASE)
    found = []
    for name in listed.split("\0"):
        path = ROOT / name
        if name and path.is_file():
            text = path.read_bytes().decode(errors="replace")
            found += [f"{name}: {match[0]}" for match in address.finditer(text)]
    assert found == []
