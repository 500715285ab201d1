"""Looks at GPUs while they work: clocks, power, temperature and why the clocks are low, by the driver's own library.

The library comes with the driver, also into containers; it is called directly, so that nothing needs to be
installed where the engine runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from isambard_serve.ceilings import Reading
from isambard_serve.errors import HostError

INTERVAL_S = 0.05
"""How often a GPU is looked at; the driver renews its power figure ten times a second or so."""

_SM_CLOCK = 1        # NVML_CLOCK_SM
_GPU_SENSOR = 0      # NVML_TEMPERATURE_GPU


class _PciInfo(ctypes.Structure):
    """nvml.h: nvmlPciInfo_t."""

    _fields_ = (("bus_id_legacy", ctypes.c_char * 16), ("domain", ctypes.c_uint), ("bus", ctypes.c_uint),
                ("device", ctypes.c_uint), ("pci_device_id", ctypes.c_uint), ("pci_subsystem_id", ctypes.c_uint),
                ("bus_id", ctypes.c_char * 32))


class Nvml:
    """The driver's library.

    Raises:
        HostError: it is not there, or refuses.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise HostError(f"the NVIDIA driver's library cannot be loaded: {error}") from error
        self._call("nvmlInit_v2")

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise HostError(f"{name} failed with {code}")

    def device(self, uuid: str) -> ctypes.c_void_p:
        """The handle of the GPU ``uuid`` (``GPU-…``)."""
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        return handle

    def driver(self) -> str:
        """The driver's version."""
        text = ctypes.create_string_buffer(96)
        self._call("nvmlSystemGetDriverVersion", text, len(text))
        return text.value.decode()

    def pci(self, device: ctypes.c_void_p) -> str:
        """The address of ``device`` on the PCI bus as the kernel writes it: ``0000:01:00.0``."""
        info = _PciInfo()
        self._call("nvmlDeviceGetPciInfo_v3", device, ctypes.byref(info))
        return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"

    def power_limit_w(self, device: ctypes.c_void_p) -> float | None:
        """The power cap that is enforced; None where the GPU does not say."""
        with contextlib.suppress(HostError):
            return self._number("nvmlDeviceGetEnforcedPowerLimit", device) / 1000
        return None

    def reading(self, device: ctypes.c_void_p) -> Reading:
        """One look at ``device``."""
        reasons = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetCurrentClocksThrottleReasons", device, ctypes.byref(reasons))
        return Reading(
            time=time.monotonic(),
            sm_mhz=self._number("nvmlDeviceGetClockInfo", device, _SM_CLOCK),
            power_w=self._number("nvmlDeviceGetPowerUsage", device) / 1000,
            temperature_c=self._number("nvmlDeviceGetTemperature", device, _GPU_SENSOR),
            reasons=reasons.value,
        )

    def _number(self, name: str, device: ctypes.c_void_p, *arguments: int) -> int:
        value = ctypes.c_uint()
        self._call(name, device, *arguments, ctypes.byref(value))
        return value.value


class Sampler:
    """Reads GPUs in a thread of its own, from entering to leaving.

    Args:
        uuids: GPU index → uuid.
    """

    def __init__(self, library: Nvml, uuids: Mapping[int, str]) -> None:
        self._library = library
        self._devices = {index: library.device(uuid) for index, uuid in uuids.items()}
        self._readings: dict[int, list[Reading]] = {index: [] for index in uuids}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(INTERVAL_S):
            for index, device in self._devices.items():
                with contextlib.suppress(HostError):  # one look missed
                    self._readings[index].append(self._library.reading(device))

    def readings(self, gpu: int) -> Sequence[Reading]:
        """What was read of the GPU so far; times are of the monotonic clock."""
        return tuple(self._readings[gpu])
