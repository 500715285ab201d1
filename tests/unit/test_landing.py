"""One file's way to the disk: what arrives is checked, resumed where it was cut, and named only when it is whole."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import pytest

from isambard_serve import farside, landing, listing
from isambard_serve.errors import ConnectionLostError, HostError, ServeError
from isambard_serve.landing import DamagedError, Landing
from isambard_serve.listing import Listed

CONTENT = bytes(range(256)) * 4000
MTIME_NS = 1_700_000_000_123_456_789


def answer(content: bytes = CONTENT, start: int = 0, *, size: int | None = None, state: int = farside.SENT,
           digest: bytes | None = None, step: int = farside.READ) -> bytes:
    """The far side's answer: the file ``content`` from byte ``start``."""
    size = len(content) if size is None else size
    pieces = [content[at: min(at + step, len(content))] for at in range(start, len(content), step)]
    return b"".join([farside.FILE.pack(state, start, size, MTIME_NS),
                     *(farside.PIECE.pack(len(piece)) + piece for piece in pieces), farside.PIECE.pack(0),
                     digest or hashlib.sha256(content).digest()])


class Folder:
    """The folder that files land in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counted = 0

    def landing(self, size: int = len(CONTENT), path: str = "a/b/x", mode: int = 0o640) -> Landing:
        """The file's way into the folder, as that is now."""
        listed = Listed(path=path, size=size, mtime_ns=MTIME_NS, mode=mode, inode=1)
        return Landing(self.path, listed, listing.scan(self.path))

    def receive(self, stream: bytes, to: Landing | None = None) -> int:
        """What becomes of the file when ``stream`` comes from the far side."""
        source = io.BytesIO(stream)

        def take(count: int) -> bytes:
            data = source.read(count)
            if len(data) < count:
                raise ConnectionLostError("cut")
            return data

        def count(more: int) -> None:
            self.counted += more

        return (to or self.landing()).receive(take, count)

    def files(self) -> dict[str, bytes]:
        """All files in the folder."""
        return {str(path.relative_to(self.path)): path.read_bytes() for path in self.path.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """An empty folder."""
    (tmp_path / "results").mkdir()
    return Folder(tmp_path / "results")


def test_a_file_lands_with_its_content_time_and_mode(folder: Folder) -> None:
    to = folder.landing(mode=0o4750)
    assert (to.want.start, to.want.digest) == (0, "")
    assert folder.receive(answer(), to) == farside.SENT
    status = os.stat(folder.path / "a/b/x")
    assert folder.files() == {"a/b/x": CONTENT}
    assert status.st_mtime_ns == MTIME_NS
    assert status.st_mode & 0o7777 == 0o750
    assert folder.counted == len(CONTENT)


def test_an_empty_file_lands(folder: Folder) -> None:
    assert folder.receive(answer(b"")) == farside.SENT
    assert folder.files() == {"a/b/x": b""}


def test_a_file_that_is_cut_leaves_its_part_and_goes_on_there(folder: Folder) -> None:
    stream = answer(step=100_000)
    with pytest.raises(ConnectionLostError):
        folder.receive(stream[: len(stream) // 2])
    (part,) = folder.files().values()
    assert CONTENT.startswith(part)
    assert len(part) == 500_000
    to = folder.landing()
    assert (to.want.start, to.want.digest) == (len(part), hashlib.sha256(part).hexdigest())
    folder.receive(answer(start=len(part)), to)
    assert folder.files() == {"a/b/x": CONTENT}
    assert folder.counted == len(CONTENT)


def test_a_part_that_is_not_the_files_beginning_is_begun_again(folder: Folder) -> None:
    with pytest.raises(ConnectionLostError):
        folder.receive(answer(b"z" * 300_000)[:-1])
    to = folder.landing()
    assert to.want.start == 300_000
    folder.receive(answer(), to)
    assert folder.files() == {"a/b/x": CONTENT}


def test_a_part_that_is_whole_needs_no_more_than_its_name(folder: Folder) -> None:
    with pytest.raises(ConnectionLostError):
        folder.receive(answer()[:-1])
    folder.counted = 0
    assert folder.receive(answer(start=len(CONTENT))) == farside.SENT
    assert folder.files() == {"a/b/x": CONTENT}
    assert folder.counted == 0


def test_of_a_file_that_has_grown_the_rest_is_asked_for_and_the_old_one_stays_until_it_is_there(folder: Folder) -> None:
    folder.receive(answer(CONTENT[:600_000]))
    to = folder.landing()
    assert to.want.start == 600_000
    stream = answer(start=600_000, step=100_000)
    with pytest.raises(ConnectionLostError):
        folder.receive(stream[:250_000], to)
    files = folder.files()
    assert files["a/b/x"] == CONTENT[:600_000]
    assert files["a/b/.x.part.tmp"] == CONTENT[:800_000]
    folder.receive(answer(start=800_000))
    assert folder.files() == {"a/b/x": CONTENT}


def test_a_file_with_the_same_content_gets_its_time_and_is_left_alone(folder: Folder) -> None:
    folder.receive(answer())
    before = os.stat(folder.path / "a/b/x")
    os.utime(folder.path / "a/b/x", ns=(1, 1))
    assert folder.receive(answer(start=len(CONTENT))) == landing.SAME
    after = os.stat(folder.path / "a/b/x")
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, MTIME_NS)


def test_shorter_content_takes_the_place_of_longer(folder: Folder) -> None:
    folder.receive(answer())
    to = folder.landing(size=5)
    assert to.want.start == 0
    folder.receive(answer(b"short"), to)
    assert folder.files() == {"a/b/x": b"short"}


@pytest.mark.parametrize("state", [farside.GONE, farside.UNREADABLE])
def test_what_is_not_sent_leaves_nothing(folder: Folder, state: int) -> None:
    assert folder.receive(farside.FILE.pack(state, 0, 0, 0)) == state
    assert folder.files() == {}


def test_a_damaged_file_is_not_kept_and_not_built_upon(folder: Folder) -> None:
    with pytest.raises(DamagedError, match="x: arrived damaged"):
        folder.receive(answer(digest=bytes(32)))
    assert folder.files() == {}
    folder.receive(answer())
    with pytest.raises(DamagedError, match="x: arrived damaged"):
        folder.receive(answer(start=len(CONTENT), digest=bytes(32)))


def test_a_part_that_changes_on_the_disk_is_noticed(folder: Folder) -> None:
    with pytest.raises(ConnectionLostError):
        folder.receive(answer()[:-1])
    to = folder.landing()
    (folder.path / "a/b/.x.part.tmp").write_bytes(b"y" * len(CONTENT))
    with pytest.raises(DamagedError, match="arrived damaged"):
        folder.receive(answer(start=len(CONTENT)), to)


def test_a_file_that_shrank_meanwhile_is_not_kept(folder: Folder) -> None:
    with pytest.raises(DamagedError, match="x: shrank while it was copied"):
        folder.receive(answer(CONTENT[:1000], size=len(CONTENT)))
    assert folder.files() == {}


@pytest.mark.parametrize("stream", [
    farside.FILE.pack(77, 0, 5, 0),
    farside.FILE.pack(farside.SENT, 6, 5, 0),
    farside.FILE.pack(farside.SENT, 3, 5, 0),
    farside.FILE.pack(farside.SENT, 0, 5, 0) + farside.PIECE.pack(6) + b"123456",
    farside.FILE.pack(farside.SENT, 0, 2**63, 0) + farside.PIECE.pack(2**32 - 1),
])
def test_an_answer_of_another_form_is_refused(folder: Folder, stream: bytes) -> None:
    with pytest.raises(HostError, match="cannot be understood"):
        folder.receive(stream)
    assert "a/b/x" not in folder.files()


def test_a_link_in_the_parts_place_is_not_followed(folder: Folder, tmp_path: Path) -> None:
    (folder.path / "a/b").mkdir(parents=True)
    (tmp_path / "precious").write_text("precious")
    (folder.path / "a/b/.x.part.tmp").symlink_to(tmp_path / "precious")
    with pytest.raises(ServeError, match="x: cannot be written"):
        folder.receive(answer())
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_link_in_the_files_place_is_replaced_and_not_followed(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (folder.path / "x").symlink_to(tmp_path / "precious")
    folder.receive(answer(), folder.landing(path="x"))
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (folder.path / "x").is_symlink()
    assert folder.files() == {"x": CONTENT}


def test_what_cannot_be_written_or_read_here_is_named(folder: Folder) -> None:
    (folder.path / "a").write_text("a file where a folder must be")
    with pytest.raises(ServeError, match=r"a/b/x: cannot be written: Not a directory"):
        folder.receive(answer())
    (folder.path / "x").mkdir()
    with pytest.raises(ServeError, match=r"x: cannot be written: Is a directory"):
        folder.receive(answer(), folder.landing(path="x"))
    gone = {"y": os.stat(folder.path / "a")}
    with pytest.raises(ServeError, match=r"y: cannot be read: No such file"):
        Landing(folder.path, Listed(path="y", size=100, mtime_ns=1, mode=0o600, inode=1), gone)
