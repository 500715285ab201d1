"""Collecting from another host, which is this machine: everything once, whole, and after a cut only what is missing."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from isambard_serve import farside, farstream, transfer
from isambard_serve.collect import Copied
from isambard_serve.errors import ConnectionLostError, HostError, ServeError, UsageError
from isambard_serve.farstream import FarSide, Want
from isambard_serve.landing import Landing
from isambard_serve.listing import Listed
from isambard_serve.run import RunDir
from isambard_serve.ssh.stream import Stream
from isambard_serve.transfer import Fetch
from tests.support.hosts import LocalHost
from tests.support.waiting import wait_until
from tests.unit.helpers import small_plan, written_run

DICE = random.Random(5)  # noqa: S311 - no secret


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with a log, a profile, many small files and a key."""
    run = written_run(small_plan(tmp_path / "runs"))
    run.engine_log.write_bytes(b"".join(b"line %d\n" % each for each in range(100_000)))
    run.key.write_text("secret")
    (run.path / "profile").mkdir()
    (run.path / "profile" / "trace.bin").write_bytes(DICE.randbytes(1_500_000))
    for each in range(150):
        point = run.points / f"c{each:04d}.r1"
        point.mkdir()
        (point / "row.json").write_text(f"[{each}]")
    return run


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Where the results go."""
    return tmp_path / "results" / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def evidence(run: RunDir) -> dict[str, bytes]:
    return {name: content for name, content in contents(run.path).items() if name != "api.key"}


def fetch(run: RunDir, here: Path, host: LocalHost | None = None, **more: Any) -> Copied:
    return run_over(host or LocalHost(), Fetch(str(run.path), here, **more))


def run_over(host: LocalHost, fetching: Fetch) -> Copied:
    with closing(FarSide(host)) as far:
        return fetching.run(host, far)


class Asked:
    """Which files the far side was asked for, and how many of their bytes were on the way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wants: list[Want] = []
        ask = FarSide.ask

        def note(far: FarSide, root: str, wants: Sequence[Want]) -> None:
            self.wants += wants
            ask(far, root, wants)

        monkeypatch.setattr(FarSide, "ask", note)

    def paths(self) -> list[str]:
        """The files that were asked for, in order."""
        return [want.listed.path for want in self.wants]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What the far side is asked for."""
    return Asked(monkeypatch)


def test_everything_comes_once_but_for_the_key(run: RunDir, here: Path, asked: Asked) -> None:
    copied = fetch(run, here)
    assert contents(here) == evidence(run)
    assert copied == Copied(files=153, bytes=sum(map(len, evidence(run).values())), unchanged=0)
    assert sorted(asked.paths()) == sorted(evidence(run))


def test_an_unchanged_run_is_not_read_again(run: RunDir, here: Path, asked: Asked) -> None:
    fetch(run, here)
    asked.wants.clear()
    assert fetch(run, here) == Copied(files=0, bytes=0, unchanged=153)
    assert not asked.wants


def test_of_a_log_that_has_grown_only_the_rest_comes(run: RunDir, here: Path, asked: Asked) -> None:
    fetch(run, here)
    asked.wants.clear()
    with open(run.engine_log, "ab") as file:
        file.write(b"more\n")
    assert fetch(run, here) == Copied(files=1, bytes=5, unchanged=152)
    assert asked.paths() == ["engine/engine.log"]
    assert contents(here) == evidence(run)


def test_a_file_that_was_only_touched_is_compared_and_not_sent(run: RunDir, here: Path) -> None:
    fetch(run, here)
    os.utime(run.engine_log, ns=(1, 1))
    assert fetch(run, here) == Copied(files=0, bytes=0, unchanged=153)
    assert fetch(run, here).unchanged == 153
    assert os.stat(here / "engine" / "engine.log").st_mtime_ns == 1


def test_a_file_that_was_changed_here_is_mended(run: RunDir, here: Path) -> None:
    fetch(run, here)
    (here / "engine" / "engine.log").write_bytes(b"other")
    (here / "plan.json").unlink()
    assert fetch(run, here).files == 2
    assert contents(here) == evidence(run)


def test_what_is_excluded_stays_there(run: RunDir, here: Path) -> None:
    fetch(run, here, exclude=["profile/*", "points/c00*"])
    assert set(contents(here)) == {name for name in evidence(run) if not name.startswith(("profile/", "points/c00"))}


def test_what_else_lies_here_is_left_alone(run: RunDir, here: Path) -> None:
    here.mkdir(parents=True)
    (here / "results.csv").write_text("mine")
    (here / "points").mkdir()
    (here / "points" / ".left.json.part.tmp").write_text("of a run that was collected long ago")
    fetch(run, here)
    assert contents(here) == {**evidence(run), "results.csv": b"mine"}


def test_it_says_what_is_to_come_and_what_has_come(run: RunDir, here: Path) -> None:
    class Bar:
        begun: list[int] = []
        done = 0

        def begin(self, total: int) -> None:
            self.begun.append(total)

        def advance(self, count: int) -> None:
            self.done += count

    bar = Bar()
    copied = fetch(run, here, progress=bar)
    assert bar.begun == [copied.bytes]
    assert bar.done == copied.bytes


# Cuts.


@pytest.mark.parametrize("cut", [0, 10, 10_000, 100_000, 1_500_000])
def test_after_a_cut_what_is_whole_stays_and_the_rest_comes(run: RunDir, here: Path, asked: Asked, cut: int) -> None:
    fetching = Fetch(str(run.path), here)
    host = LocalHost(cuts=[cut])
    with pytest.raises(ConnectionLostError):
        run_over(host, fetching)
    came, there = contents(here), evidence(run)
    whole = {name for name in came if not name.endswith(".part.tmp")}
    assert all(came[name] == there[name] for name in whole)
    parts = [len(content) for name, content in came.items() if name.endswith(".part.tmp")]
    assert len(parts) <= 1
    asked.wants.clear()
    copied = run_over(host, fetching)
    assert contents(here) == there
    assert not whole & set(asked.paths())
    assert [want.start for want in asked.wants if want.start] == [size for size in parts if size]
    assert copied == Copied(files=153, bytes=sum(map(len, there.values())), unchanged=0)


def test_several_streams_share_the_files_and_one_that_is_cut_ends_all(
        run: RunDir, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "TRIAL_S", 0.0)
    monkeypatch.setattr(transfer, "MAX_STREAMS", 2)
    host = LocalHost(cuts=[None, 100])
    askers: list[FarSide] = []
    ask = FarSide.ask

    def ask_once_both_do(far: FarSide, root: str, wants: Sequence[Want]) -> None:
        askers.append(far)
        wait_until(lambda: len(set(map(id, askers))) > 1, 20, "the second stream to ask")
        ask(far, root, wants)

    monkeypatch.setattr(FarSide, "ask", ask_once_both_do)
    with pytest.raises(ConnectionLostError):
        fetch(run, here, host)
    assert len(host.started) == 2
    fetch(run, here)
    assert contents(here) == evidence(run)


def test_a_host_that_allows_one_program_only_does_it_with_one(run: RunDir, here: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    class Narrow(LocalHost):
        def start(self, argv: Sequence[str]) -> Stream:
            if self.started:
                raise HostError("no more sessions")
            return super().start(argv)

    monkeypatch.setattr(transfer, "TRIAL_S", 0.0)
    fetch(run, here, Narrow())
    assert contents(here) == evidence(run)


# What goes wrong.


def test_two_collections_do_not_write_to_one_folder(run: RunDir, here: Path) -> None:
    class Second:
        def begin(self, total: int) -> None:
            with pytest.raises(UsageError, match="another collection writes here"):
                fetch(run, here)

        def advance(self, count: int) -> None:
            """The first one goes on."""

    fetch(run, here, progress=Second())
    assert contents(here) == evidence(run)


def test_a_file_that_went_away_after_it_was_listed_is_passed_over(run: RunDir, here: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    _between_listing_and_asking(monkeypatch, run.engine_log.unlink)
    assert fetch(run, here).files == 152
    assert contents(here) == evidence(run)


def test_a_file_that_cannot_be_read_there_is_named_and_the_others_come(run: RunDir, here: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    receive = Landing.receive

    def refused(self: Landing, take: Any, count: Callable[[int], None]) -> int:
        state = receive(self, take, count)
        return farside.UNREADABLE if self.want.listed.path.startswith(("plan", "engine")) else state

    monkeypatch.setattr(Landing, "receive", refused)
    with pytest.raises(ServeError, match=r"here:/.*: plan.json and 1 more cannot be read there"):
        fetch(run, here)
    assert set(contents(here)) == set(evidence(run))


def test_a_run_that_is_not_there_is_an_error_of_the_host(run: RunDir, here: Path) -> None:
    with pytest.raises(HostError, match="/nowhere: No such file or directory"):
        run_over(LocalHost(), Fetch("/nowhere", here))


def test_a_disk_without_room_is_noticed_before_a_byte_comes(run: RunDir, here: Path, asked: Asked,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(ServeError, match="room for 1,000"):
        fetch(run, here)
    assert not asked.wants


def _between_listing_and_asking(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    listed = FarSide.list

    def then_act(far: FarSide, root: str, exclude: Sequence[str] = ()) -> list[Listed]:
        found = listed(far, root, exclude)
        act()
        return found

    monkeypatch.setattr(FarSide, "list", then_act)


# Sharing out.


def listed(*sizes: int) -> list[Listed]:
    return [Listed(path=f"f{each}", size=size, mtime_ns=1, mode=0o600, inode=each) for each, size in enumerate(sizes)]


def test_a_batch_is_few_enough_files_and_bytes_enough() -> None:
    todo = listed(*[10] * 300, transfer.BATCH_BYTES, 5, transfer.BATCH_BYTES - 5, 1)
    assert [len(batch) for batch in transfer.batches(todo)] == [128, 128, 45, 2, 1]
    assert [each for batch in transfer.batches(todo) for each in batch] == todo
    assert list(transfer.batches([])) == []


def test_a_question_fits_into_a_pipe() -> None:
    path = "points/c0001.r1/" + "x" * 60
    want = Want(Listed(path=path, size=2**40, mtime_ns=2**62, mode=0o600, inode=2**62), 2**40,
                hashlib.sha256().hexdigest())
    question = farstream._line({"root": "/scratch/" + "y" * 100, "send": [want.question()] * transfer.BATCH_FILES})
    assert len(question) < 1 << 16


def test_further_streams_are_for_what_takes_long(run: RunDir, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = LocalHost()
    fetch(run, here, host)
    assert len(host.started) == 1  # it was soon over
    monkeypatch.setattr(transfer, "TRIAL_S", 0.0)
    host = LocalHost()
    fetch(run, here, host, exclude=["*.json", "*.log"])
    assert len(host.started) == 1  # there is nothing to share
