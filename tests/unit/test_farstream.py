"""Talking with a far side: a good one is understood, and a hostile one takes no memory, no time and no file."""

from __future__ import annotations

import contextlib
import io
import os
import random
import struct
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from isambard_serve import farside, listing
from isambard_serve.errors import ConnectionLostError, HostError, ServeError
from isambard_serve.farside import ENTRY, LENGTHS
from isambard_serve.farstream import FarSide, Want
from isambard_serve.ssh.stream import Stream
from isambard_serve.transfer import Fetch
from tests.support.hosts import LocalHost


class Ended:
    """A program that has ended."""

    def __init__(self, code: int | None) -> None:
        self._code = code

    def wait(self) -> int:
        """Its exit code."""
        if self._code is None:
            raise ConnectionLostError("the connection was lost")
        return self._code

    def cut(self) -> None:
        """It has ended."""


class Recorded(LocalHost):
    """A host whose programs all print ``said`` and have ended with ``code``; None: the connection was lost."""

    def __init__(self, said: bytes, code: int | None = None, stderr: bytes = b"") -> None:
        super().__init__()
        self._said = said
        self._code = code
        self._stderr = stderr

    def start(self, argv: Sequence[str]) -> Stream:
        """What a program has left."""
        return Stream(io.BytesIO(), io.BytesIO(self._said), io.BytesIO(self._stderr), Ended(self._code), where="there")


def block(data: bytes, *, packed: bool = False) -> bytes:
    body = zlib.compress(data) if packed else data
    return LENGTHS.pack(len(data), len(body)) + body


def entry(path: bytes, size: int = 2) -> bytes:
    return ENTRY.pack(len(path), size, 7, 0o100600, 1) + path


LAST = ENTRY.pack(0, 0, 0, 0, 0)


def listed(said: bytes, **more: Any) -> list[str]:
    return [each.path for each in FarSide(Recorded(said, **more)).list("/runs/x")]


def test_blocks_are_one_stream_wherever_they_are_cut() -> None:
    data = entry(b"a") + entry(b"b/c") + LAST
    for at in range(1, len(data)):
        assert listed(block(data[:at]) + block(data[at:])) == ["a", "b/c"]
    assert listed(block(data, packed=True)) == ["a", "b/c"]


def test_what_must_not_be_collected_is_left_out_whatever_the_far_side_says() -> None:
    names = [b"a", b"api.key", b"points/API.key", b".x.tmp", b"profile/t.json"]
    far = FarSide(Recorded(block(b"".join(map(entry, names)) + LAST)))
    assert [each.path for each in far.list("/runs/x", ["profile/*"])] == ["a"]


def test_a_hostile_name_ends_the_conversation() -> None:
    for name in (b"../x", b"/etc/passwd", b"a\0b"):
        with pytest.raises(HostError, match="refused"):
            listed(block(entry(name) + LAST))
    with pytest.raises(HostError, match="is the same name"):
        listed(block(entry(b"a") + entry(b"A") + LAST))


def test_a_listing_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_FILES", 10)
    many = b"".join(entry(b"%d" % each) for each in range(11))
    assert len(listed(block(many[: many.rindex(entry(b"10"))] + LAST))) == 10
    with pytest.raises(HostError, match="lists more than 10 files"):
        listed(block(many + LAST))


@pytest.mark.parametrize("stream", [
    LENGTHS.pack(2**32 - 1, 2**32 - 1),
    LENGTHS.pack(farside.BLOCK + 1, 10),
    LENGTHS.pack(10, 11) + bytes(11),
    LENGTHS.pack(0, 0),
    LENGTHS.pack(10, 5) + b"hello",
    LENGTHS.pack(10, 5) + zlib.compress(b"")[:5],
    block(bytes(farside.BLOCK * 4), packed=True).replace(struct.pack(">I", farside.BLOCK * 4),
                                                              struct.pack(">I", farside.BLOCK), 1),
    LENGTHS.pack(2000, len(zlib.compress(bytes(1000)))) + zlib.compress(bytes(1000)),
])
def test_a_block_that_is_too_long_or_not_what_it_says_is_refused(stream: bytes) -> None:
    with pytest.raises(HostError, match="cannot be understood"):
        listed(stream)


def test_what_is_cut_off_is_a_lost_connection() -> None:
    stream = block(entry(b"a") + LAST)
    for at in range(len(stream)):
        with pytest.raises(ConnectionLostError):
            listed(stream[:at])
    with pytest.raises(ConnectionLostError):
        listed(block(entry(b"a")), code=0)


def test_what_the_far_side_says_of_its_own_end_is_told() -> None:
    with pytest.raises(HostError, match="here: /runs/x: Permission denied") as caught:
        listed(b"", code=1, stderr=b"noise\n/runs/x: Permission denied\n")
    assert not isinstance(caught.value, ConnectionLostError)
    with pytest.raises(HostError, match="the far side ended with 3"):
        listed(b"", code=3)


def test_a_program_that_takes_no_question_is_asked_why() -> None:
    class Closed(io.BytesIO):
        def write(self, data: Any) -> int:
            raise BrokenPipeError

    class Deaf(Recorded):
        def start(self, argv: Sequence[str]) -> Stream:
            stream = super().start(argv)
            stream.stdin = Closed()
            return stream

    with pytest.raises(HostError, match="python3: command not found"):
        FarSide(Deaf(b"", code=127, stderr=b"bash: python3: command not found\n"))
    with pytest.raises(ConnectionLostError):
        FarSide(Deaf(b"", code=None))


def test_whoever_waits_for_an_answer_is_let_go_when_it_is_closed() -> None:
    far = FarSide(LocalHost())
    caught: list[HostError] = []

    def wait() -> None:
        try:
            far.take(1)
        except HostError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    far.close()
    far.close()
    waiting.join(10)
    assert [type(each) for each in caught] == [ConnectionLostError]


# A recorded conversation, damaged at random: nothing but this package's own errors, and nothing but whole files.

FILES = {"plan.json": b"{}", "engine/engine.log": b"line\n" * 30_000, "points/c0001.r1/row.json": b"[]" * 50,
         "empty": b"", "noise": random.Random(3).randbytes(100_000)}  # noqa: S311 - no secret


@pytest.fixture(scope="module")
def conversation(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """All that a good far side prints while the files are fetched."""
    root = tmp_path_factory.mktemp("far") / "run"
    for path, content in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    sink = io.BytesIO()
    out = farside.Outlet(sink, lost=lambda: None)
    farside.answer(out, {"list": str(root), "exclude": []})
    files = [Want(listing.Listed(path=path, size=status.st_size, mtime_ns=status.st_mtime_ns, mode=0o600,
                                 inode=status.st_ino)) for path, status in farside.walk(str(root)) if status]
    farside.answer(out, {"root": str(root), "send": [want.question() for want in files]})
    out.close()
    return sink.getvalue()


def fetched(stream: bytes, folder: Path) -> dict[str, bytes]:
    host = Recorded(stream)
    with contextlib.closing(FarSide(host)) as far:
        Fetch("/runs/x", folder).run(host, far)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_recorded_conversation_brings_the_files(conversation: bytes, tmp_path: Path) -> None:
    assert fetched(conversation, tmp_path / "here") == FILES


def test_a_conversation_damaged_at_random_brings_whole_files_or_none(conversation: bytes, tmp_path: Path) -> None:
    trials = int(os.environ.get("ISAMBARD_SERVE_TRIALS", "3")) * 50
    for seed in range(trials):
        dice = random.Random(seed)  # noqa: S311 - no secret
        stream = bytearray(conversation)
        for _ in range(dice.randrange(1, 4)):
            at = dice.choice([dice.randrange(len(stream)), dice.randrange(min(len(stream), 500))])
            how = dice.randrange(4)
            if how == 0:
                stream[at] ^= 1 << dice.randrange(8)
            elif how == 1:
                del stream[at:]
            elif how == 2:
                del stream[at: at + dice.randrange(1, 100)]
            else:
                stream[at:at] = dice.randbytes(dice.randrange(1, 100))
        folder = tmp_path / str(seed)
        with contextlib.suppress(ServeError):
            fetched(bytes(stream), folder)
        for path in folder.rglob("*"):
            whole = path.is_file() and not path.name.endswith(listing.PART)
            assert not whole or path.read_bytes() in FILES.values(), (seed, path)
        assert {path.name for path in tmp_path.iterdir()} <= {"home", "here", *map(str, range(seed + 1))}
