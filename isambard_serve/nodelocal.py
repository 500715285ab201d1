"""What a run has on its node besides files of the run directory: a folder in memory, and containers."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from isambard_serve import container, process
from isambard_serve.errors import HostError, ServeError
from isambard_serve.plan import Plan
from isambard_serve.run import RunDir, read_record

FOLDERS = ("tmp", "kernels")

PODMAN_S = 10.0
"""How long podman may take to end when it is asked to: the container that it waits for ends first."""

LOOKS = 3
"""How often a node is cleared at most: a load may have been on its way, or Slurm's signal have ended the removal."""


def make(plan: Plan) -> None:
    """Makes the run's folder on this node.

    Raises:
        ServeError: it cannot be made.
    """
    if plan.local_dir is None:
        return
    try:
        for name in FOLDERS:
            (Path(plan.local_dir) / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ServeError(f"cannot be made on this node: {error.strerror}", where=plan.local_dir,
                         remedy="name another folder of the node's own in the site file: container.local") from error


def root_process(run: RunDir, started: int) -> int:
    """The pid on this node below which the engine's processes are.

    podman's containers are no children of the podman that was started (``started``); it leaves their pid in a file.
    """
    with contextlib.suppress(OSError, ValueError):
        return int(run.container_pid.read_text())
    return started


def clear(plan: Plan, env: Mapping[str, str], runner: process.Runner = process.run) -> None:
    """Removes the run's containers and its folder from this node, whatever state they are in."""
    if plan.runtime == "podman-hpc":
        label = f"{container.LABEL}={plan.run_id}"
        for _ in range(LOOKS):
            # First those that would go on making a container.
            podmans = _podmans(f"--label={label}")
            for podman in podmans:
                with contextlib.suppress(psutil.Error):
                    podman.terminate()
            psutil.wait_procs(podmans, timeout=PODMAN_S)
            removed = False
            with contextlib.suppress(HostError):
                removed = not runner(["podman-hpc", "rm", "--force", "--time=0", f"--filter=label={label}"],
                                     env=env).returncode
            if removed and not _podmans(f"--label={label}"):
                break
    if plan.local_dir is not None:
        shutil.rmtree(plan.local_dir, ignore_errors=True)


def _podmans(word: str) -> list[psutil.Process]:
    """This user's processes that were started as a podman with the argument ``word``; whoever started them is none."""
    found = []
    for each in psutil.process_iter(["cmdline", "uids"]):
        command = each.info["cmdline"] or []
        programs = {Path(argument).name for argument in command[:2]}  # podman-hpc is a script: its interpreter is first
        if word in command and programs & {"podman", "podman-hpc"} and each.info["uids"].real == os.getuid():
            found.append(each)
    return found


def main() -> None:
    """``python -m isambard_serve.nodelocal RUN_DIR``: the serve job's last word when its watcher was killed.

    First it says so, lest the sweep send the next load.
    """
    run = RunDir(Path(sys.argv[1]))
    try:
        run.record("serve", "failed", reason="its watcher was killed", job_id=os.environ.get("SLURM_JOB_ID"))
    finally:
        clear(read_record(run.plan, Plan), os.environ)


if __name__ == "__main__":
    main()
