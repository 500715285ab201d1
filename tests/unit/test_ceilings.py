"""What a node can do at most: what held its clocks, and how it compares with what is expected."""

from __future__ import annotations

import msgspec
import pytest

from isambard_serve import ceilings
from isambard_serve.ceilings import Ceilings, Copy, Expected, Gpu, Host, Matmul, Peer, Reading, Unknown

POWER, THERMAL = 0x4, 0x20


def readings(*reasons: int) -> list[Reading]:
    """One reading for each set of reasons, a second apart."""
    return [Reading(time=float(at), sm_mhz=1300 + at, power_w=690.0, temperature_c=60 + at, reasons=bits)
            for at, bits in enumerate(reasons)]


def node(**found: object) -> Ceilings:
    """A node of two GPUs of which only ``found`` was measured."""
    gpus = tuple(Gpu(index=index, name="NVIDIA H200", uuid=f"GPU-{index}", pci=f"0000:0{index}:00.0",
                     memory_bytes=150_000_000_000, numa_node=index, power_limit_w=700.0)
                 for index in (0, 1))
    plain = Ceilings(node="n1", time=0.0, seconds=6.0, driver="580", torch="2.11", cuda="13.0", gpus=gpus,
                     numa_nodes={"0": "0-7", "1": "8-15"}, topology=())
    return msgspec.structs.replace(plain, **found)


def product(gpu: int, sustained: float) -> Matmul:
    return Matmul(gpu=gpu, arithmetic="bf16", burst_tflop_s=780.0, sustained_tflop_s=sustained, bound_by="power",
                  clocks=ceilings.summarise(readings(POWER, POWER)))


@pytest.mark.parametrize(("reasons", "cap"), [
    ((), None),
    ((0, 0, 0), "none"),
    ((0x1, 0x2), "none"),                   # idle and a chosen clock are nobody's fault
    ((POWER, POWER, 0), "power"),
    ((POWER, 0, 0), "none"),                # a moment is not what held it
    ((0x80, 0x80), "power"),
    ((POWER, POWER, POWER | THERMAL), "thermal"),
    ((0x40,), "thermal"),
])
def test_what_held_the_clocks_down_is_told_from_the_drivers_bits(reasons: tuple[int, ...], cap: str | None) -> None:
    assert ceilings.cap(readings(*reasons)) == cap


def test_readings_are_summed_up() -> None:
    clocks = ceilings.summarise(readings(POWER, 0, THERMAL))
    assert clocks is not None
    assert (clocks.readings, clocks.sm_mhz_median, clocks.sm_mhz_min, clocks.temperature_c_max) == (3, 1301, 1300, 62)
    assert clocks.reasons == ("sw_power_cap", "sw_thermal_slowdown")
    assert ceilings.summarise([]) is None


def test_only_readings_of_the_measured_time_count() -> None:
    assert [reading.time for reading in ceilings.within(readings(0, 0, 0, 0), 1.0, 2.0)] == [1.0, 2.0]


def test_the_worst_gpu_is_what_is_compared() -> None:
    found = node(matmuls=(product(0, 660.0), product(1, 500.0)))
    (comparison,) = ceilings.compared(found, Expected(bf16_tflop_s=583))
    assert comparison.measured == 500
    assert comparison.low


def test_a_rate_within_a_tenth_of_what_is_expected_is_not_low_and_one_not_measured_is_neither() -> None:
    found = node(matmuls=(product(0, 530.0),))
    near, missing = ceilings.compared(found, Expected(bf16_tflop_s=583, copy_tb_s=3.0))
    assert not near.low
    assert missing.measured is None
    assert not missing.low
    assert "not measured" in ceilings.text(found, Expected(copy_tb_s=3.0))
    assert "0 × no GPU that is known" in ceilings.text(msgspec.structs.replace(found, gpus=()))


def test_only_copies_bound_to_a_gpus_own_node_are_compared() -> None:
    def host(gpu: int, numa_node: int | None, rate: float) -> Host:
        return Host(gpu=gpu, numa_node=numa_node, memory="pinned", to_device_gb_s=rate, to_host_gb_s=rate)

    found = node(hosts=(host(0, None, 1.0), host(0, 0, 350.0), host(0, 1, 80.0), host(1, 1, 340.0)))
    assert ceilings.worst(found) == {"host_gb_s": 340.0}


def test_a_record_is_read_back_and_every_part_of_it_is_shown() -> None:
    found = node(
        matmuls=(product(0, 660.0),),
        copies=(Copy(gpu=0, sustained_tb_s=4.29, bound_by=None, clocks=None),),
        peers=(Peer(source=0, target=1, direct=True, gb_s=140.0), Peer(source=1, target=0, direct=False, gb_s=20.0)),
        hosts=(Host(gpu=0, numa_node=None, memory="pageable", to_device_gb_s=7.6, to_host_gb_s=7.5, spread=0.24),
               Host(gpu=0, numa_node=0, memory="pinned", to_device_gb_s=55.2, to_host_gb_s=55.1, spread=0.01)),
        unknown=(Unknown(what="fp8 matrix products", why="not supported"),))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Ceilings) == found
    text = ceilings.text(found, Expected(bf16_tflop_s=1000))
    for words in ("660 TFLOP/s (780 in a burst), 1300 MHz at 690 W, held down by the power cap", "4.29 TB/s",
                  "GPU 0 → 1", "by the host", "7.6 GB/s to it, 7.5 from it (pageable, unbound; unsteady, by 24%)",
                  "55.2 GB/s to it, 55.1 from it (pinned, NUMA node 0)",
                  "not measured: fp8 matrix products: not supported", "expected bf16_tflop_s 1000: 0.66 of it, LOW"):
        assert words in text
