"""On the node, before the engine starts: do its GPUs work, a port, a key, what to bind where, and a record of all."""

from __future__ import annotations

import os
import platform
import resource
import secrets
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil

from isambard_serve import binding, kernelcache, nodelocal, process, slurm, state, topology
from isambard_serve import health as gpuhealth
from isambard_serve.binding import Binding
from isambard_serve.errors import HostError, ServeError
from isambard_serve.health import BadNode, Health
from isambard_serve.plan import Plan
from isambard_serve.records import Record
from isambard_serve.resend import RESENT, resend
from isambard_serve.run import RunDir, Runs, read_record, write_whole
from isambard_serve.slurm import Slurm
from isambard_serve.topology import Topology

_GPU_FIELDS = ("index", "name", "uuid", "pci.bus_id", "driver_version", "memory.total", "power.limit",
               "clocks.max.sm", "compute_mode", "mig.mode.current")

Filled = str | list[str]
"""What a slot was filled with: a word, or any number of words."""


class NodeFacts(Record, frozen=True):
    """``node.json``: where the engine runs, and the slots that were filled there.

    ``gpus`` are nvidia-smi's words, ``numactl`` those of ``numactl --hardware`` (None: it is not there).
    """

    node: str
    job_id: str | None
    slots: dict[str, Filled]
    kernel: str
    open_files: int
    visible_devices: str | None
    gpus: list[dict[str, str]]
    topology: Topology
    binding: Binding
    health: Health
    remarks: list[str]
    numactl: str | None
    schema: str = "isambard-serve/node/1"


def address(interface: str | None) -> str:
    """The IPv4 address of the node's network interface ``interface``; loopback's if none is named.

    Raises:
        ServeError: there is no such interface, or it has no such address.
    """
    if interface is None:
        return "127.0.0.1"
    known = psutil.net_if_addrs()
    found = [each.address for each in known.get(interface, ()) if each.family == socket.AF_INET]
    if not found:
        raise ServeError(f"this node has no address on {interface!r}", where="serve.interface in the site file",
                         remedy=f"its interfaces: {', '.join(sorted(known))}")
    return found[0]


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of ``host`` that nobody listens on just now."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port


def visible_gpus(env: Mapping[str, str], limit_s: float = gpuhealth.LIMIT_S) -> list[dict[str, str]] | None:
    """What nvidia-smi says of each GPU; nothing where it is missing or fails, None where it gives no answer."""
    if shutil.which("nvidia-smi", path=env.get("PATH")) is None:
        return []
    argv = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    (done,) = process.together([(argv, env)], limit_s)
    if done is None:
        return None
    lines = [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [dict(zip(_GPU_FIELDS, line, strict=False)) for line in lines]


def numactl(arguments: list[str], env: Mapping[str, str], runner: process.Runner = process.run) -> str | None:
    """What ``numactl ARGUMENTS`` prints; None where it is missing or fails."""
    try:
        done = runner(["numactl", *arguments], env=env)
    except HostError:
        return None
    return done.stdout if done.returncode == 0 else None


def node_facts(plan: Plan, root: Path = Path("/")) -> NodeFacts:
    """What this node is, as seen by this process, and all slots of ``plan``, filled."""
    env = dict(os.environ)
    gpus = visible_gpus(env)
    found = topology.read(root, gpus or [], env.get("CUDA_VISIBLE_DEVICES"))
    if plan.simulated:
        health = Health(not_applicable="the engine is simulated")
    elif gpus is None:
        health = Health(faults=(gpuhealth.SILENT,))
    elif missing := _missing(found, env):
        health = Health(faults=(missing,))
    else:
        health = gpuhealth.check([gpu.uuid for gpu in found.gpus], env)
    bound = _binding(plan, found)
    words = binding.slots(bound)
    remarks = [*health.remarks, *binding.remarks(found)]
    if words["membind"] and numactl([*words["membind"][1:], "true"], env) is None:
        words["membind"] = []
        remarks.append(f"numactl --membind={bound.memory} does not work here: only the ranks' memory is bound")
    host = address(plan.interface)
    return NodeFacts(
        node=env.get("SLURMD_NODENAME") or platform.node(),
        job_id=env.get("SLURM_JOB_ID"),
        slots={"port": str(free_port(host)), **({"host": host} if plan.for_people else {}), **words},
        kernel=platform.release(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        visible_devices=env.get("CUDA_VISIBLE_DEVICES"),
        gpus=gpus or [],
        topology=found,
        binding=bound,
        health=health,
        remarks=remarks,
        numactl=numactl(["--hardware"], env),
    )


def _missing(found: Topology, env: Mapping[str, str]) -> str | None:
    """That a GPU which Slurm gave to this job is not there, in words; CUDA stops at the first that it does not find.

    Where there is no nvidia-smi, and of slices of GPUs, nothing can be told.
    """
    given = [word for word in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    untold = shutil.which("nvidia-smi", path=env.get("PATH")) is None or any(word.startswith("MIG") for word in given)
    if "SLURM_JOB_ID" not in env or untold or len(found.gpus) >= len(given):
        return None
    return f"nvidia-smi shows {len(found.gpus)} of the {len(given)} GPUs of this job ({','.join(given)})"


def _binding(plan: Plan, found: Topology) -> Binding:
    if plan.simulated:
        return Binding(not_applicable="the engine is simulated")
    if not plan.numa_bind:
        return Binding(not_applicable="the recipe does not ask for it (engine.args.numa-bind)")
    return binding.choose(found)


def prepare(run: RunDir, root: Path = Path("/")) -> bool:
    """Fills the slots of the run: ``slots.sh`` and ``api.key`` for the script, ``node.json`` for the record.

    Returns whether the engine may be started: on a node that is bad it may not, and the job was sent again.

    Args:
        root: below which ``/sys`` and ``/proc`` are read.

    Raises:
        ServeError: the run was cancelled, or its node is bad and there is no other.
    """
    plan = read_record(run.plan, Plan)
    job_id = os.environ.get("SLURM_JOB_ID")
    run.record("serve", "started", job_id=job_id)
    if run.read_events(["cancel"]):
        raise ServeError("the run was cancelled before it started", where=run.run_id)
    if job_id:
        # Also for a run that was sent by hand.
        Runs(run.path.parent, plan.site).remember(job_id, run.run_id)
    facts = node_facts(plan, root)
    write_whole(run.node, msgspec.json.format(msgspec.json.encode(facts), indent=2))
    if facts.health.faults:
        why = f"node {facts.node} is bad: {'; '.join(facts.health.faults)}"
        gpuhealth.remember(run.path.parent, BadNode(node=facts.node, time=time.time(), run_id=run.run_id,
                                                    faults=facts.health.faults))
        resend(run, plan, facts.node, why, Slurm(slurm.environment(plan.export, os.environ)))
        return False
    nodelocal.make(plan)
    for remark in (facts.binding.impossible, *facts.remarks, kernelcache.restore(plan, facts.gpus, os.environ)):
        if remark:
            run.record("serve", "note", reason=remark)
    write_whole(run.key, secrets.token_urlsafe(32))
    write_whole(run.slots, "".join(f"{name}={_assigned(value)}\n" for name, value in facts.slots.items()))
    return True


def _assigned(value: Filled) -> str:
    """``value`` as bash takes it in an assignment: a word, or an array of words."""
    return shlex.quote(value) if isinstance(value, str) else f"({shlex.join(value)})"


def started(run: RunDir) -> bool:
    """Whether the run's serve job has begun before, and has not been sent again since."""
    events, _ = state.since_resent(run.read_events(["serve"]))
    return any(event.event == "started" for event in events)


def main() -> None:
    """``python -m isambard_serve.prepare RUN_DIR``."""
    run = RunDir(Path(sys.argv[1]))
    if started(run):
        # Nothing is recorded: the run is the other engine's, which may be serving now.
        sys.exit(f"error: {run.run_id}: was started before, and the numbers of two engines would be mixed in it\n"
                 f"  → submit the recipe anew, or what the run has left: isambard-serve submit --resume {run.run_id}")
    try:
        good = prepare(run)
    except Exception as error:
        run.record("serve", "failed", reason=f"the node could not be prepared: {error}")
        raise
    if not good:
        sys.exit(RESENT)


if __name__ == "__main__":
    main()
