"""The command ``probe``: it measures here or shows a record, and compares with what the site expects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from isambard_serve import probe
from isambard_serve.ceilings import Ceilings, Gpu, Matmul
from isambard_serve.cli import main, options
from isambard_serve.run import RunDir
from isambard_serve.slurm import Slurm
from tests.unit.helpers import PRETEND, FakeSlurm

Write = Callable[[str, str], Path]
RUN = "20261129-181258-probe-3f2a"
EXPECTED = "\nceilings:\n  bf16_tflop_s: 583\n"


def node(bf16_tflop_s: float) -> Ceilings:
    """A node of one GPU."""
    gpu = Gpu(index=0, name="NVIDIA GH200 120GB", uuid="GPU-0", pci="", memory_bytes=1, numa_node=0,
              power_limit_w=660.0)
    product = Matmul(gpu=0, arithmetic="bf16", burst_tflop_s=700.0, sustained_tflop_s=bf16_tflop_s, bound_by="power",
                     clocks=None)
    return Ceilings(node="n1", time=0.0, seconds=6.0, driver="580", torch="2.11", cuda="13.0", gpus=(gpu,),
                    numa_nodes={"0": "0-7"}, topology=(), matmuls=(product,))


@pytest.fixture
def runs_dir(user_file: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site that expects something, which this machine belongs to; where its runs are."""
    runs_dir = tmp_path / "runs"
    user_file("sites/here.yaml", PRETEND.read_text().replace("/shared/runs", str(runs_dir)) + EXPECTED)
    user_file("config.yaml", "site: here")
    monkeypatch.chdir(tmp_path)
    return runs_dir


def test_it_measures_here_keeps_the_record_and_compares_it_with_the_site(
        runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def measure(seconds: float) -> Ceilings:
        asked.append(seconds)
        return node(570.0)

    monkeypatch.setattr(probe, "measure", measure)
    result = CliRunner().invoke(main, ["probe", "--seconds", "2", "--json", "-o", "mine.json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["compared"] == [{"rate": "bf16_tflop_s", "expected": 583.0, "measured": 570.0, "low": False}]
    assert msgspec.convert(document["ceilings"], Ceilings) == node(570.0)
    assert msgspec.json.decode((tmp_path / "mine.json").read_bytes(), type=Ceilings) == node(570.0)
    assert asked == [2.0]
    assert "written to mine.json" in result.stderr


def test_a_node_that_is_slower_than_expected_is_shown_and_ends_with_1(runs_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.json").write_bytes(msgspec.json.encode(node(400.0)))
    result = CliRunner().invoke(main, ["probe", "slow.json"])
    assert result.exit_code == 1
    assert "expected bf16_tflop_s 583: 0.69 of it, LOW" in result.stdout
    assert "error: n1: more than 10% below what is expected: bf16_tflop_s" in result.stderr


def test_a_run_is_looked_for_here_and_at_the_site(runs_dir: Path, tmp_path: Path) -> None:
    run = RunDir(runs_dir / RUN)
    run.create()
    run.plan.write_text("{}")
    refused = CliRunner().invoke(main, ["probe", RUN])
    assert refused.exit_code == 2
    assert "has measured no ceilings\n  → isambard-serve submit probe\n" in refused.stderr
    run.task_script.touch()
    assert f"→ isambard-serve logs {RUN}" in CliRunner().invoke(main, ["probe", RUN]).stderr
    run.ceilings.write_bytes(msgspec.json.encode(node(600.0)))
    assert "600 TFLOP/s" in CliRunner().invoke(main, ["probe", RUN]).stdout
    collected = tmp_path / "results" / RUN
    collected.mkdir(parents=True)
    (collected / "ceilings.json").write_bytes(msgspec.json.encode(node(610.0)))
    for name in (RUN, f"results/{RUN}"):
        assert "610 TFLOP/s" in CliRunner().invoke(main, ["probe", name]).stdout


def test_a_machine_of_no_site_compares_with_nothing_and_says_so(
        user_file: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISAMBARD_SERVE_SITE", raising=False)
    record = tmp_path / "found.json"
    record.write_bytes(msgspec.json.encode(node(400.0)))
    result = CliRunner().invoke(main, ["probe", str(record)])
    assert result.exit_code == 0, result.output
    assert "note: compared with nothing" in result.stderr
    assert CliRunner().invoke(main, ["probe", str(record), "--site", "nowhere"]).exit_code == 2


@pytest.fixture
def gpus(user_file: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A site whose engine runs in a container, with the recipe's image in its place."""
    images = tmp_path / "images"
    images.mkdir()
    (images / "vllm-0.33.sif").touch()
    user_file("sites/plain.yaml", PRETEND.read_text().replace("/shared/runs", str(tmp_path / "runs")))
    user_file("sites/gpus.yaml", f"extends: plain\ncontainer: {{runtime: apptainer, images_dir: {images}}}\n")
    user_file("config.yaml", "site: gpus")
    fake = FakeSlurm()
    monkeypatch.setattr(options, "open_slurm", lambda site: Slurm({}, fake))
    return fake


def test_submit_probe_sends_one_job_that_measures_a_node(gpus: FakeSlurm, tmp_path: Path) -> None:
    script = CliRunner().invoke(main, ["submit", "probe", "--dry-run"])
    assert script.exit_code == 0, script.output
    assert "isambard_serve.probe --out" in script.stdout
    assert "isambard_serve.kernelcheck --out" in script.stdout
    assert gpus.calls == []
    result = CliRunner().invoke(main, ["submit", "probe", "--time", "20m", "--json"])
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.stdout)["runs"]
    assert run["recipe"] == "probe"
    assert [call[0] for call in gpus.calls] == ["sbatch"]


@pytest.mark.parametrize(("words", "code", "why"), [
    (("--serve",), 2, "a probe serves nothing"), (("--max-node-hours", "0.1"), 1, "may cost"),
    (("--image-of", "nothing"), 2, "nothing")])
@pytest.mark.usefixtures("gpus")
def test_what_a_probe_cannot_do_is_refused(words: tuple[str, ...], code: int, why: str) -> None:
    result = CliRunner().invoke(main, ["submit", "probe", *words])
    assert result.exit_code == code
    assert why in result.stderr


@pytest.mark.usefixtures("gpus")
def test_submit_warns_of_kernels_that_nobody_has_checked() -> None:
    result = CliRunner().invoke(main, ["submit", "dp4-humming", "dp4", "--dry-run"])
    assert [line for line in result.stderr.splitlines() if "warning" in line] == [
        "warning: dp4-humming: the humming kernels of vllm-0.33 have not passed a check here, and wrong "
        "ones do not show: isambard-serve image check dp4-humming",
        "warning: dp4: the marlin kernels of vllm-0.33 have not passed a check here, and wrong ones do not show: "
        "isambard-serve image check dp4"]
