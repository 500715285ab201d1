"""Images that are built here: definitions are strict, and a digest is written where it belongs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from isambard_serve import image, render, shipped
from isambard_serve.errors import UsageError

Write = Callable[[str, str], Path]
DIGEST = "sha256:" + "0123456789abcdef" * 4
OWN = "description: my own\nbase: vllm/vllm-openai:v0.33.0\n"


@pytest.mark.parametrize("name", [path.stem for path in shipped.folder("images").glob("*.yaml")])
def test_a_shipped_image_loads(name: str) -> None:
    assert image.load(name).name == name


def test_what_a_recipe_may_name_is_told_from_a_reference() -> None:
    assert image.NAME.fullmatch("vllm-0.33")
    assert not [text for text in ("a/b", "a:b", "/mine.sif", "./x", "", "a b") if image.NAME.fullmatch(text)]


def test_a_base_without_a_digest_is_refused_and_the_remedy_says_how_to_get_one(write: Write) -> None:
    write("here/images/mine.yaml", OWN)
    with pytest.raises(UsageError, match=r"image mine: digest: .*\n.*isambard-serve image resolve mine"):
        _ = image.load("mine").pinned


def test_a_digest_goes_into_the_users_own_definition_in_its_place(write: Write) -> None:
    path = write("here/images/mine.yaml", f"# mine\n{OWN}apt: [numactl]\n")
    assert image.write_digest("mine", DIGEST) == path
    assert path.read_text() == f"# mine\n{OWN}apt: [numactl]\ndigest: {DIGEST}\n"
    assert image.load("mine").pinned == f"docker.io/vllm/vllm-openai@{DIGEST}"
    other = DIGEST.replace("0", "1")
    image.write_digest("mine", other)
    assert path.read_text() == f"# mine\n{OWN}apt: [numactl]\ndigest: {other}\n"


def test_a_shipped_definition_is_extended_by_one_of_the_users(tmp_path: Path) -> None:
    path = image.write_digest("vllm-0.33", DIGEST)
    assert path == tmp_path / "home/config/isambard-serve/images/vllm-0.33.yaml"
    assert path.read_text() == f"extends: vllm-0.33\ndigest: {DIGEST}\n"
    loaded = image.load("vllm-0.33")
    assert loaded.pinned == f"docker.io/vllm/vllm-openai@{DIGEST}"
    assert "numactl" in loaded.apt
    assert image.write_digest("vllm-0.33", DIGEST) == path


@pytest.mark.parametrize(("reference", "parts"), [
    ("vllm/vllm-openai:v1", ("docker.io", "vllm/vllm-openai", "v1")),
    ("docker.io/vllm/vllm-openai", ("docker.io", "vllm/vllm-openai", "latest")),
    ("ubuntu:24.04", ("docker.io", "library/ubuntu", "24.04")),
    ("nvcr.io/nvidia/vllm:25.05", ("nvcr.io", "nvidia/vllm", "25.05")),
    ("localhost:5000/a:1", ("localhost:5000", "a", "1")),
    ("localhost:5000/a", ("localhost:5000", "a", "latest")),
])
def test_a_reference_names_a_registry_a_repository_and_a_tag(reference: str, parts: tuple[str, str, str]) -> None:
    assert image.parts(reference) == parts


@pytest.mark.parametrize(("line", "key"), [
    ("base: 'a b'", "base"), ("base: --x", "base"), ("base: a@sha256:0", "base"), ("apt: ['a; b']", "apt"),
    ("apt: [-o]", "apt"), ("digest: sha256:0", "digest"), ("digest: latest", "digest"), ("pip: ['--pre']", "pip"),
    ("humming: main", "humming"), ("humming: git+https://x/y", "humming"), ("humming: git+ssh://x/y@z", "humming"),
])
def test_what_would_be_another_command_or_another_image_is_refused(write: Write, line: str, key: str) -> None:
    text = "\n".join(each for each in OWN.splitlines() if not each.startswith(f"{key}:"))
    write("here/images/mine.yaml", f"{text}\n{line}\n")
    with pytest.raises(UsageError, match=rf"mine\.yaml: {key}: .* (cannot be used|is no package|is neither)"):
        image.load("mine")


def test_an_image_that_is_not_there_names_the_nearest_one() -> None:
    with pytest.raises(UsageError, match=r"no image is called 'vllm-0.34'\n.*did you mean 'vllm-0.33'"):
        image.load("vllm-0.34")


@pytest.mark.parametrize(("humming", "requirement"), [
    ("0.1.20", "humming-kernels==0.1.20"),
    ("git+https://example.org/me/humming@abc", "humming-kernels @ git+https://example.org/me/humming@abc"),
])
def test_kernels_are_installed_at_a_version_or_a_forks_revision(write: Write, humming: str, requirement: str) -> None:
    write("here/images/mine.yaml", f"{OWN}pip: [nixl==1.0]\nhumming: {humming}\n")
    assert image.load("mine").requirements == ("nixl==1.0", requirement)


FULL = image.Image(name="full", description="all that there\nis", base="vllm/vllm-openai:v0.33.0", digest=DIGEST,
                   apt=("numactl", "git"), humming="git+https://example.org/me/humming@a'b;c")


def test_a_containerfile_is_the_base_by_its_content_and_one_layer_for_each_addition() -> None:
    assert render.text("Containerfile", image=FULL, version="0.0.0") == f"""\
# Image full: all that there is.
# vllm/vllm-openai:v0.33.0 by its content, and what the recipes want besides. Written by isambard-serve 0.0.0.
FROM docker.io/vllm/vllm-openai@{DIGEST}

RUN apt-get update \\
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends numactl git \\
 && rm -rf /var/lib/apt/lists/*

# Alone, so that it cannot bring another PyTorch along.
RUN python3 -m pip install --no-cache-dir --no-deps 'humming-kernels @ git+https://example.org/me/humming@a'"'"'b;c'
"""


def test_an_apptainer_definition_says_the_same() -> None:
    assert render.text("image.def", image=FULL, version="0.0.0") == f"""\
# Image full: all that there is.
# vllm/vllm-openai:v0.33.0 by its content, and what the recipes want besides. Written by isambard-serve 0.0.0.
Bootstrap: docker
From: docker.io/vllm/vllm-openai@{DIGEST}

%post
    set -eu
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends numactl git
    rm -rf /var/lib/apt/lists/*
    # Alone, so that it cannot bring another PyTorch along.
    python3 -m pip install --no-cache-dir --no-deps 'humming-kernels @ git+https://example.org/me/humming@a'"'"'b;c'
"""


def test_nothing_is_added_to_an_image_that_wants_nothing() -> None:
    plain = image.Image(name="plain", description="d", base="a/b:c", digest=DIGEST)
    lines = render.text("Containerfile", image=plain, version="0").splitlines()
    assert [line for line in lines if not line.startswith("#")] == [f"FROM docker.io/a/b@{DIGEST}"]
