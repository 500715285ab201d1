# ruff: noqa: N802
"""A GPU's try: it passes only if the product is right, and tells a bad GPU from one that cannot be tried.

Its calls are made of a stand-in of the driver here; on a real GPU see tests/gpu/README.md.
"""

from __future__ import annotations

import array
import ctypes
import json
from collections.abc import Mapping
from typing import Any

import pytest

from isambard_serve import gpucheck
from isambard_serve.gpucheck import Cuda

SIZE = 8


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices that Python multiplies in no time."""
    monkeypatch.setattr(gpucheck, "SIZE", SIZE)


class Driver:
    """The calls of libcuda.so.1, with a GPU whose memory is this process's; ``fails`` names calls and their errors."""

    def __init__(self, fails: Mapping[str, int] | None = None, *, wrong: bool = False) -> None:
        self.calls: list[str] = []
        self._wrong = wrong
        self._fails = fails or {}
        self._memory: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self._fails:
                return self._fails[name]
            if hasattr(type(self), f"_{name}"):
                getattr(self, f"_{name}")(*arguments)
            return 0

        return call

    def _cuGetErrorString(self, _code: int, text: Any) -> None:
        text._obj.value = b"the driver's words"

    def _cuMemGetInfo_v2(self, free: Any, total: Any) -> None:
        free._obj.value, total._obj.value = 90 << 20, 96 << 20

    def _cuMemAlloc_v2(self, place: Any, size: ctypes.c_size_t) -> None:
        self._memory.append(ctypes.create_string_buffer(size.value))
        place._obj.value = ctypes.addressof(self._memory[-1])

    def _cuMemcpyHtoD_v2(self, to: ctypes.c_uint64, source: ctypes.c_void_p, size: ctypes.c_size_t) -> None:
        ctypes.memmove(to.value, source.value, size.value)  # type: ignore[arg-type]

    def _cuMemcpyDtoH_v2(self, to: ctypes.c_void_p, source: ctypes.c_uint64, size: ctypes.c_size_t) -> None:
        ctypes.memmove(to.value, source.value, size.value)  # type: ignore[arg-type]

    def _cuLaunchKernel(self, *arguments: Any) -> None:
        places = [ctypes.c_uint64.from_address(arguments[9][number]).value for number in range(3)]
        assert ctypes.c_uint.from_address(arguments[9][3]).value == SIZE
        left, right, product = ((ctypes.c_float * (SIZE * SIZE)).from_address(place) for place in places)
        for row in range(SIZE):
            for column in range(SIZE):
                product[row * SIZE + column] = sum(
                    left[row * SIZE + k] * right[k * SIZE + column] for k in range(SIZE))
        product[SIZE] += self._wrong


def test_a_gpu_that_computes_right_passes() -> None:
    driver = Driver()
    result = gpucheck.check(Cuda(driver))
    assert (result["free_mib"], result["total_mib"]) == (90, 96)
    assert driver.calls[:4] == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    assert "cuCtxSynchronize" in driver.calls


def test_a_gpu_with_one_wrong_number_does_not_pass(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        gpucheck.check(Cuda(Driver(wrong=True)))
    assert end.value.code == 1
    assert "wrong product" in capsys.readouterr().err


@pytest.mark.parametrize(("fails", "code", "said"), [
    ({"cuDevicePrimaryCtxRetain": 46}, 1, "cuDevicePrimaryCtxRetain failed: the driver's words (46)"),
    ({"cuCtxSynchronize": 719}, 1, "cuCtxSynchronize failed: the driver's words (719)"),
    ({"cuInit": 100}, 2, "cannot be tried: it sees no GPU"),
    ({"cuModuleLoadData": 221}, 2, "cannot be tried: the driver has no compiler"),
])
def test_a_failure_of_the_gpu_is_told_from_one_of_the_driver(
        fails: dict[str, int], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        gpucheck.check(Cuda(Driver(fails)))
    assert end.value.code == code
    assert said in capsys.readouterr().err


def test_without_a_driver_nothing_can_be_tried(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(SystemExit) as end:
        gpucheck.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == "cannot be tried: libcuda.so.1: cannot open shared object file\n"


def test_the_result_is_one_json_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    gpucheck.main()
    assert json.loads(capsys.readouterr().out).keys() == {"seconds", "free_mib", "total_mib"}


def test_the_operands_have_no_symmetry_that_would_hide_a_transposed_one() -> None:
    left, right = gpucheck.operands()
    transposed = array.array("f", (right[column * SIZE + row] for row in range(SIZE) for column in range(SIZE)))
    product = array.array("f", (sum(left[row * SIZE + k] * transposed[k * SIZE + column] for k in range(SIZE))
                                for row in range(SIZE) for column in range(SIZE)))
    assert gpucheck.is_product(product, left, transposed)
    assert not gpucheck.is_product(product, left, right)
