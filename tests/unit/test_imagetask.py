"""The tasks that make and try an image, the one that fetches weights, and what is known of a site's images."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isambard_serve import imagetask, shipped, task, weights
from isambard_serve.errors import UsageError
from isambard_serve.image import Image
from isambard_serve.imagecheck import Finding, ImageCheck
from isambard_serve.run import RunDir
from isambard_serve.site import Site
from isambard_serve.slurm import Slurm
from isambard_serve.task import TaskPlan
from tests.unit.helpers import RUN_ID, FakeSlurm, Stubs, loaded, pretend_site, small_recipe

DIGEST = "sha256:" + "0123456789abcdef" * 4
MINE = Image(name="mine", description="my own", base="vllm/vllm-openai:v0.33.0", digest=DIGEST, apt=("numactl",))
GIVEN: dict[str, Any] = {"run_id": RUN_ID, "runs_dir": "/scratch/runs", "python": "/opt/python", "time_s": 600}
RUN_DIR = f"/scratch/runs/{RUN_ID}"


def a_site(runtime: str, **changes: Any) -> Site:
    site = pretend_site(set={"HF_HOME": "/scratch/hf", "HF_HUB_OFFLINE": "1"})
    settings = {"runtime": runtime, "binds": ("/scratch",), "images_dir": "/scratch/images", "local": "/local",
                "command": ("vllm",), **changes}
    return msgspec.structs.replace(site, container=msgspec.structs.replace(site.container, **settings))


def words(plan: TaskPlan) -> list[str]:
    return [" ".join(command) for command in plan.commands]


def test_podman_builds_migrates_and_notes_what_was_built() -> None:
    plan = imagetask.build(MINE, a_site("podman-hpc"), **GIVEN)
    assert words(plan) == [
        "mkdir -p /scratch/images",
        "podman-hpc build --network=host --tag=localhost/isambard-serve/mine "
        f"--file={RUN_DIR}/Containerfile {RUN_DIR}",
        "podman-hpc migrate localhost/isambard-serve/mine",
        """sh -c podman-hpc images --format '{{.ReadOnly}}' "$1" | grep --quiet true """
        "sh localhost/isambard-serve/mine",
        "rm -f /scratch/images/mine.check.json /scratch/images/mine.kernels-humming.json "
        "/scratch/images/mine.kernels-marlin.json",
        f"cp {RUN_DIR}/image.json /scratch/images/mine.json"]
    assert plan.files["Containerfile"].splitlines()[2] == f"FROM docker.io/vllm/vllm-openai@{DIGEST}"
    assert msgspec.json.decode(plan.files["image.json"], type=Image) == MINE


@pytest.mark.parametrize(("listed", "code"), [("false\ntrue\n", 0), ("false\n", 1), ("", 1)])
def test_an_image_that_was_not_migrated_is_not_taken_for_built(stubs: Stubs, listed: str, code: int) -> None:
    stubs.add("podman-hpc", f"[ \"$*\" = \"images --format {{{{.ReadOnly}}}} localhost/isambard-serve/mine\" ] && "
                            f"printf '{listed}'")
    (check,) = [each for each in imagetask.build(MINE, a_site("podman-hpc"), **GIVEN).commands if each[0] == "sh"]
    assert subprocess.run(check, check=False).returncode == code


def test_apptainer_builds_beside_the_image_that_may_be_in_use_and_unpacks_in_memory() -> None:
    plan = imagetask.build(MINE, a_site("apptainer"), **GIVEN)
    scratch = f"/local/isambard-serve-{RUN_ID}"
    assert words(plan) == [
        "mkdir -p /scratch/images", f"mkdir -p {scratch}",
        f"apptainer build --fakeroot /scratch/images/.mine.{RUN_ID}.sif {RUN_DIR}/image.def",
        f"mv /scratch/images/.mine.{RUN_ID}.sif /scratch/images/mine.sif", f"rm -rf {scratch}",
        "rm -f /scratch/images/mine.check.json /scratch/images/mine.kernels-humming.json "
        "/scratch/images/mine.kernels-marlin.json",
        f"cp {RUN_DIR}/image.json /scratch/images/mine.json"]
    assert (plan.environment["APPTAINER_CACHEDIR"], plan.environment["APPTAINER_TMPDIR"]) == (scratch, scratch)
    assert "Bootstrap: docker" in plan.files["image.def"]


def test_an_image_without_a_digest_is_not_built() -> None:
    with pytest.raises(UsageError, match="isambard-serve image resolve mine"):
        imagetask.build(msgspec.structs.replace(MINE, digest=None), a_site("apptainer"), **GIVEN)


@pytest.mark.parametrize(("site", "why"), [
    (a_site("none"), "runs no containers"), (a_site("simulated"), "runs no containers"),
    (a_site("apptainer", images_dir=None), "does not say where its images lie")])
def test_a_site_without_images_builds_none(site: Site, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        imagetask.build(MINE, site, **GIVEN)


def test_what_the_commands_need_is_written_before_the_job_is_sent(tmp_path: Path) -> None:
    plan = imagetask.build(MINE, a_site("apptainer"), **{**GIVEN, "runs_dir": str(tmp_path)})
    run = task.submit(plan, Slurm({}, FakeSlurm()))
    assert (run.path / "image.def").read_text() == plan.files["image.def"]


def test_an_image_is_tried_in_itself_with_the_recipes_variables_and_the_result_is_kept() -> None:
    recipe = small_recipe({"image": "mine", "engine": {"env": {"A": "1"}}})
    plan = imagetask.check(recipe, a_site("podman-hpc"), **GIVEN)
    assert words(plan)[1].startswith("podman-hpc run --rm")
    assert "--env=A " in words(plan)[1]
    assert words(plan)[1].endswith(
        f"localhost/isambard-serve/mine {RUN_DIR}/inengine/enter.sh env PYTHONPATH={RUN_DIR}/intask "
        f"python3 -m isambard_serve.imagecheck --out {RUN_DIR}/check.json")
    assert words(plan)[2] == f"cp {RUN_DIR}/check.json /scratch/images/mine.check.json"
    assert len(plan.commands) == 3
    assert plan.environment["A"] == "1"
    assert plan.gpus == 1
    assert [need.what for need in plan.needs] == ["the engine's image"]


def test_expert_kernels_are_checked_as_the_recipe_uses_them() -> None:
    plan = imagetask.check(loaded("dp4-humming"), a_site("apptainer"), **GIVEN)
    check = plan.commands[-2]
    assert check[check.index("isambard_serve.kernelcheck"):] == (
        "isambard_serve.kernelcheck", "--out", f"{RUN_DIR}/kernels.json", "--backend", "humming", "--input-quant",
        '{"dtype":"float8e4m3","input_scale_group_size":128}', "--experts=256", "--ranks=4", "--top-k=6",
        "--hidden=4096", "--intermediate=2048")
    (other,) = [line for line in words(imagetask.check(loaded("tp4"), a_site("apptainer"), **GIVEN))
                if "kernelcheck" in line]
    assert "--backend marlin --input-quant null --experts=256 --ranks=4" in other


def test_weights_are_fetched_online_into_the_sites_cache_by_the_smallest_job() -> None:
    recipe = small_recipe({"image": "/mine.sif", "model": "them/theirs", "engine": {"args": {"revision": "v2"}}})
    file = "/home/me/token"
    plan = weights.plan(recipe, a_site("apptainer"), **GIVEN, token_file=file)
    (command,) = words(plan)
    assert command.startswith("apptainer exec --pid")
    assert "--bind=/home/me/token:/home/me/token:ro" in command
    assert command.endswith(f"env PYTHONPATH={RUN_DIR}/intask python3 -m isambard_serve.weightfetch them/theirs "
                            "--revision v2")
    assert (plan.environment["HF_HOME"], plan.environment["HF_HUB_OFFLINE"]) == ("/scratch/hf", "0")
    assert plan.environment["HF_TOKEN_PATH"] == file
    assert plan.gpus == pretend_site().sweep.gpus
    assert [need.path for need in plan.needs] == ["/mine.sif"]


def test_there_is_nothing_to_fetch_for_a_folder_or_a_simulated_engine() -> None:
    with pytest.raises(UsageError, match="a folder of this machine"):
        weights.plan(small_recipe({"model": "/models/mine"}), a_site("none"), **GIVEN)
    with pytest.raises(UsageError, match="has no weights"):
        weights.plan(small_recipe(), a_site("simulated"), **GIVEN)


def test_a_task_puts_this_package_where_its_containers_see_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    task.install(run)
    assert (run.intask / "isambard_serve" / "weightfetch.py").is_file()
    assert (run.inengine / "enter.sh").is_file()
    assert not list(run.intask.rglob("__pycache__"))


def written(folder: Path, name: str, record: msgspec.Struct) -> None:
    (folder / name).write_bytes(msgspec.json.encode(record))


def test_what_is_known_of_a_sites_images(tmp_path: Path) -> None:
    site = a_site("apptainer", images_dir=str(tmp_path))
    shipped_names = [path.stem for path in shipped.folder("images").glob("*.yaml")]
    assert [(each.image, each.defined, each.built, each.check) for each in imagetask.known(site)] == [
        (name, True, False, None) for name in shipped_names]
    (tmp_path / "theirs.sif").touch()
    (tmp_path / "vllm-0.33.sif").touch()
    written(tmp_path, "vllm-0.33.json", msgspec.structs.replace(MINE, name="vllm-0.33"))
    check = ImageCheck(passed=False, time=1.0, machine="aarch64", versions={"vllm": "0.33.0"},
                       findings=(Finding(what="gpu", passed=False, detail="none"),))
    written(tmp_path, "vllm-0.33.check.json", check)
    found = {each.image: each for each in imagetask.known(site)}
    assert (found["theirs"].defined, found["theirs"].built, found["theirs"].stale) == (False, True, None)
    assert (found["vllm-0.33"].built, found["vllm-0.33"].stale, found["vllm-0.33"].check) == (True, True, check)


def test_an_image_of_podmans_is_known_by_the_note_of_its_build(tmp_path: Path) -> None:
    site = a_site("podman-hpc", images_dir=str(tmp_path / "none"))
    assert not imagetask.known(site)[0].built
