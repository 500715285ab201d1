"""The far side's program: what it lists and sends, that it follows no link, and that any python3 can run it."""

from __future__ import annotations

import ast
import fcntl
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isambard_serve import farside
from isambard_serve.farside import ENTRY, FILE, LENGTHS, PIECE, Folder, Outlet, Squeeze

SOURCE = Path(farside.__file__)
Sent = tuple[int, int, int, int, bytes]
"""State, start, size, mtime and bytes of a file."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run's folder with three files in it."""
    folder = tmp_path / "run"
    (folder / "engine").mkdir(parents=True)
    (folder / "points").mkdir()
    (folder / "plan.json").write_text("{}")
    (folder / "engine" / "engine.log").write_bytes(b"line\n" * 100_000)
    (folder / "points" / "row.json").write_text("[]")
    return folder


def answered(*questions: dict[str, Any]) -> bytes:
    """The stream of answers to ``questions``, unpacked."""
    sink = io.BytesIO()
    out = Outlet(sink, lost=lambda: pytest.fail("nobody reads"))
    for question in questions:
        farside.answer(out, question)
    out.close()
    return b"".join(blocks(sink.getvalue()))


def blocks(stream: bytes) -> Iterator[bytes]:
    source = io.BytesIO(stream)
    while header := source.read(LENGTHS.size):
        length, packed = LENGTHS.unpack(header)
        block = source.read(packed)
        block = zlib.decompress(block) if packed < length else block
        assert len(block) == length <= farside.BLOCK
        yield block


def sent(stream: bytes) -> Iterator[Sent]:
    """The files in a stream of answers; their digests are checked where the file is not cut."""
    source = io.BytesIO(stream)
    while header := source.read(FILE.size):
        state, start, size, mtime_ns = FILE.unpack(header)
        data = b""
        if state == farside.SENT:
            while length := PIECE.unpack(source.read(PIECE.size))[0]:
                assert length <= farside.BLOCK
                data += source.read(length)
            digest = source.read(farside.DIGEST)
            assert start or digest == hashlib.sha256(data).digest()
        yield state, start, size, mtime_ns, data


def question(root: Path, path: str, start: int = 0, digest: str = "", **changed: int) -> dict[str, Any]:
    """Asks for ``path`` as it is now, or as it was listed with ``changed``."""
    status = os.stat(root / path)
    listed = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino, **changed}
    return {"root": str(root), "send": [[path, *listed.values(), start, digest]]}


def ask_for(root: Path, path: str, start: int = 0, digest: str = "", **changed: int) -> Sent:
    """What is sent of ``path`` when it is asked for."""
    (one,) = sent(answered(question(root, path, start, digest, **changed)))
    return one


# Listing.


def paths(root: Path, *exclude: str) -> list[str]:
    return [path for path, _ in farside.walk(str(root), exclude)]


def test_regular_files_are_listed_in_order_with_what_tells_a_change(root: Path) -> None:
    source = io.BytesIO(answered({"list": str(root), "exclude": []}))
    found = []
    while length := (entry := ENTRY.unpack(source.read(ENTRY.size)))[0]:
        found.append((source.read(length).decode(), *entry[1:]))
    status = {path: os.stat(root / path) for path in ("plan.json", "engine/engine.log", "points/row.json")}
    assert found == [(path, each.st_size, each.st_mtime_ns, each.st_mode, each.st_ino)
                     for path, each in status.items()]
    assert not source.read()


def test_links_pipes_keys_and_half_written_files_are_not_listed(root: Path, tmp_path: Path) -> None:
    before = paths(root)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "private").write_text("x")
    (root / "link").symlink_to(outside / "private")
    (root / "folder").symlink_to(outside)
    (root / "loop").symlink_to(root)
    (root / "points" / ".row.json.0123.tmp").write_text("{")
    (root / "api.key").write_text("secret")
    (root / "points" / "API.KEY").write_text("secret")
    os.mkfifo(root / "pipe")
    assert paths(root) == before


def test_a_pattern_leaves_out_whatever_it_matches_in_folders_too(root: Path) -> None:
    (root / "profile" / "rank0").mkdir(parents=True)
    (root / "profile" / "rank0" / "trace.json").write_text("{}")
    assert "profile/rank0/trace.json" in paths(root)
    assert "profile/rank0/trace.json" not in paths(root, "profile/*")
    assert paths(root, "*.json") == ["engine/engine.log"]


def test_a_folder_that_cannot_be_read_is_named_and_one_that_went_away_is_not(
        root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        paths(root / "nowhere")
    with pytest.raises(NotADirectoryError):
        paths(root / "plan.json")
    scandir = os.scandir

    def failing(error: type[OSError]) -> Callable[[str], Any]:
        def scan(path: str) -> Any:
            if str(path).endswith("points"):
                raise error(0, "says the test", str(path))
            return scandir(path)

        return scan

    monkeypatch.setattr(os, "scandir", failing(FileNotFoundError))
    assert paths(root) == ["plan.json", "engine/engine.log"]
    monkeypatch.setattr(os, "scandir", failing(PermissionError))
    assert [(path, bool(status)) for path, status in farside.walk(str(root))] == [
        ("plan.json", True), ("engine/engine.log", True), ("points", False)]
    assert paths(root, "points") == ["plan.json", "engine/engine.log"]
    with pytest.raises(PermissionError):
        paths(root / "points")


def test_a_folder_all_of_which_is_left_out_is_not_looked_at(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir
    seen: list[str] = []

    def watched(path: str) -> Any:
        seen.append(os.path.relpath(path, root))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", watched)
    assert paths(root, "points/*", "engine/e*") == ["plan.json"]
    assert seen == [".", "engine"]


def test_what_may_not_be_looked_at_is_listed_and_said_to_be_unreadable(root: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    lstat = os.lstat

    def refuse(path: str) -> os.stat_result:
        if path.endswith("row.json"):
            raise PermissionError
        return lstat(path)

    monkeypatch.setattr(os, "lstat", refuse)
    assert b"points/row.json" in answered({"list": str(root), "exclude": []})


def test_a_file_that_goes_away_while_it_is_listed_is_passed_over(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lstat = os.lstat

    def vanish(path: str) -> os.stat_result:
        if path.endswith("plan.json"):
            os.unlink(path)
        return lstat(path)

    monkeypatch.setattr(os, "lstat", vanish)
    assert paths(root) == ["engine/engine.log", "points/row.json"]


# Sending.


def test_files_are_sent_whole_in_the_order_asked_for(root: Path) -> None:
    names = ["points/row.json", "engine/engine.log", "plan.json"]
    files = list(sent(answered(*(question(root, name) for name in names))))
    assert [data for *_, data in files] == [(root / name).read_bytes() for name in names]
    assert [each[:4] for each in files] == [
        (farside.SENT, 0, os.stat(root / name).st_size, os.stat(root / name).st_mtime_ns) for name in names]


def test_of_a_file_that_has_grown_what_was_listed_is_sent_with_its_old_time(root: Path) -> None:
    asked = question(root, "engine/engine.log", mtime_ns=7)
    size = asked["send"][0][1]
    with open(root / "engine" / "engine.log", "ab") as file:
        file.write(b"more\n")
    ((*told, data),) = sent(answered(asked))
    assert told == [farside.SENT, 0, size, 7]
    assert data == b"line\n" * 100_000


def test_a_file_that_was_replaced_is_sent_as_it_is_now(root: Path) -> None:
    asked = question(root, "plan.json")
    (root / "new").write_text("another, and a longer one")
    (root / "new").replace(root / "plan.json")
    ((_, _, size, mtime_ns, data),) = sent(answered(asked))
    assert data == b"another, and a longer one"
    assert (size, mtime_ns) == (len(data), os.stat(root / "plan.json").st_mtime_ns)


def test_a_file_that_was_cut_short_before_it_is_opened_is_sent_as_it_is_now(root: Path) -> None:
    state, _, size, _, data = ask_for(root, "points/row.json", size=100)
    assert (state, size, data) == (farside.SENT, 2, b"[]")


def test_bytes_that_are_there_already_are_not_sent_again(root: Path) -> None:
    content = (root / "engine" / "engine.log").read_bytes()
    for start in (1, 300_001, len(content)):
        digest = hashlib.sha256(content[:start]).hexdigest()
        _, told, size, _, data = ask_for(root, "engine/engine.log", start, digest)
        assert (told, size) == (start, len(content))
        assert data == content[start:]


@pytest.mark.parametrize("start", [3, 500_000, 500_001])
def test_other_bytes_or_too_many_are_not_built_upon(root: Path, start: int) -> None:
    _, told, _, _, data = ask_for(root, "engine/engine.log", start, hashlib.sha256(b"other").hexdigest())
    assert told == 0
    assert data == (root / "engine" / "engine.log").read_bytes()


def test_the_digest_is_of_the_whole_file_also_where_only_its_rest_is_sent(root: Path) -> None:
    content = (root / "engine" / "engine.log").read_bytes()
    stream = answered(question(root, "engine/engine.log", 1000, hashlib.sha256(content[:1000]).hexdigest()))
    assert stream.endswith(hashlib.sha256(content).digest())


def test_a_file_that_shrinks_while_it_is_sent_ends_early(root: Path) -> None:
    sink = io.BytesIO()
    out = Outlet(sink, lost=lambda: None)
    descriptor = os.open(root / "engine" / "engine.log", os.O_RDWR)
    put = out.put

    def shrink_first(data: bytes) -> None:
        os.truncate(descriptor, 300_000)
        put(data)

    out.put = shrink_first  # type: ignore[method-assign]
    status = os.fstat(descriptor)
    farside.send_file(out, descriptor, (status.st_size, status.st_mtime_ns, status.st_ino), 0, "")
    out.close()
    ((_, _, size, _, data),) = sent(b"".join(blocks(sink.getvalue())))
    assert (size, len(data)) == (500_000, 300_000)


def test_what_went_away_and_what_cannot_be_read_is_told_apart(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [question(root, name) for name in ("plan.json", "points/row.json", "engine/engine.log")]
    (root / "plan.json").unlink()
    (root / "points").rename(root / "elsewhere")
    opened = Folder.open

    def refuse(self: Folder, path: str) -> int:
        if path == "engine/engine.log":
            raise PermissionError(13, "no")
        return opened(self, path)

    monkeypatch.setattr(Folder, "open", refuse)
    states = [state for state, *_ in sent(answered(*asked))]
    assert states == [farside.GONE, farside.GONE, farside.UNREADABLE]


@pytest.mark.parametrize("where", ["file", "folder", "pipe"])
def test_what_has_become_a_link_or_a_pipe_is_gone(root: Path, tmp_path: Path, where: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "row.json").write_text("secret")
    asked = question(root, "points/row.json")
    (root / "points" / "row.json").unlink()
    if where == "folder":
        (root / "points").rmdir()
        (root / "points").symlink_to(outside)
    elif where == "file":
        (root / "points" / "row.json").symlink_to(outside / "row.json")
    else:
        os.mkfifo(root / "points" / "row.json")
    assert [state for state, *_ in sent(answered(asked))] == [farside.GONE]


def test_folders_are_left_and_entered_whatever_the_order_and_none_stays_open(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    folder = Folder(str(root))
    for path in ("points/row.json", "plan.json", "engine/engine.log", "nowhere/x", "plan.json", "points/row.json"):
        if path == "nowhere/x":
            with pytest.raises(FileNotFoundError):
                folder.open(path)
        else:
            with open(folder.open(path), "rb") as file:
                assert file.read() == (root / path).read_bytes()
    folder.close()
    assert len(os.listdir("/proc/self/fd")) == before


# Compression.


class Link:
    """A clock that compression and the link move on, each at its rate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, compress_s: float, link_s: float) -> None:
        self.now = 0.0
        self.squeeze = Squeeze(clock=lambda: self.now)
        self._link_s = link_s
        compress = zlib.compress

        def slow(data: bytes, level: int) -> bytes:
            self.now += len(data) * compress_s
            return compress(data, level)

        monkeypatch.setattr(zlib, "compress", slow)

    def carry(self, block: bytes, times: int) -> list[int]:
        """Sends a block again and again; the bytes that it took each time."""
        took = []
        for _ in range(times):
            packed = self.squeeze(memoryview(block))
            assert packed == block or zlib.decompress(packed) == block
            took.append(len(packed))
            self.squeeze.note_link(len(packed), len(packed) * self._link_s)
        return took


_DICE = random.Random(1)  # noqa: S311 - no secret
LOG = b"".join(b"INFO generation throughput: %d tokens/s, running: %d reqs\n" % (_DICE.randrange(10**5), each)
               for each in range(5_000))
NOISE = _DICE.randbytes(250_000)


def test_on_a_slow_link_what_shrinks_is_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(Link(monkeypatch, compress_s=4e-9, link_s=5e-8).carry(LOG, 100)) < len(LOG) / 3


def test_on_a_link_faster_than_the_compressor_blocks_go_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    took = Link(monkeypatch, compress_s=4e-9, link_s=1e-9).carry(LOG, 200)
    assert took[100:] == [len(LOG)] * 100


def test_what_does_not_shrink_is_only_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch, compress_s=2e-8, link_s=5e-8)
    assert link.carry(NOISE, 100) == [len(NOISE)] * 100
    # Less than a fiftieth of the time that compressing it all would take.
    assert link.now < 2e-8 * len(NOISE) * 100 / 50


def test_a_turn_of_somebody_elses_on_the_processor_does_not_count_against_compression(
        monkeypatch: pytest.MonkeyPatch) -> None:
    compress = zlib.compress

    def interrupted(data: bytes, level: int) -> bytes:
        time.sleep(0.02)
        return compress(data, level)

    monkeypatch.setattr(zlib, "compress", interrupted)
    assert len(Squeeze()(memoryview(LOG))) < len(LOG) / 3


def test_a_link_that_turns_slow_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch, compress_s=4e-9, link_s=1e-9)
    link.carry(LOG, 100)
    link._link_s = 5e-8
    assert link.carry(LOG, 100)[50:] == [min(link.carry(LOG, 1))] * 50


@pytest.mark.parametrize(("link_s", "times"), [(1e-9, 1), (5e-8, 0)])
def test_a_fast_link_is_told_of_once_and_a_steadily_slow_one_never(
        monkeypatch: pytest.MonkeyPatch, link_s: float, times: int) -> None:
    class Sink(io.BytesIO):
        def write(self, data: Any) -> int:
            now[0] += len(data) * link_s
            return super().write(data)

    now = [0.0]
    monkeypatch.setattr(farside, "time", SimpleNamespace(perf_counter=lambda: now[0], clock_gettime=lambda _: 0.0,
                                                         CLOCK_THREAD_CPUTIME_ID=0))
    told = []
    out = Outlet(Sink(), lost=lambda: None, fast=lambda: told.append(now[0]))
    for _ in range(100):
        out.put(NOISE)
        out.flush()
    out.close()
    assert len(told) == times


def test_a_pipe_is_made_as_wide_as_a_block_and_anything_else_is_left_alone(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    try:
        farside.widen(writer)
        assert fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ) == farside.BLOCK
    finally:
        os.close(reader)
        os.close(writer)
    with open(tmp_path / "file", "w") as file:
        farside.widen(file.fileno())


# The program.


def test_it_needs_no_python_newer_than_3_6_and_nothing_but_its_library() -> None:
    tree = ast.parse(SOURCE.read_text(), feature_version=(3, 6))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules <= sys.stdlib_module_names
    assert not modules & {"__future__", "dataclasses"}  # both came with 3.7


def test_it_answers_on_stdout_until_its_input_ends(root: Path) -> None:
    questions = [{"list": str(root), "exclude": ["*.log", "*.json"]}, question(root, "plan.json")]
    done = subprocess.run([sys.executable, "-I", "-S", "-c", SOURCE.read_text()], check=True, capture_output=True,
                          input=b"".join(json.dumps(each).encode() + b"\n" for each in questions))
    stream = b"".join(blocks(done.stdout))
    assert stream.startswith(ENTRY.pack(0, 0, 0, 0, 0))
    assert [data for *_, data in sent(stream[ENTRY.size:])] == [b"{}"]
    assert done.stderr == b""


class Standard:
    """A standard stream that is bytes in memory."""

    def __init__(self, data: bytes = b"") -> None:
        self.buffer = io.BytesIO(data)


def test_what_cannot_be_listed_is_said_on_stderr(root: Path, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", Standard(json.dumps({"list": "/nowhere", "exclude": []}).encode()))
    monkeypatch.setattr(sys, "stdout", Standard())
    assert farside.main() == 1
    assert capsys.readouterr().err == "/nowhere: No such file or directory\n"
    monkeypatch.setattr(sys, "stdin", Standard())
    assert farside.main() == 0


def test_it_ends_when_nobody_reads_any_more(root: Path) -> None:
    program = subprocess.Popen([sys.executable, "-I", "-S", "-c", SOURCE.read_text()], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    assert program.stdin
    assert program.stdout
    program.stdout.close()
    program.stdin.write(json.dumps(question(root, "engine/engine.log")).encode() + b"\n")
    program.stdin.flush()
    assert program.wait(20) == 1
    program.stdin.close()
