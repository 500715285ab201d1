"""What a node is made of, read from its ``/sys`` and ``/proc``: NUMA nodes, GPUs, and what this job may use.

Nothing here needs a GPU, a driver or NUMA: a machine without them is described as one without them. ``-1`` in
``numa_node`` and ``[N/A]`` from nvidia-smi are answers ("nobody says"), not errors.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from isambard_serve.records import Record

_NODES = "sys/devices/system/node"
_PCI = "sys/bus/pci/devices"
_LIST = re.compile(r"[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?)*")


class NumaNode(Record, frozen=True):
    """A NUMA node that has CPUs, memory, or both. ``cpus`` as Linux writes it: ``0-71``, or empty."""

    node: int
    cpus: str
    memory_gib: float


class Gpu(Record, frozen=True):
    """A GPU that the engine sees; their order is the engine's own.

    ``pci`` as sysfs writes it. ``node``: the NUMA node of the CPUs beside it; None if the firmware does not say.
    """

    uuid: str
    pci: str
    node: int | None


class Topology(Record, frozen=True):
    """A node, as far as binding is concerned.

    ``cpus_allowed`` and ``mems_allowed`` are what this process may use (the job's cpuset, and its affinity).
    ``page_kib`` is the kernel's page. None: the kernel does not say.
    """

    nodes: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...]
    cpus_allowed: str
    mems_allowed: str
    page_kib: int | None
    numa_balancing: bool | None

    @property
    def cpu_nodes(self) -> dict[int, frozenset[int]]:
        """The NUMA nodes that have CPUs, with their CPUs."""
        return {each.node: numbers(each.cpus) for each in self.nodes if each.cpus}

    @property
    def hbm(self) -> frozenset[int]:
        """The NUMA nodes of memory alone: on a quad GH200 the GPUs' HBM, as nodes 4, 12, 20 and 28.

        Linux puts ordinary allocations and page cache there too, once the memory beside the CPUs is full.
        """
        return frozenset(each.node for each in self.nodes if not each.cpus)


def numbers(text: str) -> frozenset[int]:
    """The numbers in a list as Linux writes it: ``0-3,8`` holds 0, 1, 2, 3 and 8; none in what is no such list."""
    if not _LIST.fullmatch(text.strip()):
        return frozenset()
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def ranges(values: Iterable[int]) -> str:
    """``values`` as Linux (and numactl, and taskset) write a list: ``0-3,8``."""
    parts: list[list[int]] = []
    for value in sorted(values):
        if parts and value == parts[-1][-1] + 1:
            parts[-1][1:] = [value]
        else:
            parts.append([value])
    return ",".join("-".join(map(str, part)) for part in parts)


def read(root: Path, smi: Sequence[Mapping[str, str]], visible: str | None, process: str = "self") -> Topology:
    """The topology of the machine whose ``/sys`` and ``/proc`` lie below ``root``.

    Args:
        smi: nvidia-smi's ``index``, ``uuid`` and ``pci.bus_id`` of each GPU.
        visible: ``CUDA_VISIBLE_DEVICES``; None if it is not set, and the engine sees all of them.
        process: whose limits count: a process id.
    """
    nodes = _nodes(root)
    status = process_status(root, process)
    return Topology(
        nodes=nodes,
        gpus=tuple(_gpu(root, each, nodes) for each in visible_gpus(smi, visible)),
        cpus_allowed=status.get("Cpus_allowed_list", ""),
        mems_allowed=status.get("Mems_allowed_list", ""),
        page_kib=_page_kib(root, process),
        numa_balancing={"0": False, "": None}.get(_text(root / "proc/sys/kernel/numa_balancing"), True),
    )


def process_status(root: Path, process: str) -> dict[str, str]:
    """The lines of ``/proc/PROCESS/status``; none if the process is gone."""
    lines = (line.partition(":") for line in _text(root / "proc" / process / "status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def visible_gpus(smi: Sequence[Mapping[str, str]], visible: str | None) -> list[Mapping[str, str]]:
    """Those of nvidia-smi's GPUs that CUDA shows to a program, in CUDA's order.

    The words of ``visible`` are indices or UUIDs (their beginning is enough); like CUDA, this stops at the first
    that names no GPU. A MIG slice names none: nothing is said of it.
    """
    if visible is None:
        return list(smi)
    found: list[Mapping[str, str]] = []
    for word in visible.split(","):
        matches = [gpu for gpu in smi if _named(gpu, word.strip())]
        if len(matches) != 1:
            break
        found.append(matches[0])
    return found


def _named(gpu: Mapping[str, str], word: str) -> bool:
    return gpu.get("index") == word or (word.startswith("GPU-") and gpu.get("uuid", "").startswith(word))


def sysfs_address(bus_id: str) -> str | None:
    """nvidia-smi's ``00000009:01:00.0`` as sysfs writes it, ``0009:01:00.0``; None if it is no PCI address."""
    match = re.fullmatch(r"([0-9A-Fa-f]+):([0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])", bus_id.strip())
    return f"{int(match[1], 16):04x}:{match[2].lower()}" if match else None


def _nodes(root: Path) -> tuple[NumaNode, ...]:
    found = []
    for path in (root / _NODES).glob("node[0-9]*"):
        cpus = _text(path / "cpulist")
        total = re.search(r"MemTotal:\s+(\d+) kB", _text(path / "meminfo"))
        memory_kib = int(total[1]) if total else 0
        # Of the eight nodes that each GH200 GPU brings, seven are empty unless MIG is on.
        if cpus or memory_kib:
            found.append(NumaNode(node=int(path.name[4:]), cpus=cpus, memory_gib=round(memory_kib / 2**20, 1)))
    return tuple(sorted(found, key=lambda each: each.node))


def _gpu(root: Path, smi: Mapping[str, str], nodes: Sequence[NumaNode]) -> Gpu:
    address = sysfs_address(smi.get("pci.bus_id", ""))
    device = root / _PCI / (address or "none")
    with_cpus = {each.node: numbers(each.cpus) for each in nodes if each.cpus}
    said = _text(device / "numa_node")
    node = int(said) if re.fullmatch(r"-?\d+", said) else -1
    if node not in with_cpus:
        near = numbers(_text(device / "local_cpulist"))
        holding = [number for number, cpus in with_cpus.items() if cpus & near]
        node = holding[0] if len(holding) == 1 else -1
    return Gpu(uuid=smi.get("uuid", ""), pci=address or "", node=node if node >= 0 else None)


def _page_kib(root: Path, process: str) -> int | None:
    with contextlib.suppress(OSError), open(root / "proc" / process / "smaps", encoding="utf-8",
                                            errors="replace") as lines:
        for line in lines:
            page = re.match(r"KernelPageSize:\s+([0-9]{1,9}) kB", line)
            if page:
                return int(page[1])
    return None


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""
