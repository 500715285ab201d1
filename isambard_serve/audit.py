"""Whether the engine's processes are where they belong: what ``/proc`` shows of them against what was to be bound.

Processes are found by parentage below the engine's first one. What they are and which GPU they use is what they say
themselves (the facts that our plugin writes), found by the pid of their own pid namespace, as in a container; where
they say nothing, their titles tell what they are.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from isambard_serve.binding import Binding
from isambard_serve.records import EngineFacts, Record
from isambard_serve.topology import Topology, numbers, process_status, ranges, sysfs_address

ASTRAY = 0.05
"""The share of a rank's own memory that may lie off its chip: what was touched before it was bound."""

_PASSES = 3
"""How often threads are gone through: one that was being made meanwhile has its maker's old affinity."""

_KERNEL_PAGE = re.compile(r"kernelpagesize_kB=(\d+)")
_BOUND = re.compile(r"bind(?:=[\w|]+)?:(.+)")

Role = Literal["rank", "core", "server"]


class Seen(Record, frozen=True):
    """One process of the engine.

    A ``rank`` computes on a GPU, a ``core`` schedules ranks that are processes of their own, a ``server`` is all else:
    API servers above all. ``gpu`` is a PCI address as sysfs writes it. ``cpus`` and ``mems`` are what the kernel
    allows it, ``policy`` where it puts new memory, in the words of ``numa_maps``, and ``memory_mib`` where its own
    memory lies, by NUMA node. None: cannot be seen.
    """

    pid: int
    title: str
    role: Role
    gpu: str | None
    cpus: str
    mems: str
    policy: str | None
    memory_mib: dict[int, float] | None

    def __str__(self) -> str:
        return f"{self.title} (pid {self.pid}{f', GPU {self.gpu}' if self.gpu else ''})"

    @property
    def new_memory(self) -> frozenset[int]:
        """The NUMA nodes on which its new memory may lie."""
        bound = _BOUND.fullmatch(self.policy or "")
        return numbers(self.mems) & numbers(bound[1]) if bound else numbers(self.mems)


class Audit(Record, frozen=True):
    """``binding.json``: whether all processes are where they belong.

    ``verdict`` is null if that cannot be told; ``findings`` say what is wrong, or why. ``not_applicable`` says why
    there was nothing to bind; then there is nothing to judge either.
    """

    verdict: bool | None = None
    findings: tuple[str, ...] = ()
    processes: tuple[Seen, ...] = ()
    not_applicable: str | None = None
    schema: str = "isambard-serve/binding/1"

    @property
    def summary(self) -> str:
        """The audit in one line."""
        if self.not_applicable:
            return f"not applicable: {self.not_applicable}"
        if self.verdict:
            ranks = sum(process.role == "rank" for process in self.processes)
            return f"bound as meant: {ranks} {'rank' if ranks == 1 else 'ranks'} and what serves them"
        more = f" (and {len(self.findings) - 1} more: binding.json)" if len(self.findings) > 1 else ""
        first = self.findings[0] if self.findings else "nobody says why"
        return f"{'WRONG' if self.verdict is False else 'not known'}: {first}{more}"


def see(root: Path, first: int, facts: Iterable[EngineFacts] = ()) -> list[Seen]:
    """The engine's processes below ``first``: ranks and cores, their parent, and what else that one has started.

    What stands between ``first`` and them (a container's runtime) is none of the engine's, nor are the helpers that a
    rank starts.

    Args:
        root: below which ``/proc`` is read.
        facts: what the engine's processes say of themselves.
    """
    statuses = {int(path.name): process_status(root, path.name) for path in (root / "proc").glob("[0-9]*")}
    parents = {pid: int(status.get("PPid", 0)) for pid, status in statuses.items()}
    statuses = {pid: status for pid, status in statuses.items() if first in _line(pid, parents)}
    own = {pid: int((status.get("NSpid") or str(pid)).split()[-1]) for pid, status in statuses.items()}
    said = {each.pid: each for each in facts}
    titles = {pid: _title(root, pid) for pid in statuses}
    engine = {pid for pid in statuses if _computes(titles[pid], said.get(own[pid]))}
    cores = {parents[pid] for pid in engine} & engine
    mains = {parents[pid] for pid in engine} - engine
    found = []
    for pid, status in sorted(statuses.items()):
        line = set(_line(pid, parents))
        if pid in engine or (line & mains and not line & engine):
            role: Role = "server" if pid not in engine else "core" if pid in cores else "rank"
            found.append(_seen(root, pid, titles[pid], role, status, said.get(own[pid])))
    return found


def _computes(title: str, facts: EngineFacts | None) -> bool:
    """Whether a process is an EngineCore, a worker, or both."""
    if facts is not None:
        return bool({"engine_core", "worker"} & set(facts.roles))
    return title.startswith(("VLLM::EngineCore", "VLLM::Worker"))


def _line(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    """``pid``, its parent, and so on."""
    while pid in parents:
        yield pid
        pid = parents[pid]


def _title(root: Path, pid: int) -> str:
    with contextlib.suppress(OSError):
        return (root / "proc" / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _seen(root: Path, pid: int, title: str, role: Role, status: Mapping[str, str], facts: EngineFacts | None) -> Seen:
    policy, memory_mib = _memory(root / "proc" / str(pid) / "numa_maps")
    return Seen(
        pid=pid,
        title=title[:60],
        role=role,
        gpu=sysfs_address(facts.device.pci_bus_id) if facts and facts.device else None,
        cpus=status.get("Cpus_allowed_list", ""),
        mems=status.get("Mems_allowed_list", ""),
        policy=policy,
        memory_mib=memory_mib,
    )


def _memory(numa_maps: Path) -> tuple[str | None, dict[int, float] | None]:
    """A process's memory policy, and MiB of its own memory by NUMA node; None for what cannot be read."""
    try:
        lines = [line.split() for line in numa_maps.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return None, None
    # Mapped files are everybody's, and lie where they were first read.
    own = [words for words in lines if len(words) > 1 and not any(word.startswith("file=") for word in words)]
    if not own:
        return None, None
    # Areas with a policy of their own are few; all others are shown with the process's.
    policy = Counter(words[1] for words in own).most_common(1)[0][0]
    memory: dict[int, float] = {}
    for words in own:
        page = _KERNEL_PAGE.fullmatch(words[-1])
        for node, pages in re.findall(r"\bN(\d+)=(\d+)", " ".join(words)):
            memory[int(node)] = memory.get(int(node), 0.0) + int(pages) * int(page[1] if page else 4) / 1024
    return policy, {node: round(mib, 1) for node, mib in sorted(memory.items())}


def settle(root: Path, first: int, facts: Sequence[EngineFacts], topology: Topology, binding: Binding) -> Audit:
    """Gives the API servers cores that no rank uses, and says whether all is where it belongs.

    Ranks are bound by vLLM, at their birth. The API servers cannot be: what they may not use, the ranks that they
    start could not use either. And an EngineCore takes its chip's cores, those of the servers too.
    """
    if binding.not_applicable:
        return Audit(not_applicable=binding.not_applicable)
    if binding.applied and binding.server_cpus:
        servers = numbers(binding.server_cpus)
        others = numbers(topology.cpus_allowed) - servers
        for process in see(root, first, facts):
            narrow(root, process.pid, servers if process.role == "server" else others)
    processes = see(root, first, facts)
    refuted, unknown = judge(processes, topology, binding)
    return Audit(verdict=False if refuted else None if unknown else True, findings=(*refuted, *unknown),
                 processes=tuple(processes))


def narrow(root: Path, pid: int, cpus: Iterable[int]) -> None:
    """Has all threads of a process run on none but ``cpus``: on those of its own among them, or if none is, on all.

    Threads that end meanwhile, or may not be moved, are left.
    """
    wanted = frozenset(cpus)
    for _ in range(_PASSES):
        for thread in (root / "proc" / str(pid) / "task").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                own = os.sched_getaffinity(int(thread.name))
                if not own <= wanted:
                    os.sched_setaffinity(int(thread.name), own & wanted or wanted)


def judge(processes: Sequence[Seen], topology: Topology, binding: Binding) -> tuple[list[str], list[str]]:
    """What is wrong with where ``processes`` are, and what cannot be told."""
    refuted, unknown = [], []
    if binding.impossible:
        refuted.append(binding.impossible)
    if not any(process.role == "rank" for process in processes):
        unknown.append("no rank was found among the engine's processes")
    shared = [gpu for gpu, count in Counter(process.gpu for process in processes if process.gpu).items() if count > 1]
    refuted += [f"several ranks use GPU {gpu}" for gpu in shared]
    beside = {gpu.pci: gpu.node for gpu in topology.gpus}
    for process in processes:
        wrong, unclear = _judged(process, topology, binding, beside)
        refuted += [f"{process} {text}" for text in wrong]
        unknown += [f"{process}: {text}" for text in unclear]
    return refuted, unknown


def _judged(process: Seen, topology: Topology, binding: Binding, beside: Mapping[str, int | None]
            ) -> tuple[list[str], list[str]]:
    """What is wrong with one process, and what cannot be told of it."""
    wrong, unclear = [], []
    if not numbers(process.cpus):
        unclear.append("which CPUs it may use cannot be read")
    if process.policy is None:
        unclear.append("its memory policy cannot be read")
    elif process.new_memory & topology.hbm:
        wrong.append(f"may put its memory into HBM (NUMA nodes {ranges(process.new_memory & topology.hbm)})")
    if process.role == "server":
        servers = numbers(binding.server_cpus)
        if servers and not numbers(process.cpus) <= servers:
            wrong.append(f"may run on CPUs {process.cpus}, of which only {binding.server_cpus} are not the ranks'")
        return wrong, unclear
    homes, where = _homes(process, topology, binding, beside)
    if process.role == "rank" and beside.get(process.gpu or "") is None:
        unclear.append("which GPU it uses is not known")
    on = _on(process, topology)
    if not on <= homes:
        wrong.append(f"may run on CPUs {process.cpus}, beside NUMA nodes {ranges(on)}: {where}")
    elif process.policy and not process.new_memory - topology.hbm <= homes:
        wrong.append(f"may put its memory on NUMA nodes {ranges(process.new_memory - topology.hbm)}: {where}")
    elif process.memory_mib:
        total = sum(process.memory_mib.values())
        away = sum(mib for node, mib in process.memory_mib.items() if node not in homes)
        if away > ASTRAY * total:
            wrong.append(f"has {away:,.0f} of its {total:,.0f} MiB of memory elsewhere: {where}")
    return wrong, unclear


def _on(process: Seen, topology: Topology) -> set[int]:
    """The NUMA nodes on whose CPUs a process may run."""
    return {node for node, cpus in topology.cpu_nodes.items() if cpus & numbers(process.cpus)}


def _homes(process: Seen, topology: Topology, binding: Binding, beside: Mapping[str, int | None]
           ) -> tuple[set[int], str]:
    """The NUMA nodes that a rank or a core belongs on, and why."""
    if process.role == "core":
        return set(binding.gpu_nodes), f"its ranks' GPUs are beside {ranges(binding.gpu_nodes)}"
    home = beside.get(process.gpu or "")
    if home is not None:
        return {home}, f"its GPU is beside {home}"
    on = _on(process, topology)
    return (on & set(binding.gpu_nodes) if len(on) == 1 else set()), "a rank belongs on one chip"
