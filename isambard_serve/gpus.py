"""Looks at the engine's GPUs while it works: how fast they run, and why not faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from isambard_serve.engine import EngineClient
from isambard_serve.errors import HostError
from isambard_serve.records import EngineFacts, GpuSample

Look = Callable[[], list[GpuSample]]


def looker(facts: Sequence[EngineFacts], client: EngineClient, *, simulated: bool) -> Look | None:
    """What takes one look at every GPU that the engine's workers say they use; None where there is nothing to see.

    The driver's library is asked, no program is started: a look takes microseconds (`tests/gpu/see_gpu.py`).
    """
    if simulated:
        return client.simulated_gpus
    uuids = sorted({each.device.uuid for each in facts if each.device})
    if not uuids:
        return None
    from isambard_serve.nvml import Nvml

    try:
        library = Nvml()
        handles = {uuid: library.device(uuid) for uuid in uuids}
    except HostError:
        return None  # nobody looks, and the rows say so

    def look() -> list[GpuSample]:
        readings = {uuid: library.reading(handle) for uuid, handle in handles.items()}
        return [GpuSample(time=time.time(), gpu=uuid, sm_mhz=reading.sm_mhz, power_w=reading.power_w,
                          temperature_c=reading.temperature_c, reasons=reading.reasons)
                for uuid, reading in readings.items()]

    return look
