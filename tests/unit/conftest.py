"""What every unit test starts from: an empty home, an empty folder, and none of the caller's variables."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.helpers import Shown, Stubs


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in an empty folder, with a home of one's own and no variable of Slurm's or of this package's."""
    for name in os.environ:
        if name.startswith(("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SUBMITIT_", "ISAMBARD_", "XDG_")):
            monkeypatch.delenv(name)
    for name in ("SCRATCHDIR", "PROJECTDIR"):
        monkeypatch.delenv(name, raising=False)
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.chdir(here)
    return here


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a file below the test's folder, and return its path."""

    def _write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return _write


@pytest.fixture
def user_file(write: Callable[[str, str], Path]) -> Callable[[str, str], Path]:
    """Write a file into the user's own folder of settings."""
    return lambda name, text: write(f"home/config/isambard-serve/{name}", text)


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stubs:
    """Put a folder of stand-ins for other programs first on the PATH."""
    folder = tmp_path / "stubs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return Stubs(folder)


@pytest.fixture
def child() -> Iterator[Shown]:
    """Start processes that are gone after the test, with all that they have started."""
    started: list[subprocess.Popen[bytes]] = []

    def _start(*argv: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(argv, process_group=0))
        return started[-1]

    yield _start
    for each in started:
        with contextlib.suppress(ProcessLookupError):  # nothing of its group is left
            os.killpg(each.pid, signal.SIGKILL)
        each.wait()
