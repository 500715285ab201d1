"""Containers: the words before the engine's command, for each runtime; what is seen inside, and what is not said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from isambard_serve import container
from isambard_serve import site as sites
from isambard_serve.container import Need
from isambard_serve.errors import UsageError
from isambard_serve.site import Site
from tests.unit.helpers import RUN_ID, pretend_site, small_recipe

RUN_DIR = f"/scratch/p/runs/{RUN_ID}"
ENTER = f"{RUN_DIR}/inengine/enter.sh"
IMAGE = "vllm/vllm-openai:v0.33.0"


def a_site(runtime: str, **changes: Any) -> Site:
    """A site with that container runtime."""
    site = pretend_site()
    settings = {"runtime": runtime, "binds": ("/scratch/p",), "images_dir": "/images", "args": ("--gpu",),
                "local": "/local", **changes}
    return msgspec.structs.replace(site, container=msgspec.structs.replace(site.container, **settings))


def words(runtime: str, over: Mapping[str, Any] | None = None, *, role: container.Role = "engine",
          variables: Mapping[str, str] | None = None, **changes: Any) -> list[str]:
    recipe = small_recipe({"image": IMAGE, **(over or {})})
    return list(container.words(a_site(runtime, **changes), recipe, role=role, run_dir=RUN_DIR,
                                variables=variables or {}))


def test_podman_is_told_all_that_the_engine_needs() -> None:
    assert words("podman-hpc", variables={"HF_HOME": "/projects/hf", "VLLM_NO_USAGE_STATS": "1"}) == [
        "podman-hpc", "run", "--rm", "--init", "--interactive", f"--label=isambard-serve.run={RUN_ID}",
        f"--pidfile={RUN_DIR}/engine/container.pid",
        "--network=host", "--ipc=host", "--ulimit=host", "--pids-limit=-1", "--log-driver=none", "--gpu",
        "--volume=/scratch/p:/scratch/p:rw", "--volume=/projects/hf:/projects/hf:rw",
        f"--volume=/local/isambard-serve-{RUN_ID}/tmp:/tmp:rw",
        f"--volume=/local/isambard-serve-{RUN_ID}/kernels:/mnt:rw",
        f"--workdir={RUN_DIR}",
        "--env=HF_HOME", "--env=VLLM_NO_USAGE_STATS", "--env=CUDA_VISIBLE_DEVICES", "--env=OPENAI_API_KEY",
        "--env=SLURM_JOB_ID", "--env=VLLM_API_KEY", "--entrypoint=/bin/sh", IMAGE, ENTER]


def test_apptainer_is_told_all_that_the_engine_needs() -> None:
    assert words("apptainer", variables={"HF_HOME": "/scratch/p/hf"}) == [
        "apptainer", "exec", "--pid", "--gpu",
        "--bind=/scratch/p:/scratch/p:rw",
        f"--bind=/local/isambard-serve-{RUN_ID}/tmp:/tmp:rw",
        f"--bind=/local/isambard-serve-{RUN_ID}/kernels:/mnt:rw",
        "/images/vllm-openai_v0.33.0.sif", "/bin/sh", ENTER]


@pytest.mark.parametrize("runtime", ["none", "simulated"])
def test_without_a_container_nothing_stands_before_the_command(runtime: str) -> None:
    assert words(runtime) == []


@pytest.mark.parametrize("runtime", ["podman-hpc", "apptainer"])
@pytest.mark.parametrize(("role", "ending"), [("client", [ENTER, "--interactive"]), ("command", [IMAGE, ENTER])])
def test_what_runs_beside_the_engine_has_neither_its_folders_nor_its_pid_file(
        runtime: str, role: container.Role, ending: list[str]) -> None:
    inside = words(runtime, role=role)
    assert not [word for word in inside if "/local/" in word or "--pidfile" in word]
    assert inside[-1] == ending[-1]


def test_only_a_persons_shell_has_a_terminal() -> None:
    assert "--tty" in words("podman-hpc", role="shell")
    assert "--tty" not in words("podman-hpc", role="client")
    for runtime in ("podman-hpc", "apptainer"):
        assert words(runtime, role="shell")[-2:] == [ENTER, "--interactive"]


@pytest.mark.parametrize("runtime", ["podman-hpc", "apptainer"])
@pytest.mark.parametrize("role", ["engine", "client", "command", "shell"])
def test_no_value_of_a_variable_is_said(runtime: str, role: container.Role) -> None:
    assert "s3cret" not in " ".join(words(runtime, role=role, variables={"ANYTHING": "s3cret"}))


@pytest.mark.parametrize("runtime", ["podman-hpc", "apptainer"])
def test_an_overlay_is_seen_and_only_read(runtime: str) -> None:
    said = words(runtime, {"engine": {"overlay": "/patched"}})
    assert [word for word in said if word.endswith("=/patched:/patched:ro")]


def test_a_model_in_a_folder_of_its_own_is_seen_and_only_read() -> None:
    assert "--bind=/models/small:/models/small:ro" in words("apptainer", {"model": "/models/small"})


def test_a_folder_within_another_is_not_mounted_twice() -> None:
    inside = words("apptainer", {"model": "/scratch/p/model"}, variables={"HF_HOME": "/scratch/p/hf"},
                   binds=("/scratch/p/deep", "/scratch/p", "/scratch/p/"))
    assert [word for word in inside if word.startswith("--bind=/scratch")] == ["--bind=/scratch/p:/scratch/p:rw"]


@pytest.mark.parametrize("path", ["/a:b", "/a,b"])
@pytest.mark.parametrize("runtime", ["podman-hpc", "apptainer"])
def test_a_path_that_would_mount_something_else_is_refused(runtime: str, path: str) -> None:
    with pytest.raises(UsageError, match="cannot be seen inside a container"):
        words(runtime, binds=(path,))


@pytest.mark.parametrize("runtime", ["podman-hpc", "apptainer"])
def test_a_recipe_without_an_image_cannot_run_where_the_engine_needs_a_container(runtime: str) -> None:
    with pytest.raises(UsageError, match="recipe small: image: names no image"):
        words(runtime, {"image": None})


@pytest.mark.parametrize(("image", "sif"), [
    (IMAGE, "/images/vllm-openai_v0.33.0.sif"),
    ("registry.example:5000/a/b:tag", "/images/b_tag.sif"),
    ("a/b@sha256:0123", "/images/b_sha256_0123.sif"),
    ("/mine/my engine.sif", "/mine/my engine.sif"),
    ("vllm-0.33", "/images/vllm-0.33.sif"),
])
def test_an_image_is_the_file_that_apptainer_makes_of_it_and_it_is_needed(image: str, sif: str) -> None:
    site, recipe = a_site("apptainer"), small_recipe({"image": image})
    assert container.image(site, recipe) == sif
    (need,) = container.image_need(site, recipe)
    assert need.path == sif
    assert ("docker://" in need.remedy) is (":" in image or "@" in image)
    assert ("image build" in need.remedy) is (image == "vllm-0.33")


def test_podman_itself_says_whether_it_has_the_image() -> None:
    (need,) = container.image_need(a_site("podman-hpc"), small_recipe({"image": IMAGE}))
    assert need == Need(what="the engine's image", remedy=need.remedy,
                        command=("podman-hpc", "image", "exists", IMAGE))
    assert f"podman-hpc pull {IMAGE}" in need.remedy


def test_an_image_that_is_built_here_has_a_tag_of_ours_with_podman() -> None:
    (need,) = container.image_need(a_site("podman-hpc"), small_recipe({"image": "vllm-0.33"}))
    assert need.command[-1] == "localhost/isambard-serve/vllm-0.33"
    assert need.remedy.startswith("isambard-serve image build vllm-0.33")


def test_a_token_is_read_from_its_file_and_the_file_is_seen() -> None:
    inside = words("podman-hpc", variables={"HF_TOKEN_PATH": "/home/me/token"})
    assert "--volume=/home/me/token:/home/me/token:ro" in inside
    assert "--env=HF_TOKEN_PATH" in inside


@pytest.mark.parametrize("runtime", ["none", "simulated"])
def test_without_a_container_no_image_is_needed(runtime: str) -> None:
    assert container.image_need(a_site(runtime), small_recipe()) == ()
    assert container.local_folder(a_site(runtime), RUN_DIR) is None


def test_on_isambard_the_engine_sees_both_file_systems_and_writes_to_the_nodes_memory() -> None:
    site, _ = sites.resolved(sites.load("isambard-ai"), {}, from_afar=True)
    recipe = small_recipe({"image": IMAGE})
    inside = container.words(site, recipe, role="engine", run_dir=f"/scratch/PROJECT/USER.PROJECT/runs/{RUN_ID}",
                             variables=site.set)
    assert inside[:4] == ("apptainer", "exec", "--pid", "--nv")
    assert [word for word in inside if word.startswith("--bind=")] == [
        "--bind=/scratch/PROJECT/USER.PROJECT:/scratch/PROJECT/USER.PROJECT:rw",
        "--bind=/projects/PROJECT:/projects/PROJECT:rw",
        f"--bind=/local/user/1000/isambard-serve-{RUN_ID}/tmp:/tmp:rw",
        f"--bind=/local/user/1000/isambard-serve-{RUN_ID}/kernels:/mnt:rw"]
