"""One GPU made to work, by the driver's own library: a context, memory, a product of two matrices, and its check.

``python -m isambard_serve.gpucheck`` tries the first GPU that ``CUDA_VISIBLE_DEVICES`` names, in a process of its own,
since a GPU can hang for ever in any of these calls. It needs neither PyTorch nor a CUDA toolkit: the kernel below is
text that the driver compiles. Exit codes: 0 it works (JSON on stdout), 1 it does not, 2 it cannot be tried here.
"""

from __future__ import annotations

import array
import ctypes
import json
import sys
import time
from typing import Any, NoReturn

SIZE = 512
"""Rows and columns of the matrices: as many blocks of as many threads, so that every multiprocessor has work."""

# C = A·B with one block a row and one thread a column (PTX ISA 6.0, any GPU since Pascal).
_KERNEL = b"""
.version 6.0
.target sm_60
.address_size 64
.visible .entry multiply(.param .u64 pa, .param .u64 pb, .param .u64 pc, .param .u32 pn)
{
  .reg .pred %more;
  .reg .f32 %sum, %x, %y;
  .reg .b32 %row, %column, %n, %k, %first;
  .reg .b64 %a, %b, %c, %offset, %stride;
  ld.param.u64 %a, [pa];
  ld.param.u64 %b, [pb];
  ld.param.u64 %c, [pc];
  ld.param.u32 %n, [pn];
  cvta.to.global.u64 %a, %a;
  cvta.to.global.u64 %b, %b;
  cvta.to.global.u64 %c, %c;
  mov.u32 %row, %ctaid.x;
  mov.u32 %column, %tid.x;
  mul.lo.u32 %first, %row, %n;
  mul.wide.u32 %offset, %first, 4;
  add.s64 %a, %a, %offset;
  add.s64 %c, %c, %offset;
  mul.wide.u32 %offset, %column, 4;
  add.s64 %b, %b, %offset;
  add.s64 %c, %c, %offset;
  mul.wide.u32 %stride, %n, 4;
  mov.f32 %sum, 0f00000000;
  mov.u32 %k, 0;
again:
  ld.global.f32 %x, [%a];
  ld.global.f32 %y, [%b];
  fma.rn.f32 %sum, %x, %y, %sum;
  add.s64 %a, %a, 4;
  add.s64 %b, %b, %stride;
  add.u32 %k, %k, 1;
  setp.lt.u32 %more, %k, %n;
  @%more bra again;
  st.global.f32 [%c], %sum;
  ret;
}
\0"""

_CANNOT = {100: "it sees no GPU", 221: "the driver has no compiler", 803: "driver and library do not match"}
"""cuda.h: errors that say nothing about the GPU."""


class Cuda:
    """The CUDA driver API, as far as it is needed here.

    Args:
        library: ``libcuda.so.1``; tests put a stand-in here.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def __call__(self, name: str, *arguments: Any) -> None:
        """Calls a function of it; ends the process if it fails."""
        code = getattr(self._library, name)(*arguments)
        if code in _CANNOT:
            _give_up(2, f"cannot be tried: {_CANNOT[code]} ({name} answered {code})")
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            _give_up(1, f"{name} failed: {(text.value or b'').decode() or 'unknown error'} ({code})")

    def open(self) -> None:
        """Makes a context on the first GPU and enters it."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)

    def memory_mib(self) -> tuple[int, int]:
        """The GPU's memory: how much is free, and how much there is."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value >> 20, total.value >> 20

    def multiply(self, left: array.array[float], right: array.array[float]) -> array.array[float]:
        """The product of two square matrices of 32-bit numbers, computed on the GPU."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), _KERNEL)
        self("cuModuleGetFunction", ctypes.byref(function), module, b"multiply")
        product = array.array("f", bytes(4 * SIZE * SIZE))
        size = ctypes.c_size_t(4 * SIZE * SIZE)
        places = []
        for matrix in (left, right, product):
            place = ctypes.c_uint64()
            self("cuMemAlloc_v2", ctypes.byref(place), size)
            self("cuMemcpyHtoD_v2", place, ctypes.c_void_p(matrix.buffer_info()[0]), size)
            places.append(place)
        values = (*places, ctypes.c_uint(SIZE))
        parameters = (ctypes.c_void_p * 4)(*(ctypes.addressof(value) for value in values))
        self("cuLaunchKernel", function, SIZE, 1, 1, SIZE, 1, 1, 0, None, parameters, None)
        self("cuCtxSynchronize")
        self("cuMemcpyDtoH_v2", ctypes.c_void_p(product.buffer_info()[0]), places[2], size)
        return product


def operands() -> tuple[array.array[float], array.array[float]]:
    """Two matrices of small whole numbers, whose product has no rounding."""
    numbers = range(SIZE * SIZE)
    return (array.array("f", (index * 7 % 5 for index in numbers)),
            array.array("f", (index * 11 % 3 for index in numbers)))


def is_product(product: array.array[float], left: array.array[float], right: array.array[float]) -> bool:
    """Whether ``product`` is that of ``left`` and ``right``: A·(B·1) = (A·B)·1 in every row (Freivalds' check)."""
    def row(matrix: array.array[float], number: int) -> array.array[float]:
        return matrix[number * SIZE:(number + 1) * SIZE]

    sums = [sum(row(right, number)) for number in range(SIZE)]
    return all(sum(row(product, number)) == sum(a * b for a, b in zip(row(left, number), sums, strict=True))
               for number in range(SIZE))


def _give_up(code: int, text: str) -> NoReturn:
    sys.stderr.write(f"{text}\n")
    raise SystemExit(code)


def check(cuda: Cuda) -> dict[str, float]:
    """Has the GPU work; how long that took, and its memory. Ends the process if the GPU does not."""
    began = time.monotonic()
    cuda.open()
    free_mib, total_mib = cuda.memory_mib()
    left, right = operands()
    if not is_product(cuda.multiply(left, right), left, right):
        _give_up(1, "it computes a wrong product of two matrices")
    return {"seconds": round(time.monotonic() - began, 2), "free_mib": free_mib, "total_mib": total_mib}


def main() -> None:
    """``python -m isambard_serve.gpucheck``."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        _give_up(2, f"cannot be tried: {error}")
    sys.stdout.write(f"{json.dumps(check(Cuda(library)))}\n")


if __name__ == "__main__":
    main()
