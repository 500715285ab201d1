"""The kernel check around the kernels: its verdicts, its record and its exit codes. tests/engine computes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from isambard_serve import kernelcheck, roofline
from isambard_serve.kernelcheck import BatchResult, GemmResult, KernelCheck, Result
from tests.unit.helpers import HERE

SAMPLES = HERE.parents[1] / "docs" / "samples"


def result(backend: str, passed: bool | None) -> Result:
    """What a backend did for one batch, or could not do."""
    if passed is None:
        return Result(backend=backend, arithmetic="W4A8", version=None, passed=None, why="ImportError: no humming")
    gemms = tuple(GemmResult(gemm=name, error=0.0017 if passed else 7.5, us=100.0) for name in ("w13", "w2"))
    return Result(backend=backend, arithmetic="W4A8", version="0.1.20", passed=passed,
                  batches=(BatchResult(batch=64, rows=96, gemms=gemms),))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch that finds a GPU."""
    cuda = SimpleNamespace(is_available=lambda: True, empty_cache=lambda: None, get_device_name=lambda: "NVIDIA H200")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, __version__="2.11"))


@pytest.mark.parametrize(("passed", "code", "verdict"), [
    (True, 0, "passed"), (False, 1, "FAILED"), (None, 1, "not judged: ImportError: no humming")])
@pytest.mark.usefixtures("gpu")
def test_the_exit_code_is_the_asked_backends_verdict_whatever_stands_beside_it(
        passed: bool | None, code: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    results = iter([result("humming", passed), result("humming", not passed), result("marlin", not passed)])
    monkeypatch.setattr(kernelcheck, "check", lambda *_: next(results))
    out = tmp_path / "kernels.json"
    assert kernelcheck.main(["--out", str(out), "--batches", "64", "--experts", "128"]) == code
    record = msgspec.json.decode(out.read_bytes(), type=KernelCheck)
    assert record.result.passed is passed
    assert record.shape.experts == 128
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "NVIDIA H200, torch 2.11: 32 of 128 experts, top 6, hidden 4096, intermediate 2048"
    assert printed[1].endswith(verdict)


@pytest.mark.parametrize(("version", "passed", "error"), [("0.1.10", False, 7.5), ("0.1.20", True, 1.7e-3)])
def test_what_was_measured_on_an_h200_is_read_back_with_its_verdict(version: str, passed: bool, error: float) -> None:
    record = msgspec.json.decode((SAMPLES / f"h200-kernels-humming-{version}.json").read_bytes(), type=KernelCheck)
    assert record.result.version == version
    assert record.result.passed is passed
    assert [batch.batch for batch in record.result.batches] == list(kernelcheck.BATCHES)
    assert all(batch.error == pytest.approx(error, rel=0.15) for batch in record.result.batches)
    judged = [other for other in record.beside if other.passed is not None]     # without vLLM there is no Marlin
    assert judged
    assert all(other.passed for other in judged)            # in bf16 both versions compute what they should
    assert ("FAILED" in kernelcheck.text(record)) is not passed


def test_marlin_passed_on_an_h200_and_is_as_much_slower_than_humming_as_a_plan_expects() -> None:
    record = msgspec.json.decode((SAMPLES / "h200-kernels-humming-0.1.20.json").read_bytes(), type=KernelCheck)
    _, marlin = record.beside
    assert (marlin.backend, marlin.version) == ("marlin", "0.26.0")
    asked_for = msgspec.structs.replace(record, result=marlin)
    assert kernelcheck.covers(asked_for, "marlin", None)
    assert not kernelcheck.covers(asked_for, "humming", None)
    assert all(batch.error == pytest.approx(1.66e-3, rel=0.01) for batch in marlin.batches)
    for slower, humming in zip(marlin.batches, record.result.batches, strict=True):
        assert slower.us
        assert humming.us
        assert slower.us / humming.us == pytest.approx(roofline.humming_over_marlin(humming.batch), abs=0.006)


def test_a_batch_with_an_unwritten_row_or_an_untimed_product_has_no_figure() -> None:
    known = GemmResult(gemm="w13", error=0.001, us=5.0)
    whole = BatchResult(batch=1, rows=1, gemms=(known, GemmResult(gemm="w2", error=0.002, us=3.0)))
    assert (whole.error, whole.us) == (0.002, 8.0)
    torn = BatchResult(batch=1, rows=1, gemms=(known, GemmResult(gemm="w2", error=None, us=None)))
    assert (torn.error, torn.us) == (None, None)
    found = KernelCheck(gpu="g", torch="2", time=0.0, shape=kernelcheck.Shape(), threshold=0.005, beside=(),
                        result=Result(backend="humming", arithmetic="W4A8", version=None, passed=False,
                                      batches=(torn,)))
    assert "not finite" in kernelcheck.text(found)
    assert "not timed" in kernelcheck.text(found)
