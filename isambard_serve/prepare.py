"""On the node, before the engine starts: a free port, a key, and a record of what this node is."""

from __future__ import annotations

import os
import platform
import resource
import secrets
import shutil
import socket
import sys
from pathlib import Path

import msgspec

from isambard_serve import process
from isambard_serve.errors import HostError, ServeError
from isambard_serve.plan import Plan
from isambard_serve.records import Record
from isambard_serve.run import RunDir, Runs, read_record, write_whole

_GPU_FIELDS = ("index", "name", "uuid", "pci.bus_id", "driver_version", "memory.total", "power.limit",
               "clocks.max.sm", "compute_mode")


class NodeFacts(Record, frozen=True):
    """``node.json``: where the engine runs, and the slots that were filled there. ``gpus``: nvidia-smi's words."""

    node: str
    job_id: str | None
    slots: dict[str, str]
    kernel: str
    cpus_allowed: str
    open_files: int
    visible_devices: str | None
    gpus: list[dict[str, str]]
    schema: str = "isambard-serve/node/1"


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def visible_gpus(env: dict[str, str], runner: process.Runner = process.run) -> list[dict[str, str]]:
    """What nvidia-smi says of each GPU; empty where there is no nvidia-smi or it fails."""
    if shutil.which("nvidia-smi", path=env.get("PATH")) is None:
        return []
    try:
        done = runner(["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"], env=env)
    except HostError:
        return []
    lines = [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [dict(zip(_GPU_FIELDS, line, strict=False)) for line in lines]


def node_facts(slots: dict[str, str]) -> NodeFacts:
    """What this node is, as seen by this process."""
    env = dict(os.environ)
    return NodeFacts(
        node=env.get("SLURMD_NODENAME") or platform.node(),
        job_id=env.get("SLURM_JOB_ID"),
        slots=slots,
        kernel=platform.release(),
        cpus_allowed=_cpus_allowed(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        visible_devices=env.get("CUDA_VISIBLE_DEVICES"),
        gpus=visible_gpus(env),
    )


def _cpus_allowed() -> str:
    status = Path("/proc/self/status").read_text()
    return next(line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list"))


def prepare(run: RunDir) -> None:
    """Fills the slots of the run: ``slots.sh`` and ``api.key`` for the script, ``node.json`` for the record."""
    plan = read_record(run.plan, Plan)
    job_id = os.environ.get("SLURM_JOB_ID")
    run.record("serve", "started", job_id=job_id)
    if run.read_events(["cancel"]):
        raise ServeError("the run was cancelled before it started", where=run.run_id)
    if job_id:
        # Also for a run that was sent by hand.
        Runs(run.path.parent, plan.site).remember(job_id, run.run_id)
    slots = {"port": str(free_port())}
    write_whole(run.key, secrets.token_urlsafe(32))
    write_whole(run.slots, "".join(f"{name}={value}\n" for name, value in slots.items()))
    write_whole(run.node, msgspec.json.format(msgspec.json.encode(node_facts(slots)), indent=2))


def main() -> None:
    """``python -m isambard_serve.prepare RUN_DIR``."""
    run = RunDir(Path(sys.argv[1]))
    try:
        prepare(run)
    except Exception as error:
        run.record("serve", "failed", reason=f"the node could not be prepared: {error}")
        raise


if __name__ == "__main__":
    main()
