"""Find and stop processes, always by their own id."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.waiting import wait_until


class Process(NamedTuple):
    """One line of the process table."""

    pid: int
    name: str
    uid: int


def using(folder: Path) -> list[Process]:
    """List the processes that work inside `folder`, other than this one.

    That is: with their directory or an open file there, or with a variable in their first environment that
    starts with its path. The environment alone will not do: a program that sets its title overwrites it.
    """
    return [process for process in _all() if process.pid != os.getpid() and _uses(process.pid, folder)]


def stop(process: subprocess.Popen[Any], grace_s: float = 10) -> None:
    """Send TERM to our own child, KILL once `grace_s` seconds are over, and reap it."""
    process.terminate()
    process.send_signal(signal.SIGCONT)
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def kill_all(found: Callable[[], list[Process]], timeout_s: float = 10) -> None:
    """Send KILL to everything that `found` lists until it lists nothing; `TimeoutError` if it always does."""

    def gone() -> bool:
        processes = found()
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return not processes

    wait_until(gone, timeout_s, "leftover processes to die")


def _all() -> Iterator[Process]:
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield Process(int(entry.name), (entry / "comm").read_text().rstrip("\n"), entry.stat().st_uid)


def _uses(pid: int, folder: Path) -> bool:
    proc, inside = Path(f"/proc/{pid}"), f"{folder}/"
    with suppress(OSError):  # it ended meanwhile, or is not ours to look into
        if f"={inside}".encode() in (proc / "environ").read_bytes():
            return True
        links = [proc / "cwd", *(proc / "fd").iterdir()]
        return any(f"{_target(link)}/".startswith(inside) for link in links)
    return False


def _target(link: Path) -> str:
    with suppress(OSError):
        return os.readlink(link)
    return ""
