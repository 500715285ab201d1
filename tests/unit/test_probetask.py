"""The task that measures a node, and what a recipe's image must have passed before its kernels are trusted."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isambard_serve import kernelcheck, probetask, task
from isambard_serve.errors import UsageError
from isambard_serve.kernelcheck import KernelCheck, Result, Shape
from isambard_serve.slurm import Slurm
from tests.unit.helpers import RUN_ID, FakeSlurm, loaded, small_recipe
from tests.unit.test_imagetask import GIVEN, RUN_DIR, a_site

SITE = a_site("apptainer")
QUANTISED = {"dtype": "float8e4m3", "input_scale_group_size": 128}
KEPT = "vllm-0.33.kernels-humming.json"


def check(passed: bool | None, arithmetic: str = "W4A8, scales per 128", backend: str = "humming") -> bytes:
    """A kept record."""
    return msgspec.json.encode(KernelCheck(
        gpu="NVIDIA GH200 120GB", torch="2.11", time=0.0, shape=Shape(), threshold=kernelcheck.THRESHOLD, beside=(),
        result=Result(backend=backend, arithmetic=arithmetic, version="0.1.20", passed=passed)))


def test_the_kernels_of_a_recipe_are_known_with_their_shape() -> None:
    found = probetask.checkable(loaded("dp4-humming"), SITE)
    assert found == probetask.Kernels("humming", QUANTISED, Shape())
    assert probetask.checkable(loaded("tp4"), SITE) == probetask.Kernels("marlin", None, Shape())
    assert probetask.checkable(loaded("tp4", "engine.args.moe-backend=triton"), SITE) is None


def test_without_expert_parallelism_each_gpu_has_a_slice_of_all_experts() -> None:
    found = probetask.checkable(loaded("dp4-humming", "engine.args.enable-expert-parallel=null"), SITE)
    assert found
    assert found.shape == Shape(ranks=1, intermediate=512)


@pytest.mark.parametrize(("name", "assignment", "obstacle"), [
    ("dp4-humming", "model=them/theirs", "humming kernels cannot be checked: nothing is known of the experts of "
     "them/theirs"),
    ("dp4-humming", "engine.env.VLLM_HUMMING_MOE_GEMM_TYPE=grouped",
     "humming kernels cannot be checked: only humming's indexed product is"),
    ("dp4", "engine.env.VLLM_MARLIN_INPUT_DTYPE=fp8",
     "marlin kernels cannot be checked: only marlin's product with activations in bf16 is"),
])
def test_kernels_that_cannot_be_checked_are_warned_of_and_not_run(name: str, assignment: str, obstacle: str) -> None:
    recipe = loaded(name, assignment)
    assert probetask.kernels(recipe, SITE, RUN_DIR) == []
    assert probetask.unchecked(recipe, SITE) == f"its {obstacle}"


def test_an_arithmetic_that_is_no_json_is_refused() -> None:
    with pytest.raises(UsageError, match="VLLM_HUMMING_INPUT_QUANT_CONFIG"):
        probetask.checkable(loaded("dp4-humming", "engine.env.VLLM_HUMMING_INPUT_QUANT_CONFIG=fp8"), SITE)


def test_a_recipe_that_leaves_activations_in_bf16_is_checked_so() -> None:
    recipe = loaded("dp4-humming", "engine.env.VLLM_HUMMING_INPUT_QUANT_CONFIG=null")
    (command,) = [line for line in probetask.kernels(recipe, SITE, RUN_DIR) if "--backend" in line]
    assert command[command.index("--input-quant") + 1] == "null"


def test_a_check_leaves_a_file_beside_the_image_only_if_it_passed() -> None:
    made, removed, checked, kept = probetask.kernels(loaded("dp4-humming"), SITE, RUN_DIR)
    assert made == ("mkdir", "-p", "/scratch/images")
    assert removed == ("rm", "-f", f"/scratch/images/{KEPT}")
    assert "isambard_serve.kernelcheck" in checked
    assert kept == ("cp", f"{RUN_DIR}/kernels.json", f"/scratch/images/{KEPT}")     # a failed command is the last


def test_the_check_takes_the_words_that_it_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def stop(*arguments: Any) -> Result:
        asked.extend(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(kernelcheck, "torch_with_gpu", lambda: None)
    monkeypatch.setattr(kernelcheck, "check", stop)
    recipe = loaded("dp4-humming", "engine.args.enable-expert-parallel=null")
    command = probetask.kernels(recipe, SITE, str(tmp_path))[2]
    with pytest.raises(KeyboardInterrupt):
        kernelcheck.main(command[command.index("isambard_serve.kernelcheck") + 1:])
    _, backend, shape, batches = asked
    assert (backend.arithmetic, shape, batches) == ("W4A8, scales per 128", Shape(ranks=1, intermediate=512),
                                                    list(kernelcheck.BATCHES))


@pytest.mark.parametrize(("record", "trusted"), [
    (check(True), True), (check(False), False), (check(None), False), (check(True, "W4A16"), False),
    (b"torn", False), (None, False)])
def test_a_recipe_is_warned_of_unless_its_own_kernels_passed_in_its_image(
        record: bytes | None, trusted: bool, tmp_path: Path) -> None:
    site = a_site("apptainer", images_dir=str(tmp_path))
    if record is not None:
        (tmp_path / KEPT).write_bytes(record)
    why = probetask.unchecked(loaded("dp4-humming"), site)
    if trusted:
        assert why is None
    else:
        assert why is not None
        assert "have not passed a check here" in why
        assert "isambard-serve image check dp4-humming" in why


@pytest.mark.parametrize("made", ["vllm-0.33.sif", "vllm-0.33.json"])
def test_what_passed_in_an_image_says_nothing_of_one_that_was_made_since(made: str, tmp_path: Path) -> None:
    site = a_site("apptainer", images_dir=str(tmp_path))
    (tmp_path / made).touch()
    (tmp_path / KEPT).write_bytes(check(True))
    checked = (tmp_path / KEPT).stat().st_mtime
    for age_s, trusted in ((-1, True), (1, False)):
        os.utime(tmp_path / made, (checked + age_s, checked + age_s))
        assert (probetask.unchecked(loaded("dp4-humming"), site) is None) == trusted


def test_what_passed_for_one_backend_says_nothing_of_another(tmp_path: Path) -> None:
    site = a_site("apptainer", images_dir=str(tmp_path))
    (tmp_path / KEPT).write_bytes(check(True))
    assert probetask.unchecked(loaded("dp4-humming"), site) is None
    assert probetask.unchecked(loaded("dp4"), site) == (
        "the marlin kernels of vllm-0.33 have not passed a check here, and wrong ones do not show: "
        "isambard-serve image check dp4")


def test_what_passed_without_an_overlay_says_nothing_of_it_with_one(tmp_path: Path) -> None:
    site = a_site("apptainer", images_dir=str(tmp_path))
    (tmp_path / KEPT).write_bytes(check(True))
    recipe = loaded("dp4-humming", "engine.overlay=/me/humming")
    assert probetask.unchecked(recipe, site)
    (_, _, command, kept) = probetask.kernels(recipe, site, RUN_DIR)
    assert kept[-1] == f"{tmp_path}/vllm-0.33+me_humming.kernels-humming.json"
    assert f"PYTHONPATH={RUN_DIR}/intask:/me/humming" in command


@pytest.mark.parametrize("runtime", ["none", "simulated"])
def test_without_an_image_there_is_nothing_to_be_warned_of(runtime: str) -> None:
    assert probetask.unchecked(loaded("dp4-humming"), a_site(runtime)) is None


def test_a_node_is_measured_whole_in_the_recipes_image() -> None:
    plan = probetask.plan(loaded("dp4-humming"), SITE, **GIVEN)
    assert plan.recipe == "probe"
    assert plan.gpus == plan.node_gpus
    assert [need.what for need in plan.needs] == ["the engine's image"]
    assert plan.commands[0][-4:] == ("-m", "isambard_serve.probe", "--out", f"{RUN_DIR}/ceilings.json")
    assert "isambard_serve.kernelcheck" in plan.commands[3]
    assert "--backend" in probetask.plan(loaded("tp4"), SITE, **GIVEN).commands[3]
    assert len(probetask.plan(loaded("tp4", "engine.args.moe-backend=triton"), SITE, **GIVEN).commands) == 1


def test_a_simulated_engine_has_nothing_to_measure() -> None:
    with pytest.raises(UsageError, match="its engine is simulated"):
        probetask.plan(loaded("dp4-humming"), a_site("simulated"), **GIVEN)


def test_the_probe_runs_from_its_run_directory_and_says_what_it_misses(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter of these tests has no PyTorch; that of an image does.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    plan = probetask.plan(small_recipe(), a_site("none"), **{**GIVEN, "runs_dir": str(tmp_path)})
    run = task.submit(plan, Slurm({}, FakeSlurm()))
    assert task.perform(run, threading.Event()) == 1
    assert run.read_events()[-1].reason == "env ended with 3: see the log"
    assert "there is no PyTorch here" in run.task_log.read_text()
    assert json.loads(run.plan.read_bytes())["run_id"] == RUN_ID
