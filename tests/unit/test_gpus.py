"""Looks at the engine's GPUs: those that its workers say they use, and none where there are none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from isambard_serve import gpus, nvml
from isambard_serve.ceilings import Reading
from isambard_serve.engine import EngineClient
from isambard_serve.errors import HostError
from isambard_serve.records import Device, EngineFacts
from tests.unit.helpers import some_facts

CLIENT = EngineClient("http://127.0.0.1:1", "key")


class Driver:
    """Stands for the driver's library."""

    lost = ""

    def device(self, uuid: str) -> str:
        """The handle of a GPU."""
        if uuid == self.lost:
            raise HostError("no such GPU")
        return f"handle of {uuid}"

    def reading(self, handle: str) -> Reading:
        """One look."""
        return Reading(time=5.0, sm_mhz=1500, power_w=550.0, temperature_c=60, reasons=int(handle[-1]))


def using(*uuids: str) -> Sequence[EngineFacts]:
    """The facts of a server and of workers on these GPUs, each twice."""
    workers = [some_facts(device=Device(name="GH200", uuid=uuid, pci_bus_id="x")) for uuid in uuids]
    return [some_facts(roles=("api_server",)), *workers, *workers]


def test_each_gpu_that_a_worker_uses_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "Nvml", Driver)
    look = gpus.looker(using("GPU-4", "GPU-2"), CLIENT, simulated=False)
    assert look
    assert [(sample.gpu, sample.reasons, sample.sm_mhz, sample.power_w) for sample in look()] == [
        ("GPU-2", 2, 1500, 550.0), ("GPU-4", 4, 1500, 550.0)]
    assert look()[0].time > 1e9  # the wall's time, as the engine's samples have it


def test_an_engine_on_no_gpu_has_nothing_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "Nvml", Driver)
    assert gpus.looker(using(), CLIENT, simulated=False) is None


def test_without_the_driver_or_one_of_its_gpus_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "lost", "GPU-2")
    monkeypatch.setattr(nvml, "Nvml", Driver)
    assert gpus.looker(using("GPU-4", "GPU-2"), CLIENT, simulated=False) is None

    def missing() -> None:
        raise HostError("the NVIDIA driver's library cannot be loaded")

    monkeypatch.setattr(nvml, "Nvml", missing)
    assert gpus.looker(using("GPU-4"), CLIENT, simulated=False) is None
