"""What a run has on its node besides files of the run directory: a folder in memory, and containers."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from isambard_serve import container, process
from isambard_serve.errors import HostError, ServeError
from isambard_serve.plan import Plan
from isambard_serve.run import RunDir

FOLDERS = ("tmp", "kernels")


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
        with contextlib.suppress(HostError):
            runner(["podman-hpc", "rm", "--force", "--time=0", f"--filter=label={container.LABEL}={plan.run_id}"],
                   env=env)
    if plan.local_dir is not None:
        shutil.rmtree(plan.local_dir, ignore_errors=True)
