"""The host's memory beside a GPU: pages that lie where they are wanted."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
from collections.abc import Iterator, Set
from typing import Any


@contextlib.contextmanager
def host_memory(torch: Any, size: int, *, pinned: bool) -> Iterator[Any]:
    """Fresh pages of the host as a tensor, placed by this thread: its first touch decides where they lie."""
    tensor = torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    ctypes.memset(tensor.data_ptr(), 1, size)  # tensor.fill_ would do so with threads that are not bound
    runtime = torch.cuda.cudart()
    if pinned and int(runtime.cudaHostRegister(tensor.data_ptr(), size, 0)):
        raise OSError("cudaHostRegister refused the memory")
    try:
        yield tensor
    finally:
        torch.cuda.synchronize()
        if pinned:
            runtime.cudaHostUnregister(tensor.data_ptr())


# Linux: the numbers of set_mempolicy(2) by architecture, and of its policies (linux/mempolicy.h).
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_DEFAULT, _MPOL_BIND = 0, 2


@contextlib.contextmanager
def bound_to(node: int, cpus: Set[int]) -> Iterator[None]:
    """Binds this thread, and the memory that it touches first, to a NUMA node.

    Raises:
        OSError: the kernel, or the container around, does not allow it.
    """
    before = os.sched_getaffinity(0)
    if not cpus & before:
        raise OSError("none of its CPUs is allowed to this process")
    _memory_policy(_MPOL_BIND, node)
    try:
        os.sched_setaffinity(0, cpus & before)
        yield
    finally:
        os.sched_setaffinity(0, before)
        _memory_policy(_MPOL_DEFAULT, None)


def _memory_policy(policy: int, node: int | None) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(f"binding memory is not known on {platform.machine()}")
    mask = (ctypes.c_ulong * 16)()
    if node is not None:
        mask[node // 64] = 1 << node % 64
    words = (mask, ctypes.c_ulong(16 * 64)) if node is not None else (None, ctypes.c_ulong(0))
    if ctypes.CDLL(None, use_errno=True).syscall(number, policy, *words):
        raise OSError(ctypes.get_errno(), f"set_mempolicy: {os.strerror(ctypes.get_errno())}")
