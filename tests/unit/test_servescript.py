"""The serve script of a run in a container, under bash: it stays for its watcher's end, and clears up after it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from isambard_serve import launch
from tests.support.waiting import wait_until
from tests.unit.helpers import RUN_ID, small_plan, written_run

PYTHON = """#!/bin/bash
# In the place of Python: notes what it is started as; the watcher then waits to be ended.
echo "$2" >> "$3/started"
case $2 in
  isambard_serve.prepare) echo port=1 > "$3/slots.sh"; echo membind=\\(\\) numa_bind=\\(\\) >> "$3/slots.sh"
                          echo secret > "$3/api.key" ;;
  isambard_serve.watch) trap 'exit 7' TERM; echo $$ > "$3/watcher.tmp"; mv "$3/watcher.tmp" "$3/watcher"
                        while :; do sleep 0.02; done ;;
  isambard_serve.nodelocal) while [ -e "$3/held" ]; do sleep 0.02; done; echo cleared >> "$3/started" ;;
esac
"""


@contextmanager
def running(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, Callable[[], list[str]]]]:
    """The script, its watcher's pid, and what tells the modules that were started so far."""
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    plan = small_plan(folder / "runs", python=str(python), local_dir=str(folder / "local"))
    run = written_run(plan)
    script = folder / "serve.sbatch"
    script.write_text(launch.scripts(plan)["serve.sbatch"])
    job = subprocess.Popen(["bash", script], start_new_session=True)
    pid = run.path / "watcher"
    try:
        wait_until(pid.exists, 30, "the watcher")
        yield job, int(pid.read_text()), lambda: (run.path / "started").read_text().split()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


CLEARED = ["isambard_serve.nodelocal", "cleared"]
BEGUN = ["isambard_serve.prepare", "isambard_serve.watch"]


def test_after_a_watcher_that_was_killed_the_node_is_cleared(tmp_path: Path) -> None:
    with running(tmp_path) as (job, watcher, started):
        subprocess.run(["kill", "-KILL", str(watcher)], check=True)
        assert job.wait(30) == 128 + signal.SIGKILL
        assert started() == [*BEGUN, *CLEARED]


def test_a_signal_to_all_of_the_job_does_not_break_off_the_clearing(tmp_path: Path) -> None:
    with running(tmp_path) as (job, watcher, started):
        held = tmp_path / "runs" / RUN_ID / "held"
        held.touch()
        os.kill(watcher, signal.SIGKILL)
        wait_until(lambda: CLEARED[0] in started(), 30, "the clearing")
        os.killpg(job.pid, signal.SIGTERM)
        held.unlink()
        assert job.wait(30) == 128 + signal.SIGKILL
        assert started() == [*BEGUN, *CLEARED]


def test_a_signal_to_the_script_alone_ends_the_watcher_whose_code_is_the_scripts(tmp_path: Path) -> None:
    with running(tmp_path) as (job, _, started):
        job.terminate()
        assert job.wait(30) == 7
        assert started() == BEGUN
