"""What is tried in an image: each thing is found good or bad by itself, and the record says what was seen."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from isambard_serve import imagecheck
from isambard_serve.imagecheck import ImageCheck
from tests.unit.helpers import Stubs


def a_torch(*, gpus: int = 1, product: float = 256.0**3) -> Any:
    """Stands for PyTorch."""

    class Tensor:
        def __matmul__(self, _: Tensor) -> Tensor:
            return self

        def sum(self) -> float:
            return product

    torch: Any = ModuleType("torch")
    torch.__version__ = "2.13.0"
    torch.version = ModuleType("version")
    torch.version.cuda = "13.0"
    torch.ones = lambda *_, **__: Tensor()
    torch.cuda = ModuleType("cuda")
    torch.cuda.is_available = lambda: gpus > 0
    torch.cuda.device_count = lambda: gpus
    torch.cuda.get_device_name = lambda: "NVIDIA GH200 120GB"
    torch.cuda.get_device_capability = lambda: (9, 0)
    return torch


def test_a_gpu_that_computes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", a_torch(gpus=4))
    assert imagecheck.gpu() == "4 × NVIDIA GH200 120GB, sm_90, CUDA 13.0"


@pytest.mark.parametrize(("torch", "why"), [
    (a_torch(gpus=0), r"PyTorch 2.13.0 \(CUDA 13.0\) sees no GPU: is the driver too old"),
    (a_torch(product=0.0), "comes out wrong"),
])
def test_one_that_is_not_seen_or_computes_wrongly_is_not_fine(
        monkeypatch: pytest.MonkeyPatch, torch: Any, why: str) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    finding = imagecheck.tried("gpu", imagecheck.gpu)
    assert finding.passed is False
    assert why.replace("\\", "") in finding.detail


def test_numactl_must_be_there_and_be_let_to_bind(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs.add("numactl", '[ "$1" = --membind=0 ] && [ "$2" = true ]')
    assert imagecheck.numactl() == "memory can be bound to node 0"
    stubs.add("numactl", "echo set_mempolicy: Operation not permitted >&2; exit 1")
    with pytest.raises(OSError, match="cannot be bound in here: set_mempolicy: Operation not permitted"):
        imagecheck.numactl()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(OSError, match="not in the image"):
        imagecheck.numactl()


def test_all_is_tried_and_written_down_whatever_is_broken(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(imagecheck, "PACKAGES", ("msgspec", "no-such-package"))
    monkeypatch.setattr(imagecheck, "CHECKS", {"one": lambda: "well", "two": lambda: str(1 / 0)})
    assert imagecheck.main(["--out", str(tmp_path / "check.json")]) == 1
    found = msgspec.json.decode((tmp_path / "check.json").read_bytes(), type=ImageCheck)
    assert [(each.what, each.passed, each.detail) for each in found.findings] == [
        ("one", True, "well"), ("two", False, "ZeroDivisionError: division by zero")]
    assert found.passed is False
    assert list(found.versions) == ["msgspec"]
    assert capsys.readouterr().out.splitlines()[:2] == [
        "good  one: well", "BAD   two: ZeroDivisionError: division by zero"]


def test_an_image_in_which_all_is_fine_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagecheck, "CHECKS", {"one": lambda: "well"})
    assert imagecheck.main(["--out", str(tmp_path / "check.json")]) == 0


def test_an_engine_that_cannot_be_imported_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise ImportError(f"{name}: libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", broken)
    assert "libcudart.so.13" in imagecheck.tried("engine", imagecheck.engine).detail
