"""Measures what a node can do at most: sustained matrix products, copies within, between and to its GPUs.

``python -m isambard_serve.probe --out ceilings.json`` on a GPU machine, with a Python that has PyTorch (the
engine's image has). Datasheets and bursts promise more than a chip keeps up: each rate is that of seconds of work
on random numbers (zeros draw less power), on all GPUs at once, with clocks and power watched meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from isambard_serve import ceilings, process, topology
from isambard_serve.ceilings import Arithmetic, Ceilings, Copy, Gpu, Host, Matmul, Peer, Unknown
from isambard_serve.errors import HostError, ServeError
from isambard_serve.hostmemory import bound_to, host_memory
from isambard_serve.nvml import Nvml, Sampler
from isambard_serve.run import write_whole

SECONDS = 6.0
"""How long each rate is measured; its second half counts. Clocks settle within the first two seconds or so."""

SIZE = 8192
"""Rows and columns of the matrices: 2 × 8192³ FLOP take milliseconds, and launching them nothing."""

COPY_BYTES = 4 << 30
PEER_BYTES = 1 << 30
HOST_BYTES = 256 << 20
SHORT_S = 0.4
"""How long copies over a link are measured: they heat nothing, and keep their rate. Those of pageable memory do not:
a CPU makes them, and on a machine that others share its rate changes from second to second. They are given SECONDS.
"""

_CHUNK_S = 0.05
_QUEUED = 3
"""So many events are to come at a GPU, so that one chunk is under way and two are behind it: it never runs dry."""
_FEWEST = 4
_LOOK_S = 0.002
_REST_S = 1.0

_UNDERLINE = re.compile(r"\x1b\[[0-9;]*m")
"""What nvidia-smi's table is underlined with, into a file too."""


@dataclass
class Load:
    """Work to repeat on a GPU: each ``start`` enqueues ``units`` (FLOP or bytes) on its current stream."""

    gpu: int
    start: Callable[[], object]
    units: float


@dataclass
class Course:
    """How one GPU's work went: after each chunk an event, and the host's clock when it was seen to be over."""

    load: Load
    count: int
    events: list[Any] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)

    def rate(self, first: int, last: int) -> float:
        """Units per second between two of its events."""
        elapsed_s: float = self.events[first].elapsed_time(self.events[last]) / 1000
        return (last - first) * self.count * self.load.units / elapsed_s

    @property
    def burst(self) -> float:
        """The rate of the first chunk."""
        return self.rate(0, 1)

    @property
    def middle(self) -> int:
        """The event at which the second half begins."""
        return (len(self.events) - 1) // 2

    @property
    def sustained(self) -> float:
        """The rate of the second half."""
        return self.rate(self.middle, len(self.events) - 1)

    @property
    def spread(self) -> float:
        """How far the second half's slow and fast chunks (10th and 90th percentile) lie apart, over its rate."""
        rates = [self.rate(at, at + 1) for at in range(self.middle, len(self.events) - 1)]
        tenths = statistics.quantiles(rates, n=10, method="inclusive")
        return (tenths[-1] - tenths[0]) / self.sustained


def sustain(torch: Any, loads: Sequence[Load], seconds: float, rest_s: float = 0.0) -> list[Course]:
    """Keeps all ``loads`` going at once for ``seconds``, after a rest; no GPU waits for another."""
    courses = [Course(load, _chunk(torch, load)) for load in loads]
    time.sleep(rest_s)
    end = time.monotonic() + seconds
    while True:
        for course in courses:
            _see(course)
        more = time.monotonic() < end or any(len(course.events) < _FEWEST for course in courses)
        if not more and all(len(course.seen) == len(course.events) for course in courses):
            return courses
        hungry = [course for course in courses if more and len(course.events) - len(course.seen) < _QUEUED]
        for course in hungry:
            _feed(torch, course)
        if not hungry:
            time.sleep(_LOOK_S)


def _feed(torch: Any, course: Course) -> None:
    """Enqueues a chunk; copies that the host has to make are done when this returns."""
    if not course.events:
        _mark(torch, course)
    with torch.cuda.device(course.load.gpu):
        for _ in range(course.count):
            course.load.start()
    _mark(torch, course)


def _mark(torch: Any, course: Course) -> None:
    with torch.cuda.device(course.load.gpu):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
    course.events.append(event)


def _see(course: Course) -> None:
    while len(course.seen) < len(course.events) and course.events[len(course.seen)].query():
        course.seen.append(time.monotonic())


def _chunk(torch: Any, load: Load) -> int:
    """How often ``load`` is started for a chunk of work; starts it some times before, so that all is warm."""
    with torch.cuda.device(load.gpu):
        for _ in range(3):
            load.start()
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in range(3):
            load.start()
        torch.cuda.synchronize()
    return max(1, round(_CHUNK_S * 3 / (time.monotonic() - began)))


def matrices(torch: Any, gpu: int, arithmetic: Arithmetic) -> Load:
    """A product of two random matrices, by the vendor's own library (through PyTorch)."""
    left = torch.randn(SIZE, SIZE, device=f"cuda:{gpu}", dtype=torch.bfloat16)
    right = torch.randn(SIZE, SIZE, device=f"cuda:{gpu}", dtype=torch.bfloat16)
    flop = 2.0 * SIZE**3
    if arithmetic == "bf16":
        out = torch.empty_like(left)
        return Load(gpu, lambda: torch.matmul(left, right, out=out), flop)
    left, right = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
    if arithmetic == "fp8":
        one = torch.ones((), device=left.device)
        return Load(gpu, lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16,
                                                  use_fast_accum=True), flop)
    # cuBLASLt wants the scales of 1 × 128 blocks with the rows side by side.
    blocks = SIZE // 128
    scale_left = torch.rand(blocks, SIZE, device=left.device).t()
    scale_right = torch.rand(blocks, blocks, device=left.device).t()
    return Load(gpu, lambda: torch._scaled_mm(left, right.t(), scale_left, scale_right, out_dtype=torch.bfloat16), flop)


def copy_within(torch: Any, gpu: int) -> Load:
    """A copy from one half of a buffer to the other: far larger than any cache."""
    source = torch.randint(256, (COPY_BYTES,), device=f"cuda:{gpu}", dtype=torch.uint8)
    target = torch.empty_like(source)
    return Load(gpu, lambda: target.copy_(source), 2.0 * COPY_BYTES)


class Probe:
    """Measures one node; what fails is noted and left out.

    Args:
        torch: the module; ``sampler`` reads the GPUs meanwhile, None where nothing can.
    """

    def __init__(self, torch: Any, gpus: Sequence[Gpu], sampler: Sampler | None, seconds: float) -> None:
        self._torch = torch
        self._gpus = gpus
        self._sampler = sampler
        self._seconds = seconds
        self.unknown: list[Unknown] = []

    @contextlib.contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Notes ``what`` as unknown if the block fails, and gives its memory back in any case."""
        say(what)
        try:
            yield
        except (RuntimeError, OSError, ValueError, AttributeError) as error:
            why = str(error).strip() or repr(error)
            self.unknown.append(Unknown(what=what, why=why.splitlines()[0]))
        finally:
            self._torch.cuda.empty_cache()

    def _readings(self, course: Course) -> list[ceilings.Reading]:
        if self._sampler is None:
            return []
        return ceilings.within(self._sampler.readings(course.load.gpu), course.seen[course.middle], course.seen[-1])

    def matmuls(self, arithmetic: Arithmetic) -> list[Matmul]:
        """The products' rates on all GPUs at once."""
        found = []
        with self._noting(f"{arithmetic} matrix products"):
            loads = [matrices(self._torch, gpu.index, arithmetic) for gpu in self._gpus]
            for course in sustain(self._torch, loads, self._seconds, _REST_S):
                readings = self._readings(course)
                found.append(Matmul(
                    gpu=course.load.gpu, arithmetic=arithmetic, burst_tflop_s=round(course.burst / 1e12, 1),
                    sustained_tflop_s=round(course.sustained / 1e12, 1), bound_by=ceilings.cap(readings),
                    clocks=ceilings.summarise(readings)))
        return found

    def copies(self) -> list[Copy]:
        """The rates of copies within each GPU's memory, on all at once."""
        found = []
        with self._noting("copies within a GPU's memory"):
            loads = [copy_within(self._torch, gpu.index) for gpu in self._gpus]
            for course in sustain(self._torch, loads, self._seconds / 2):
                readings = self._readings(course)
                found.append(Copy(gpu=course.load.gpu, sustained_tb_s=round(course.sustained / 1e12, 3),
                                  bound_by=ceilings.cap(readings), clocks=ceilings.summarise(readings)))
        return found

    def peers(self) -> list[Peer]:
        """The rate of each GPU to each other, one pair at a time."""
        torch, found = self._torch, []
        for source in self._gpus:
            for target in self._gpus:
                if source.index == target.index:
                    continue
                with self._noting(f"copies from GPU {source.index} to GPU {target.index}"):
                    there = torch.empty(PEER_BYTES, device=f"cuda:{source.index}", dtype=torch.uint8)
                    here = torch.empty(PEER_BYTES, device=f"cuda:{target.index}", dtype=torch.uint8)
                    (course,) = sustain(torch, [Load(source.index, _copying(here, there), PEER_BYTES)], SHORT_S)
                    found.append(Peer(
                        source=source.index, target=target.index, gb_s=round(course.sustained / 1e9, 1),
                        direct=bool(torch.cuda.can_device_access_peer(source.index, target.index))))
        return found

    def hosts(self, nodes: Mapping[int, Set[int]]) -> list[Host]:
        """The rates between each GPU and the host: unbound, and bound to each NUMA node that has CPUs."""
        found = []
        for gpu in self._gpus:
            with self._noting(f"copies between GPU {gpu.index} and the host"):
                found.append(self._host(gpu.index, None, pinned=True))
                found.append(self._host(gpu.index, None, pinned=False))
            for node, cpus in nodes.items():
                with self._noting(f"copies between GPU {gpu.index} and NUMA node {node}"), bound_to(node, cpus):
                    found.append(self._host(gpu.index, node, pinned=True))
        return found

    def _host(self, gpu: int, node: int | None, *, pinned: bool) -> Host:
        torch = self._torch
        device = torch.empty(HOST_BYTES, device=f"cuda:{gpu}", dtype=torch.uint8)
        with host_memory(torch, HOST_BYTES, pinned=pinned) as host:
            to_device, to_host = (
                sustain(torch, [Load(gpu, _copying(*pair), HOST_BYTES)], SHORT_S if pinned else self._seconds)[0]
                for pair in ((device, host), (host, device)))
        return Host(gpu=gpu, numa_node=node, memory="pinned" if pinned else "pageable",
                    to_device_gb_s=round(to_device.sustained / 1e9, 1),
                    to_host_gb_s=round(to_host.sustained / 1e9, 1),
                    spread=round(max(to_device.spread, to_host.spread), 2))


def _copying(target: Any, source: Any) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)


def _machine(torch: Any, library: Nvml | None) -> tuple[list[Gpu], dict[int, frozenset[int]]]:
    """The GPUs, and the CPUs of each NUMA node that has any."""
    every = {f"GPU-{torch.cuda.get_device_properties(index).uuid}": index for index in range(torch.cuda.device_count())}
    devices = {}
    if library is not None:
        with contextlib.suppress(HostError):
            devices = {uuid: library.device(uuid) for uuid in every}
    named = [{"uuid": uuid, "pci.bus_id": library.pci(devices[uuid]) if library and uuid in devices else ""}
             for uuid in every]
    machine = topology.read(Path("/"), named, None)
    gpus = []
    for index, (gpu, uuid) in enumerate(zip(machine.gpus, every, strict=True)):
        properties = torch.cuda.get_device_properties(index)
        limit = library.power_limit_w(devices[uuid]) if library and uuid in devices else None
        gpus.append(Gpu(index=index, name=properties.name, uuid=uuid, pci=gpu.pci, numa_node=gpu.node,
                        memory_bytes=properties.total_memory, power_limit_w=limit))
    return gpus, machine.cpu_nodes


def _topology() -> tuple[str, ...]:
    with contextlib.suppress(HostError):
        done = process.run(["nvidia-smi", "topo", "-m"], env=os.environ)
        if done.returncode == 0:
            plain = _UNDERLINE.sub("", done.stdout)
            return tuple(line.rstrip() for line in plain.splitlines() if line.strip())
    return ()


def measure(seconds: float = SECONDS) -> Ceilings:
    """Measures this machine.

    Raises:
        HostError: it has no GPU that PyTorch can use, or no PyTorch.
    """
    torch = torch_with_gpu()
    library: Nvml | None = None
    unknown: list[Unknown] = []
    try:
        library = Nvml()
    except HostError as error:
        unknown.append(Unknown(what="clocks, power and temperature", why=error.what))
    gpus, nodes = _machine(torch, library)
    with contextlib.ExitStack() as stack:
        sampler = None
        if library is not None:
            try:
                sampler = stack.enter_context(Sampler(library, {gpu.index: gpu.uuid for gpu in gpus}))
            except HostError as error:
                unknown.append(Unknown(what="clocks, power and temperature", why=error.what))
        probe = Probe(torch, gpus, sampler, seconds)
        found = Ceilings(
            node=os.environ.get("SLURMD_NODENAME") or platform.node(), time=time.time(), seconds=seconds,
            driver=library.driver() if library else None, torch=str(torch.__version__), cuda=torch.version.cuda,
            gpus=tuple(gpus), topology=_topology(),
            numa_nodes={str(node): topology.ranges(cpus) for node, cpus in nodes.items()},
            matmuls=(*probe.matmuls("bf16"), *probe.matmuls("fp8"), *probe.matmuls("fp8_block")),
            copies=tuple(probe.copies()), peers=tuple(probe.peers()),
            hosts=tuple(probe.hosts(nodes)),
        )
    return msgspec.structs.replace(found, unknown=(*unknown, *probe.unknown))


def torch_with_gpu() -> Any:
    """PyTorch, if it is here and finds a GPU.

    Raises:
        HostError: otherwise.
    """
    remedy = "run it on a GPU node, with the engine's own Python: isambard-serve submit probe does"
    try:
        import torch
    except ImportError as error:
        raise HostError("there is no PyTorch here", remedy=remedy) from error
    if not torch.cuda.is_available():
        raise HostError("there is no GPU here that PyTorch can use", remedy=remedy)
    return torch


def say(text: str) -> None:
    """Tells people how far it is."""
    print(f"{text} …", file=sys.stderr, flush=True)  # noqa: T201 - a program of its own, in a job


def main(words: Sequence[str] | None = None) -> int:
    """``python -m isambard_serve.probe``: measures, writes the record, prints it for people. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="isambard_serve.probe", description="Measure what this node can do at most.")
    parser.add_argument("--out", type=Path, default=Path("ceilings.json"), help="where the record goes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long each rate is measured")
    given = parser.parse_args(words)
    try:
        found = measure(given.seconds)
        write_whole(given.out, msgspec.json.format(msgspec.json.encode(found), indent=2), mode=0o644)
    except ServeError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    print(ceilings.text(found))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
