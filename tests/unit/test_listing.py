"""What a far side lists: hostile names are refused, and what is here already is not wanted again."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from isambard_serve import farside, listing
from isambard_serve.errors import HostError, ServeError
from isambard_serve.listing import Listed

REGULAR = stat.S_IFREG | 0o640


def listed(path: str, size: int = 5, mtime_ns: int = 7) -> Listed:
    return Listed(path=path, size=size, mtime_ns=mtime_ns, mode=0o640, inode=1)


def here(**sizes: int) -> dict[str, os.stat_result]:
    """Files of these sizes, all of mtime 7 ns."""
    return {path: os.stat_result((REGULAR, 0, 0, 1, 0, 0, size, 0, 0, 0, 0.0, 0.0, 0.0, 0, 7, 0))
            for path, size in sizes.items()}


@pytest.mark.parametrize("path", ["plan.json", "points/c0001.r1/bench.json", "engine/käse.log", "..plan", "a b", "..."])
def test_a_plain_relative_name_is_taken(path: str) -> None:
    assert listing.decoded(path.encode(), 5, 7, REGULAR | stat.S_ISUID, 1) == Listed(
        path=path, size=5, mtime_ns=7, mode=0o640 | stat.S_ISUID, inode=1)


@pytest.mark.parametrize("path", [
    "/etc/passwd", "../x", "a/../../x", "a/..", ".", "./x", "a//b", "a/", "/", "..", "a\\..\\b", "C:\\x",
    "a\0b", "a\nb", "a\x1b[31mb", "a\u202eb", "x" * 4097,
])
def test_a_name_that_leads_elsewhere_or_cannot_be_shown_is_refused(path: str) -> None:
    with pytest.raises(HostError, match="refused: its name ") as caught:
        listing.decoded(path.encode(), 5, 7, REGULAR, 1)
    assert str(caught.value).isprintable() or "\n  → " in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_name_that_is_no_text_is_refused_and_shown_all_the_same() -> None:
    with pytest.raises(HostError, match=r"'caf\\xe9': refused: its name is not UTF-8"):
        listing.decoded(b"caf\xe9", 5, 7, REGULAR, 1)


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFDIR, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK,
                                  0])
def test_only_regular_files_are_taken(kind: int) -> None:
    with pytest.raises(HostError, match="no regular file"):
        listing.decoded(b"x", 5, 7, kind | 0o644, 1)


@pytest.mark.parametrize(("first", "second"), [
    ("a/x", "a/x"), ("a/x", "A/X"), ("straße", "STRASSE"), ("caf\u00e9", "cafe\u0301"), ("K", "\u212a"),
])
def test_two_names_that_are_one_on_other_systems_are_refused(first: str, second: str) -> None:
    with pytest.raises(HostError, match="is the same name"):
        listing.check_apart([listed("other"), listed(first), listed(second)])


@pytest.mark.parametrize(("file", "inside"), [("a", "a/b"), ("a/b", "A/B/c/d"), ("a", "a/b/c")])
def test_a_name_that_would_be_a_file_and_a_folder_is_refused(file: str, inside: str) -> None:
    for order in ([file, inside], [inside, file]):
        with pytest.raises(HostError, match="cannot be a file and the folder of"):
            listing.check_apart(map(listed, order))


def test_names_that_differ_are_let_through() -> None:
    listing.check_apart(map(listed, ["a", "b/a", "b/c/a", "ab", "b/ab", "A.b"]))


def test_only_what_is_not_here_with_its_size_and_time_is_missing() -> None:
    all_listed = [listed(path) for path in ("same", "longer", "shorter", "new")] + [listed("later", mtime_ns=8)]
    own = here(same=5, longer=6, shorter=4, later=5)
    assert [each.path for each in listing.missing(all_listed, own)] == ["longer", "shorter", "new", "later"]


def test_a_file_begins_with_its_part_or_with_what_it_was_unless_that_is_too_long() -> None:
    own = here(**{"a/.x.part.tmp": 3, "a/x": 4, "y": 5, ".z.part.tmp": 6, "z": 2, "w": 6})
    assert listing.beginning(listed("a/x"), own) == ("a/.x.part.tmp", 3)
    assert listing.beginning(listed("y"), own) == ("y", 5)
    assert listing.beginning(listed("z"), own) == ("z", 2)
    assert listing.beginning(listed("w"), own)[1] == 0
    assert listing.beginning(listed("v"), own)[1] == 0


def test_no_far_side_can_list_the_name_of_a_part() -> None:
    assert not farside.wanted(listing.part_of("points/row.json"))


def test_a_folder_is_scanned_without_following_links(tmp_path: Path) -> None:
    assert listing.scan(tmp_path / "nowhere") == {}
    (tmp_path / "run" / "a" / "b").mkdir(parents=True)
    (tmp_path / "run" / "a" / "b" / "x").write_text("12345")
    (tmp_path / "run" / "y").write_text("1")
    (tmp_path / "run" / "link").symlink_to(tmp_path / "run" / "y")
    (tmp_path / "run" / "loop").symlink_to(tmp_path / "run")
    assert {path: status.st_size for path, status in listing.scan(tmp_path / "run").items()} == {"a/b/x": 5, "y": 1}


def test_parts_that_were_not_needed_go_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in (".x.part.tmp", "x"):
        (tmp_path / "run" / name).write_text("")
    listing.forget_parts(tmp_path / "run", [".x.part.tmp", "x", ".gone.part.tmp"])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["x"]


def test_more_than_there_is_room_for_is_refused_before_a_byte_comes() -> None:
    listing.check_room([listed("a", size=60), listed("b", size=40)], 100, Path("results"))
    with pytest.raises(ServeError, match=r"results: 18,446,744,073,709,551,655 bytes are to come, .* room for 100"):
        listing.check_room([listed("a", size=2**64 - 1), listed("b", size=40)], 100, Path("results"))
