"""Machines as their ``/sys`` and ``/proc`` show them, built below a folder: one function a kind.

The shapes are those of the vendors' documents; nothing was recorded on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

SMI = list[dict[str, str]]


def quad_gh200(root: Path, *, cpus: str = "0-287", mems: str = "0-35", gpus: Sequence[int] = (0, 1, 2, 3)) -> SMI:
    """Four GH200 with MIG off: nodes 0-3 are Grace, and of each GPU's eight the first (4, 12, 20, 28) is its HBM.

    ``cpus`` and ``mems`` are what the job may use, ``gpus`` those that nvidia-smi shows it.
    """
    grace = {node: (f"{72 * node}-{72 * node + 71}", 120) for node in range(4)}
    hbm = {node: ("", 96 if (node - 4) % 8 == 0 else 0) for node in range(4, 36)}
    devices = {f"00{chip}9:01:00.0": (chip, grace[chip][0]) for chip in range(4)}
    machine(root, nodes=grace | hbm, devices=devices, cpus=cpus, mems=mems, page_kib=64)
    # Where a job may use some GPUs alone, the driver counts these from 0.
    return [smi(index, f"000000{chip}9:01:00.0") for index, chip in enumerate(gpus)]


def eight_h100(root: Path) -> SMI:
    """Two sockets of 56 cores with two threads each, four H100 beside each of them."""
    nodes = {0: ("0-55,112-167", 1007), 1: ("56-111,168-223", 1008)}
    buses = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
    devices = {f"0000:{bus}:00.0": (at // 4, nodes[at // 4][0]) for at, bus in enumerate(buses)}
    machine(root, nodes=nodes, devices=devices, cpus="0-223", mems="0-1", numa_balancing="1")
    return [smi(index, f"00000000:{bus.upper()}:00.0") for index, bus in enumerate(buses)]


def h200_vm(root: Path) -> SMI:
    """A virtual machine with two H200 and two NUMA nodes, whose firmware does not say which belongs to which."""
    devices = {f"0000:0{bus}:00.0": (-1, "0-31") for bus in (3, 4)}
    machine(root, nodes={0: ("0-15", 63), 1: ("16-31", 63)}, devices=devices, cpus="0-31", mems="0-1")
    return [smi(index, f"00000000:0{bus}:00.0") for index, bus in enumerate((3, 4))]


def laptop(root: Path) -> SMI:
    """One NUMA node and no GPU."""
    machine(root, nodes={0: ("0-7", 15)}, devices={}, cpus="0-7", mems="0")
    return []


def bare(root: Path) -> SMI:
    """A kernel without NUMA: no nodes at all, and no word about balancing."""
    machine(root, nodes={}, devices={}, cpus="0-1", mems="0", numa_balancing=None)
    return []


def smi(index: int, bus_id: str) -> dict[str, str]:
    """What nvidia-smi says of a GPU; the UUIDs are made up."""
    return {"index": str(index), "uuid": f"GPU-{bus_id.replace(':', '').lower()}", "pci.bus_id": bus_id}


def machine(root: Path, *, nodes: Mapping[int, tuple[str, int]], devices: Mapping[str, tuple[int, str]], cpus: str,
            mems: str, page_kib: int = 4, numa_balancing: str | None = "0") -> None:
    """A machine of NUMA nodes (CPUs and GiB) and PCI devices (``numa_node`` and ``local_cpulist``)."""
    for node, (cpulist, gib) in nodes.items():
        put(root, f"sys/devices/system/node/node{node}/cpulist", cpulist)
        put(root, f"sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal:  {gib * 2**20} kB")
    for address, (node, near) in devices.items():
        put(root, f"sys/bus/pci/devices/{address}/numa_node", str(node))
        put(root, f"sys/bus/pci/devices/{address}/local_cpulist", near)
    if numa_balancing is not None:
        put(root, "proc/sys/kernel/numa_balancing", numa_balancing)
    put(root, "proc/self/status", f"Name:\tpython\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}")
    put(root, "proc/self/smaps", f"00400000-00401000 r-xp 0 0:0 0 x\nKernelPageSize:  {page_kib} kB\n")


def process(root: Path, pid: int, parent: int, title: str, *, cpus: str, mems: str = "0-35",
            policy: str | None = "default", pages: Mapping[int, int] | None = None, own_pid: int | None = None) -> None:
    """A process whose 64 KiB pages lie on NUMA nodes as ``pages`` says; without a ``policy`` nobody may look.

    ``own_pid`` is its pid inside its container.
    """
    place = f"proc/{pid}"
    pids = f"{pid}\t{own_pid}" if own_pid else f"{pid}"
    put(root, f"{place}/status",
        f"PPid:\t{parent}\nNSpid:\t{pids}\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}")
    put(root, f"{place}/cmdline", title.replace(" ", "\0"))
    if policy is not None:
        held = " ".join(f"N{node}={count}" for node, count in (pages or {}).items())
        put(root, f"{place}/numa_maps",
            f"00400000 {policy} file=/usr/bin/python3 mapped=9000 N0=9000 kernelpagesize_kB=64\n"
            f"00800000 {policy} heap anon=1 dirty=1 {held} kernelpagesize_kB=64\n"
            f"00900000 interleave:0-3 anon=4 dirty=4 kernelpagesize_kB=64\n"
            f"ffff0000 {policy} stack anon=2 dirty=2 kernelpagesize_kB=64")


def put(root: Path, name: str, text: str) -> None:
    """The file ``name`` below ``root``."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
