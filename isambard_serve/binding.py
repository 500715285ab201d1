"""What belongs where on a node: each rank on the cores and memory beside its GPU, the rest on cores of its own.

vLLM binds its ranks itself (``--numa-bind-nodes``, ``--numa-bind-cpus``), if it is told where: its own detection
refuses under Slurm, whose jobs have a narrowed affinity.
"""

from __future__ import annotations

from isambard_serve.records import Record
from isambard_serve.topology import Topology, numbers, ranges

SERVER_CORES = 8
"""Cores of each NUMA node with GPUs that no rank uses: they are the API servers'. A chip of 72 can spare them."""


class Binding(Record, frozen=True):
    """What is bound to what on this node.

    ``gpu_nodes`` and ``gpu_cpus`` hold, for each visible GPU, the NUMA node beside it and those of its cores that the
    rank gets. ``memory`` are the NUMA nodes for the memory of everything else, ``server_cpus`` the cores that no rank
    uses (empty: none can be spared). ``not_applicable`` says why there is nothing to bind, ``impossible`` why it could
    not be done although there is.
    """

    gpu_nodes: tuple[int, ...] = ()
    gpu_cpus: tuple[str, ...] = ()
    memory: str = ""
    server_cpus: str = ""
    not_applicable: str | None = None
    impossible: str | None = None

    @property
    def applied(self) -> bool:
        """Whether the engine is told to bind its ranks."""
        return not (self.not_applicable or self.impossible)


def choose(topology: Topology) -> Binding:
    """What to bind on a node of this ``topology``, within what the job may use."""
    if not topology.gpus:
        return Binding(not_applicable="no GPU is visible here")
    if len(topology.nodes) < 2:
        return Binding(not_applicable="all CPUs and memory of this node are one NUMA node")
    unknown = [gpu.pci or gpu.uuid for gpu in topology.gpus if gpu.node is None]
    if unknown:
        return Binding(not_applicable=f"this machine does not say which NUMA node is beside {', '.join(unknown)}")
    allowed, memory = numbers(topology.cpus_allowed), numbers(topology.mems_allowed)
    gpu_nodes = tuple(gpu.node for gpu in topology.gpus if gpu.node is not None)
    usable = {node: cpus & allowed for node, cpus in topology.cpu_nodes.items()}
    spared = {node: _spared(usable[node]) for node in gpu_nodes}
    return Binding(
        gpu_nodes=gpu_nodes,
        gpu_cpus=tuple(ranges(usable[node] - spared[node]) for node in gpu_nodes),
        memory=ranges(node for node, cpus in usable.items() if cpus and node in memory),
        server_cpus=ranges(cpu for cpus in spared.values() for cpu in cpus),
        impossible=_obstacle(topology, usable, memory),
    )


def _spared(cpus: frozenset[int]) -> frozenset[int]:
    return frozenset(sorted(cpus)[-SERVER_CORES:]) if len(cpus) >= 4 * SERVER_CORES else frozenset()


def _obstacle(topology: Topology, usable: dict[int, frozenset[int]], memory: frozenset[int]) -> str | None:
    """Why the ranks cannot be bound to the chips of their GPUs: the job was not given what lies there."""
    for gpu in topology.gpus:
        if gpu.node is not None and not usable[gpu.node]:
            return (f"the job has no core beside GPU {gpu.pci} (NUMA node {gpu.node}): "
                    f"it may use CPUs {topology.cpus_allowed}")
        if gpu.node not in memory:
            return (f"the job may not use the memory beside GPU {gpu.pci} (NUMA node {gpu.node}): "
                    f"it may use nodes {topology.mems_allowed}")
    return None


def slots(binding: Binding) -> dict[str, list[str]]:
    """The plan's slots ``membind`` and ``numa_bind``: nothing where nothing is bound."""
    if not binding.applied:
        return {"membind": [], "numa_bind": []}
    return {
        "membind": ["numactl", f"--membind={binding.memory}"],
        "numa_bind": ["--numa-bind", "--numa-bind-nodes", *map(str, binding.gpu_nodes),
                      "--numa-bind-cpus", *binding.gpu_cpus],
    }


def remarks(topology: Topology) -> list[str]:
    """What of this kernel a reader of the numbers should know."""
    said = []
    if topology.numa_balancing and len(topology.nodes) > 1:
        said.append("the kernel's automatic NUMA balancing is on: it interrupts the engine's memory accesses to "
                    "sample them (kernel.numa_balancing)")
    if topology.page_kib is not None and topology.page_kib > 4:
        said.append(f"the kernel's pages are {topology.page_kib} KiB: programs built for 4 KiB pages alone (some "
                    "jemalloc) do not start here")
    return said
