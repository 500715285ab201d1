"""Somebody without a cluster."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import wait_until


@dataclass(frozen=True)
class Newcomer:
    """Acts by commands only, with a home of their own."""

    home: Path

    @property
    def runs(self) -> Path:
        """Where the sandbox keeps runs."""
        return self.home / ".local/share/isambard-serve/runs"

    def does(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run ``isambard-serve ARGUMENTS`` at the sandbox."""
        env = {"HOME": str(self.home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "ISAMBARD_SERVE_SITE": "sandbox"}
        env |= {name: os.environ[name] for name in ("COVERAGE_PROCESS_START",) if name in os.environ}
        return subprocess.run([sys.executable, "-m", "isambard_serve", *arguments], env=env, cwd=self.home, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, check=check, timeout=120)

    def asks(self, *arguments: str) -> Any:
        """What ``isambard-serve ARGUMENTS --json`` prints."""
        return json.loads(self.does(*arguments, "--json").stdout)

    def starts(self, *arguments: str) -> list[str]:
        """Submit recipes and return the run ids."""
        return [run["run_id"] for run in self.asks("submit", *arguments)["runs"]]

    def run_of(self, name: str) -> dict[str, Any]:
        """The run ``name`` as ``status`` reports it."""
        run: dict[str, Any] = self.asks("status", name)["runs"][0]
        return run

    def waits_for(self, name: str, *states: str, timeout_s: float = 60) -> dict[str, Any]:
        """Wait until the run is in one of ``states``, and return it."""

        def reached() -> dict[str, Any] | None:
            run = self.run_of(name)
            return run if run["state"] in states else None

        run = wait_until(reached, timeout_s, f"{name} to be {' or '.join(states)}")
        assert run is not None
        return run

    def events(self, run_id: str, writer: str) -> list[dict[str, Any]]:
        """What ``writer`` has said of the run."""
        path = self.runs / run_id / "events" / f"{writer}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def processes(self) -> list[psutil.Process]:
        """Every process that works on one of this person's runs."""
        return [process for process in psutil.process_iter(["cmdline"])
                if any(str(self.runs) in word for word in process.info["cmdline"] or [])]


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[Newcomer]:
    """Somebody with an empty home. Soon after a test nothing of theirs may be running."""
    person = Newcomer(tmp_path)
    yield person
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not person.processes(), 20, "all processes to end")
    left = person.processes()
    for process in left:
        process.kill()
    psutil.wait_procs(left)
    assert not left, f"left running: {[process.info['cmdline'] for process in left]}"
