"""Whether a node's GPUs work, found out in seconds before an engine is started on them, and which nodes were bad.

A wedged GPU holds a first CUDA call for ever, and a dead NVLink shows in nothing but a slow run: an engine would find
out after minutes, or never.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from isambard_serve import process
from isambard_serve.process import Completed
from isambard_serve.records import Record
from isambard_serve.run import write_whole
from isambard_serve.site import Site

LIMIT_S = 60.0
"""How long a GPU may take over its first context and a matrix product; a healthy one takes 1 to 3 s."""

SILENT = f"nvidia-smi gives no answer within {LIMIT_S:.0f} s"

FREE = 0.95
"""The share of a GPU's memory that should be free before the engine takes its own."""

EXCLUDE_S = 3 * 86400.0
"""How long a bad node is left out of what is submitted: long enough for its operators to have noticed."""

FIELDS = ("uuid", "compute_mode", "memory.used", "memory.total", "utilization.gpu", "temperature.gpu",
          "clocks.current.sm", "clocks.max.sm", "clocks_event_reasons.hw_slowdown",
          "ecc.errors.uncorrected.volatile.total")
"""What nvidia-smi is asked about each GPU."""


class Health(Record, frozen=True):
    """How a node's GPUs were found.

    ``faults`` make it a bad node, ``remarks`` are worth knowing. ``gpus`` are nvidia-smi's words (its :data:`FIELDS`,
    and ``nvlinks`` as active of all), and what each GPU's own try said. ``not_applicable``: there was no GPU to try.
    """

    faults: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    gpus: tuple[dict[str, str], ...] = ()
    seconds: float = 0.0
    not_applicable: str | None = None


def check(uuids: Sequence[str], env: Mapping[str, str], limit_s: float = LIMIT_S) -> Health:
    """Tries the GPUs ``uuids`` all at once, each in a process of its own, and asks nvidia-smi about them."""
    if not uuids:
        return Health(not_applicable="no GPU is visible here")
    began = time.monotonic()
    asked = process.together([
        (["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader"], env),
        (["nvidia-smi", "nvlink", "--status"], env),
        *(([sys.executable, "-m", "isambard_serve.gpucheck"], {**env, "CUDA_VISIBLE_DEVICES": uuid}) for uuid in uuids),
    ], limit_s)
    said, links = (done.stdout if done and done.returncode == 0 else "" for done in asked[:2])
    described = {words[0]: dict(zip(FIELDS, words, strict=False))
                 for words in (line.split(", ") for line in said.splitlines())}
    active = nvlinks(links)
    faults: list[str] = [] if asked[0] else [SILENT]
    remarks: list[str] = [] if described or faults else ["nvidia-smi does not tell of compute mode, errors and clocks"]
    gpus = []
    for uuid, tried in zip(uuids, asked[2:], strict=True):
        gpu = {"uuid": uuid, **described.get(uuid, {}), "tried": _words(tried)}
        if uuid in active:
            gpu["nvlinks"] = "{} of {}".format(*active[uuid])
        gpus.append(gpu)
        bad, notable = judge(gpu, tried, limit_s)
        faults += [f"GPU {uuid}: {text}" for text in bad]
        remarks += [f"GPU {uuid}: {text}" for text in notable]
    return Health(faults=tuple(faults), remarks=tuple(remarks), gpus=tuple(gpus),
                  seconds=round(time.monotonic() - began, 1))


def _words(tried: Completed | None) -> str:
    return "no answer" if tried is None else (tried.stdout or tried.stderr).strip()[-500:]


def nvlinks(text: str) -> dict[str, tuple[int, int]]:
    """UUID → how many NVLinks are active, of how many, as ``nvidia-smi nvlink --status`` prints them."""
    found: dict[str, tuple[int, int]] = {}
    uuid = ""
    for line in text.splitlines():
        named = re.search(r"\(UUID: (\S+)\)", line)
        if named:
            uuid = named[1]
        elif re.match(r"\s*Link \d+:", line) and uuid:
            active, total = found.get(uuid, (0, 0))
            found[uuid] = active + ("inactive" not in line), total + 1
    return found


def judge(gpu: Mapping[str, str], tried: Completed | None, limit_s: float = LIMIT_S) -> tuple[list[str], list[str]]:
    """What is wrong with one GPU, and what else should be known of it.

    Args:
        gpu: nvidia-smi's words about it.
        tried: how its own try ended; None if it gave no answer.
    """
    faults, remarks = [], []
    if tried is None:
        faults.append(f"no answer within {limit_s:.0f} s: it hangs")
    elif tried.returncode == 2:
        remarks.append(_words(tried))
    elif tried.returncode:
        faults.append(_words(tried) or f"its try ended with {tried.returncode}")
    else:
        remarks += _memory(tried.stdout)
    if gpu.get("compute_mode") == "Prohibited":
        faults.append("its compute mode allows no program")
    errors = gpu.get("ecc.errors.uncorrected.volatile.total", "")
    if errors.isdigit() and int(errors):
        faults.append(f"{errors} memory errors that could not be corrected")
    if gpu.get("clocks_event_reasons.hw_slowdown") == "Active":
        faults.append("the hardware slows its clocks down, at rest")
    active, _, total = gpu.get("nvlinks", "").partition(" of ")
    if active not in ("", "0", total):  # none at all: there is nothing at their other ends
        faults.append(f"only {active} of {total} NVLinks are active")
    return faults, remarks


class _Memory(msgspec.Struct):
    """What a try that worked says, in the words of ``gpucheck``."""

    free_mib: float
    total_mib: float


def _memory(said: str) -> list[str]:
    """What should be known of a GPU's memory."""
    try:
        memory = msgspec.json.decode(said, type=_Memory)
    except msgspec.MsgspecError:
        return [f"its try worked, and what it said of memory cannot be understood: {said.strip()[:100]!r}"]
    if memory.free_mib >= FREE * memory.total_mib:
        return []
    return [f"only {memory.free_mib:,.0f} of {memory.total_mib:,.0f} MiB of its memory are free: the engine will find "
            "too little, or a smaller KV cache"]


class BadNode(Record, frozen=True):
    """A node that was found bad: when (seconds since the epoch), by which run, and why."""

    node: str
    time: float
    run_id: str
    faults: tuple[str, ...]
    schema: str = "isambard-serve/bad-node/1"


def remember(runs_dir: Path, bad: BadNode) -> Path:
    """Notes a bad node in the user's list: a file for each, in ``runs_dir/.bad-nodes``."""
    folder = runs_dir / ".bad-nodes"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', bad.node)}.json"
    write_whole(path, msgspec.json.format(msgspec.json.encode(bad), indent=2))
    return path


def bad_nodes(runs_dir: Path, now: float | None = None) -> list[BadNode]:
    """The nodes that were found bad in the last days, by name."""
    now = time.time() if now is None else now
    found = []
    listed: list[Path] = []
    with contextlib.suppress(PermissionError):  # what may not be entered holds no list of this user's
        listed = sorted((runs_dir / ".bad-nodes").glob("*.json"))
    for path in listed:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            bad = msgspec.json.decode(path.read_bytes(), type=BadNode)
            if now - bad.time < EXCLUDE_S:
                found.append(bad)
    return found


def avoiding(site: Site, nodes: Sequence[BadNode]) -> Site:
    """``site``, whose jobs are not sent to ``nodes`` either."""
    if not nodes:
        return site
    names = [*([site.directives.exclude] if site.directives.exclude else []), *(bad.node for bad in nodes)]
    return msgspec.structs.replace(site, directives=msgspec.structs.replace(site.directives, exclude=",".join(names)))
