"""Collecting: every byte but the keys, whole files only, and nothing twice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from isambard_serve import collect
from isambard_serve.collect import Copied
from isambard_serve.errors import ServeError
from isambard_serve.run import RunDir, write_whole
from tests.unit.helpers import small_plan, written_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with a log, a point and a key."""
    run = written_run(small_plan(tmp_path / "runs"))
    run.engine_log.write_bytes(b"line\n" * 1000)
    (run.points / "c0001.r1").mkdir()
    (run.points / "c0001.r1" / "bench.json").write_text("{}")
    write_whole(run.key, "secret")
    return run


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Where the results go."""
    return tmp_path / "results" / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_file_is_copied_byte_for_byte_but_the_key(run: RunDir, here: Path) -> None:
    copied = collect.collect(run, here)
    wanted = {name: content for name, content in contents(run.path).items() if name != "api.key"}
    assert contents(here) == wanted
    assert set(wanted) == {"plan.json", "engine/engine.log", "points/c0001.r1/bench.json"}
    assert copied == Copied(files=3, bytes=sum(map(len, wanted.values())), unchanged=0)


def test_a_key_is_never_copied_wherever_it_lies(run: RunDir, here: Path) -> None:
    write_whole(run.points / "api.key", "secret")
    collect.collect(run, here)
    assert "api.key" not in {path.name for path in here.rglob("*")}


def test_what_is_here_already_is_left_alone(run: RunDir, here: Path) -> None:
    collect.collect(run, here)
    before = {path: path.stat() for path in here.rglob("*")}
    assert collect.collect(run, here) == Copied(files=0, bytes=0, unchanged=3)
    assert {path: path.stat().st_mtime_ns for path in before} == {
        path: stat.st_mtime_ns for path, stat in before.items()}
    assert {path: path.stat().st_ino for path in before} == {path: stat.st_ino for path, stat in before.items()}


@pytest.mark.parametrize("other", [b"x" * 5000, b"shorter", b"y" * 6000])
def test_other_content_under_the_same_name_is_replaced(run: RunDir, here: Path, other: bytes) -> None:
    target = here / "engine" / "engine.log"
    target.parent.mkdir(parents=True)
    target.write_bytes(other)
    assert collect.collect(run, here).files == 3
    assert target.read_bytes() == run.engine_log.read_bytes()


def test_of_a_file_that_grows_what_it_had_is_taken_now_and_the_rest_later(
        run: RunDir, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grow_first(source: Path, target: Path, length: int) -> None:
        with open(source, "ab") as file:
            file.write(b"more\n")
        copy(source, target, length)

    copy = collect._copy
    monkeypatch.setattr(collect, "_copy", grow_first)
    collect.collect(run, here)
    assert (here / "engine" / "engine.log").read_bytes() == b"line\n" * 1000
    monkeypatch.setattr(collect, "_copy", copy)
    collect.collect(run, here)
    assert (here / "engine" / "engine.log").read_bytes() == b"line\n" * 1000 + b"more\n"


def test_a_file_that_shrinks_while_it_is_copied_is_an_error_and_leaves_no_part(
        run: RunDir, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = collect._copy
    monkeypatch.setattr(collect, "_copy", lambda source, target, length: copy(source, target, length + 1))
    with pytest.raises(ServeError, match="shrank while it was copied"):
        collect.collect(run, here)
    assert contents(here) == {}


def test_a_file_that_disappears_meanwhile_is_passed_over(
        run: RunDir, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = collect._copy

    def vanish(source: Path, target: Path, length: int) -> None:
        if source == run.engine_log:
            source.unlink()
        copy(source, target, length)

    monkeypatch.setattr(collect, "_copy", vanish)
    assert collect.collect(run, here).files == 2
    assert set(contents(here)) == {"plan.json", "points/c0001.r1/bench.json"}


def test_links_pipes_and_half_written_files_stay_where_they_are(run: RunDir, here: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "private").write_text("x")
    (run.path / "link").symlink_to(outside / "private")
    (run.path / "linked-folder").symlink_to(outside)
    (run.points / "dangling").symlink_to("nowhere")
    (run.path / ".jobs.json.0123abcd.tmp").write_text("{")
    os.mkfifo(run.path / "pipe")
    collect.collect(run, here)
    assert set(contents(here)) == {"plan.json", "engine/engine.log", "points/c0001.r1/bench.json"}


def test_what_cannot_be_read_is_named_and_all_else_comes(run: RunDir, here: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who may read everything."""
    scandir, copy = os.scandir, collect._copy

    def scan(path: str) -> Any:
        if str(path).endswith("points"):
            raise PermissionError(13, "says the test", path)
        return scandir(path)

    def refuse(source: Path, target: Path, length: int) -> None:
        if source == run.engine_log:
            raise PermissionError(13, "says the test", str(source))
        copy(source, target, length)

    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr(collect, "_copy", refuse)
    with pytest.raises(ServeError, match=r"engine/engine\.log and 1 more cannot be read there"):
        collect.collect(run, here)
    assert set(contents(here)) == {"plan.json"}


def test_a_place_that_cannot_be_written_is_named(run: RunDir, here: Path) -> None:
    here.mkdir(parents=True)
    (here / "engine").write_text("a file where a folder must be")
    with pytest.raises(ServeError, match=r"engine\.log: cannot be written: "):
        collect.collect(run, here)
    (here / "engine").unlink()
    (here / "engine" / "engine.log").mkdir(parents=True)
    with pytest.raises(ServeError, match=r"engine\.log: cannot be written: Is a directory"):
        collect.collect(run, here)
    assert not list(here.rglob("*.tmp"))
