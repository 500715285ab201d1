"""Fetching weights: what is fetched of a model, and how far it is. With the hub's own client: tests/engine."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from isambard_serve import weightfetch

FILES = {"config.json": ("c", 10), "model-1.safetensors": ("a", 1000), "model-2.safetensors": ("b", 500)}


def test_other_forms_of_the_same_weights_are_left_where_they_are() -> None:
    beside = {"pytorch_model.bin": ("x", 1), "original/consolidated.00.pth": ("y", 1), "metal/model.bin": ("z", 1)}
    assert weightfetch.wanted({**FILES, **beside}) == FILES


def test_a_model_without_safetensors_is_fetched_whole() -> None:
    files = {"config.json": ("c", 10), "pytorch_model.bin": ("x", 1)}
    assert weightfetch.wanted(files) == files


def test_whole_files_and_parts_count_and_nothing_counts_twice(tmp_path: Path) -> None:
    assert weightfetch.present(tmp_path / "none", FILES) == 0
    (tmp_path / "a").write_bytes(b"x" * 1000)
    (tmp_path / "a.0123.incomplete").write_bytes(b"x" * 700)
    (tmp_path / "b.4567.incomplete").write_bytes(b"x" * 200)
    (tmp_path / "other").write_bytes(b"x" * 9000)
    assert weightfetch.present(tmp_path, FILES) == 1200
    assert weightfetch.present(tmp_path, {**FILES, "copy": ("a", 1000)}) == 1200


def test_a_large_file_whose_content_is_not_the_hubs_is_removed_and_named(tmp_path: Path) -> None:
    good, bad, gone = (hashlib.sha256(word).hexdigest() for word in (b"good", b"bad", b"gone"))
    for blob, content in ((good, b"good"), (bad, b"bat"), ("0123", b"small")):
        (tmp_path / blob).write_bytes(content)
    files = {"a.safetensors": (good, 4), "b.safetensors": (bad, 3), "c.safetensors": (gone, 4),
             "config.json": ("0123", 5)}
    assert weightfetch.forget_damaged(tmp_path, files) == ["b.safetensors"]
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {good, "0123"}


@pytest.mark.parametrize(("done", "line"), [
    (30_000_000_000, "30.00 of 160.00 GB (19 %), 200 MB/s, 11 min left"),
    (10_000_000_000, "10.00 of 160.00 GB (6 %), 0 MB/s"),
    (160_000_000_000, "160.00 of 160.00 GB (100 %), 1500 MB/s"),
])
def test_progress_says_how_much_how_fast_and_how_long(done: int, line: str) -> None:
    assert weightfetch.progress(done, 160_000_000_000, 10_000_000_000, 100.0) == line


def test_nothing_to_fetch_is_all_of_it() -> None:
    assert weightfetch.progress(0, 0, 0, 0.0) == "0.00 of 0.00 GB (100 %), 0 MB/s"


def test_it_is_said_while_it_goes_on_and_at_the_end(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weightfetch, "REPORT_S", 0.01)
    measured = iter(range(0, 10**12, 10**9))
    reported = threading.Event()

    def measure() -> int:
        value = next(measured)
        if value >= 2 * 10**9:
            reported.set()
        return value

    with weightfetch.reporting(measure, 100 * 10**9):
        assert reported.wait(10)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 3
    assert lines[0].startswith("1.00 of 100.00 GB (1 %)")


class RefusalError(Exception):
    """As the client raises one."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}\n  refused")
        self.response = type("Response", (), {"status_code": status})()


def test_what_the_hub_does_not_show_is_not_asked_for_again(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(model: str, revision: str) -> None:
        raise RefusalError(403)

    monkeypatch.setattr(weightfetch, "fetch", refuse)
    assert weightfetch.main(["them/theirs"]) == 1
    said = capsys.readouterr().out
    assert "error: RefusalError: 403 refused" in said
    assert "HF_TOKEN_PATH" in said


def test_what_may_pass_is_tried_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, str]] = []

    def fail_once(model: str, revision: str) -> None:
        asked.append((model, revision))
        if len(asked) == 1:
            raise ConnectionError("cut")

    monkeypatch.setattr(weightfetch, "fetch", fail_once)
    monkeypatch.setattr(weightfetch, "PAUSE_S", 0.0)
    assert weightfetch.main(["them/theirs", "--revision", "v2"]) == 0
    assert asked == [("them/theirs", "v2")] * 2
    assert "again in 0 s" in capsys.readouterr().out


def test_what_never_works_is_given_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(model: str, revision: str) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(weightfetch, "fetch", fail)
    monkeypatch.setattr(weightfetch, "PAUSE_S", 0.0)
    assert weightfetch.main(["them/theirs"]) == 1
    assert capsys.readouterr().out.count("no network") == weightfetch.ATTEMPTS
