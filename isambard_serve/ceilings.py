"""What a node can do at most, as it was measured: ``ceilings.json``, and how it compares with what is expected.

Rates are per second and decimal: TFLOP/s are 10^12 floating-point operations (a multiply-add is two), TB/s 10^12
bytes, GB/s 10^9.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from msgspec import Meta

from isambard_serve.records import Record

Arithmetic = Literal["bf16", "fp8", "fp8_block"]
"""bf16; fp8 (e4m3) with one scale a tensor; fp8 with a scale for 1 × 128 activations and 128 × 128 weights."""

Cap = Literal["power", "thermal", "none"]

TOLERANCE = 0.10
"""A rate that is further than this below what is expected, or as unsteady, is worth a look."""

# nvml.h: nvmlClocksEventReasons. "gpu_idle" is no throttling, and is left out.
REASONS = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Why the SM clock may be below its maximum, by NVML's bits."""

_THERMAL = 0x20 | 0x40
_POWER = 0x4 | 0x80


class Reading(Record, frozen=True):
    """One look at a GPU. ``reasons``: NVML's bits."""

    time: float
    sm_mhz: int
    power_w: float
    temperature_c: int
    reasons: int


class Clocks(Record, frozen=True):
    """What a GPU did while something was measured on it, over ``readings`` looks at it."""

    readings: int
    sm_mhz_median: float
    sm_mhz_min: int
    power_w_mean: float
    temperature_c_max: int
    reasons: tuple[str, ...]


class Matmul(Record, frozen=True):
    """Products of two square matrices of random numbers, on all GPUs at once.

    ``burst_tflop_s`` is the rate of the first moment after a rest, ``sustained_tflop_s`` that of the second half.
    """

    gpu: int
    arithmetic: Arithmetic
    burst_tflop_s: float
    sustained_tflop_s: float
    bound_by: Cap | None
    clocks: Clocks | None


class Copy(Record, frozen=True):
    """A copy within a GPU's memory; bytes read and bytes written both count."""

    gpu: int
    sustained_tb_s: float
    bound_by: Cap | None
    clocks: Clocks | None


class Peer(Record, frozen=True):
    """A copy from one GPU to another, one direction at a time. ``direct``: without a stop in the host's memory."""

    source: int
    target: int
    direct: bool
    gb_s: float


class Host(Record, frozen=True):
    """Copies between a GPU and the host. ``numa_node``: where thread and memory were bound; None: they were not.

    ``spread``: how far apart the rates of slow and fast moments lay, over the rate (the worse of both directions).
    """

    gpu: int
    numa_node: int | None
    memory: Literal["pinned", "pageable"]
    to_device_gb_s: float
    to_host_gb_s: float
    spread: float | None = None


class Gpu(Record, frozen=True):
    """A GPU. ``numa_node``: of the CPUs beside it; None: the machine does not say. ``power_limit_w``: its cap."""

    index: int
    name: str
    uuid: str
    pci: str
    memory_bytes: int
    numa_node: int | None
    power_limit_w: float | None


class Unknown(Record, frozen=True):
    """Something that could not be measured here, and why."""

    what: str
    why: str


class Ceilings(Record, frozen=True):
    """``ceilings.json``: one node's ceilings. ``topology``: nvidia-smi's own words, as lines.

    ``numa_nodes``: those that have CPUs, with their CPUs as Linux writes a list.
    """

    node: str
    time: float
    seconds: float
    driver: str | None
    torch: str
    cuda: str | None
    gpus: tuple[Gpu, ...]
    numa_nodes: dict[str, str]
    topology: tuple[str, ...]
    matmuls: tuple[Matmul, ...] = ()
    copies: tuple[Copy, ...] = ()
    peers: tuple[Peer, ...] = ()
    hosts: tuple[Host, ...] = ()
    unknown: tuple[Unknown, ...] = ()
    schema: str = "isambard-serve/ceilings/1"


Rate = Annotated[float, Meta(gt=0, le=10**6)]


class Expected(Record, frozen=True):
    """What a site expects of each of its GPUs; None: nothing in particular. ``numa_gb_s``: host to device, bound to
    the GPU's own node.
    """

    bf16_tflop_s: Rate | None = None
    fp8_tflop_s: Rate | None = None
    fp8_block_tflop_s: Rate | None = None
    copy_tb_s: Rate | None = None
    peer_gb_s: Rate | None = None
    host_gb_s: Rate | None = None


class Comparison(Record, frozen=True):
    """One expected rate beside the worst that was measured; ``measured`` None: it was not."""

    rate: str
    expected: float
    measured: float | None

    @property
    def low(self) -> bool:
        """Whether it is further below than :data:`TOLERANCE`; what was not measured is not."""
        return self.measured is not None and self.measured < self.expected * (1 - TOLERANCE)

    def __str__(self) -> str:
        verdict = "not measured" if self.measured is None else f"{self.measured / self.expected:.2f} of it"
        return f"expected {self.rate} {self.expected:g}: {verdict}{', LOW' if self.low else ''}"


def summarise(readings: Sequence[Reading]) -> Clocks | None:
    """The clocks over ``readings``; None when there are none."""
    if not readings:
        return None
    seen = 0
    for reading in readings:
        seen |= reading.reasons
    return Clocks(
        readings=len(readings),
        sm_mhz_median=statistics.median(reading.sm_mhz for reading in readings),
        sm_mhz_min=min(reading.sm_mhz for reading in readings),
        power_w_mean=round(statistics.fmean(reading.power_w for reading in readings), 1),
        temperature_c_max=max(reading.temperature_c for reading in readings),
        reasons=tuple(name for bit, name in REASONS.items() if seen & bit),
    )


def cap(readings: Sequence[Reading]) -> Cap | None:
    """What held the clocks down: heat if it ever did, power if it did in half of ``readings`` or more."""
    if not readings:
        return None
    if any(reading.reasons & _THERMAL for reading in readings):
        return "thermal"
    capped = sum(1 for reading in readings if reading.reasons & _POWER)
    return "power" if 2 * capped >= len(readings) else "none"


def worst(found: Ceilings) -> dict[str, float]:
    """The lowest rate of each kind over the node's GPUs, under the names of :class:`Expected`."""
    own = {gpu.index: gpu.numa_node for gpu in found.gpus}
    rates: list[tuple[str, float]] = [
        *((f"{each.arithmetic}_tflop_s", each.sustained_tflop_s) for each in found.matmuls),
        *(("copy_tb_s", each.sustained_tb_s) for each in found.copies),
        *(("peer_gb_s", each.gb_s) for each in found.peers),
        # Where the machine does not say which node is the GPU's own, nothing is bound: the plain copies count.
        *(("host_gb_s", min(each.to_device_gb_s, each.to_host_gb_s)) for each in found.hosts
          if each.memory == "pinned" and each.numa_node == own.get(each.gpu)),
    ]
    lowest: dict[str, float] = {}
    for name, rate in rates:
        lowest[name] = min(rate, lowest.get(name, rate))
    return lowest


def compared(found: Ceilings, expected: Expected) -> list[Comparison]:
    """Each rate that ``expected`` names beside the worst in ``found``."""
    lowest = worst(found)
    return [Comparison(rate=name, expected=value, measured=lowest.get(name))
            for name in Expected.__struct_fields__ if (value := getattr(expected, name)) is not None]


def text(found: Ceilings, expected: Expected | None = None) -> str:
    """``found`` for people, one line a measurement."""
    kinds = " + ".join(dict.fromkeys(gpu.name for gpu in found.gpus)) or "no GPU that is known"
    lines = [f"{found.node}: {len(found.gpus)} × {kinds}, torch {found.torch}, driver {found.driver}"]
    lines += [f"GPU {each.gpu} {each.arithmetic:<9} {each.sustained_tflop_s:8,.0f} TFLOP/s "
              f"({each.burst_tflop_s:,.0f} in a burst){_held(each.bound_by, each.clocks)}" for each in found.matmuls]
    lines += [f"GPU {each.gpu} copy      {each.sustained_tb_s:8.2f} TB/s read + written"
              f"{_held(each.bound_by, each.clocks)}" for each in found.copies]
    lines += [f"GPU {each.source} → {each.target}     {each.gb_s:8.1f} GB/s{'' if each.direct else ', by the host'}"
              for each in found.peers]
    lines += [f"GPU {each.gpu} host      {each.to_device_gb_s:8.1f} GB/s to it, {each.to_host_gb_s:.1f} from it "
              f"({each.memory}, {'unbound' if each.numa_node is None else f'NUMA node {each.numa_node}'}"
              f"{f'; unsteady, by {each.spread:.0%}' if each.spread and each.spread > TOLERANCE else ''})"
              for each in found.hosts]
    lines += [f"not measured: {each.what}: {each.why}" for each in found.unknown]
    lines += [str(each) for each in compared(found, expected or Expected())]
    return "\n".join(lines)


def _held(bound_by: Cap | None, clocks: Clocks | None) -> str:
    if clocks is None:
        return ""
    how = {"power": ", held down by the power cap", "thermal": ", held down by heat", "none": "", None: ""}[bound_by]
    return f", {clocks.sm_mhz_median:.0f} MHz at {clocks.power_w_mean:.0f} W{how}"


def within(readings: Iterable[Reading], since: float, until: float) -> list[Reading]:
    """Those of ``readings`` that were taken between two moments."""
    return [reading for reading in readings if since <= reading.time <= until]
