"""In the engine's container, on a node with a GPU: whether the image can serve, and what is in it.

``python3 -m isambard_serve.imagecheck --out check.json``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from isambard_serve import process
from isambard_serve.records import Record
from isambard_serve.run import write_whole

PACKAGES = ("vllm", "torch", "triton", "flashinfer-python", "humming-kernels", "deep-gemm", "tilelang", "transformers",
            "huggingface-hub", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
"""What the numbers depend on; those that are not there are left out."""


class Finding(Record, frozen=True):
    """One thing that was tried: ``passed``, and what was seen."""

    what: str
    passed: bool
    detail: str


class ImageCheck(Record, frozen=True):
    """``check.json``: whether an image can serve, and what is in it. ``time``: when it was tried."""

    passed: bool
    time: float
    machine: str
    findings: tuple[Finding, ...]
    versions: dict[str, str]
    schema: str = "isambard-serve/imagecheck/1"


def engine() -> str:
    """vLLM can be imported."""
    importlib.import_module("vllm")
    return importlib.metadata.version("vllm")


def gpu() -> str:
    """PyTorch sees a GPU and computes on it."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise OSError(f"PyTorch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU: is the driver too old for "
                      "its CUDA, or is the container started without GPUs?")
    square = torch.ones((256, 256), device="cuda")
    if float((square @ square).sum()) != 256.0**3:
        raise OSError("a product of matrices comes out wrong")
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}, sm_{major}{minor}, CUDA {torch.version.cuda}"


def numactl() -> str:
    """numactl is there, and memory can be bound."""
    if shutil.which("numactl") is None:
        raise OSError("not in the image: --numa-bind does not work")
    nodes = [path.name.removeprefix("node") for path in Path("/sys/devices/system/node").glob("node[0-9]*")
             if (path / "cpulist").read_text().strip()]
    node = min(nodes, key=int, default="0")
    done = process.run(["numactl", f"--membind={node}", "true"], env=os.environ)
    if done.returncode:
        raise OSError(f"memory cannot be bound in here: {done.stderr.strip()}")
    return f"memory can be bound to node {node}"


CHECKS: dict[str, Callable[[], str]] = {"engine": engine, "gpu": gpu, "numactl": numactl}


def tried(what: str, check: Callable[[], str]) -> Finding:
    """How ``check`` comes out; whatever it raises is its finding."""
    try:
        return Finding(what=what, passed=True, detail=check())
    except Exception as error:  # noqa: BLE001 - an image can be broken in any way
        return Finding(what=what, passed=False, detail=f"{type(error).__name__}: {' '.join(str(error).split())}")


def versions() -> dict[str, str]:
    """What is installed of :data:`PACKAGES`."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main(words: Sequence[str] | None = None) -> int:
    """``python3 -m isambard_serve.imagecheck``: exit code 0 if everything passed."""
    parser = argparse.ArgumentParser(prog="isambard_serve.imagecheck", description="Try the image that this runs in.")
    parser.add_argument("--out", type=Path, required=True, help="where the record goes")
    given = parser.parse_args(words)
    findings = tuple(tried(what, check) for what, check in CHECKS.items())
    found = ImageCheck(passed=all(finding.passed for finding in findings), time=time.time(),
                       machine=platform.machine(), findings=findings, versions=versions())
    write_whole(given.out, msgspec.json.format(msgspec.json.encode(found), indent=2))
    for finding in findings:
        print(f"{'good' if finding.passed else 'BAD '}  {finding.what}: {finding.detail}")  # noqa: T201
    print("      " + ", ".join(f"{name} {version}" for name, version in found.versions.items()))  # noqa: T201
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
