"""Looks at GPUs through a pretended driver library."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from isambard_serve.errors import HostError
from isambard_serve.nvml import Nvml, Sampler

ANSWERS = {
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetClockInfo": 1395,
    "nvmlDeviceGetPowerUsage": 690_500,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
}


class Driver:
    """Answers NVML's calls; those in ``refused`` with an error, one in ``missed`` once."""

    def __init__(self, refused: tuple[str, ...] = ()) -> None:
        self.refused = refused

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name in self.refused:
                return 3
            if name == "nvmlDeviceGetPciInfo_v3":
                arguments[-1]._obj.domain, arguments[-1]._obj.bus = 9, 0x1F
            elif name == "nvmlSystemGetDriverVersion":
                arguments[0].value = b"580.1"
            elif name in ANSWERS:
                arguments[-1]._obj.value = ANSWERS[name]
            return 0

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The library that is loaded."""
    pretended = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pretended)
    return pretended


def test_a_gpu_is_read_in_megahertz_watts_and_degrees(driver: Driver) -> None:
    library = Nvml()
    device = library.device("GPU-1")
    reading = library.reading(device)
    assert (reading.sm_mhz, reading.power_w, reading.temperature_c, reading.reasons) == (1395, 690.5, 61, 4)
    assert library.power_limit_w(device) == 700
    assert library.pci(device) == "0009:1f:00.0"
    assert library.driver() == "580.1"


def test_what_the_driver_refuses_is_an_error_or_unknown(driver: Driver) -> None:
    library = Nvml()
    driver.refused = ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerUsage")
    assert library.power_limit_w(library.device("GPU-1")) is None
    with pytest.raises(HostError, match="nvmlDeviceGetPowerUsage failed with 3"):
        library.reading(library.device("GPU-1"))


def test_a_machine_without_the_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(HostError, match="driver's library cannot be loaded"):
        Nvml()


def test_gpus_are_read_from_entering_to_leaving_and_a_missed_look_is_left_out(
        driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isambard_serve.nvml.INTERVAL_S", 0.001)
    with Sampler(Nvml(), {0: "GPU-0", 1: "GPU-1"}) as sampler:
        while not (sampler.readings(0) and sampler.readings(1)):
            pass
        driver.refused = ("nvmlDeviceGetClockInfo",)
    assert len(sampler.readings(0)) >= 1
    assert sampler.readings(0)[-1].sm_mhz == 1395
