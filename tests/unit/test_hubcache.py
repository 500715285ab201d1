"""The hub's cache: weights that are not all there are missed before a job is sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isambard_serve import hubcache

COMMIT = "0123456789abcdef"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model in the cache, of which nothing has been fetched."""
    model = Path(hubcache.folder(str(tmp_path), "them/theirs"))
    assert model == tmp_path / "hub" / "models--them--theirs"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    return model


def fetched(model: Path, *names: str, revision: str = COMMIT) -> None:
    for name in names:
        path = model / "snapshots" / revision / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def index(model: Path, *files: str) -> None:
    fetched(model, hubcache.INDEX)
    weights = {f"layer{number}": file for number, file in enumerate([*files, *files])}
    (model / "snapshots" / COMMIT / hubcache.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def test_a_revision_that_was_never_fetched_is_not_there(model: Path) -> None:
    assert hubcache.missing(model, "main") == "of revision main not found"
    fetched(model, "config.json", "model.safetensors")
    assert hubcache.missing(model, "v2") == "of revision v2 not found"
    assert hubcache.missing(model, COMMIT) is None


def test_all_files_that_the_index_names_must_be_there(model: Path) -> None:
    index(model, "model-1.safetensors", "model-2.safetensors")
    fetched(model, "config.json", "model-1.safetensors")
    assert hubcache.missing(model, "main") == "incomplete: 1 of 3 files are missing, model-2.safetensors for one"
    fetched(model, "model-2.safetensors")
    assert hubcache.missing(model, "main") is None


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "some.gguf"])
def test_of_weights_in_one_file_that_file_must_be_there(model: Path, name: str) -> None:
    fetched(model, "config.json", "tokenizer.json")
    assert hubcache.missing(model, "main") == "incomplete: 1 of 2 files are missing, model.safetensors for one"
    fetched(model, name)
    assert hubcache.missing(model, "main") is None


def test_a_file_whose_content_has_gone_is_not_there(model: Path) -> None:
    fetched(model, "config.json")
    (model / "snapshots" / COMMIT / "model.safetensors").symlink_to("../../blobs/gone")
    assert "model.safetensors for one" in str(hubcache.missing(model, "main"))


def test_weights_without_a_config_are_incomplete(model: Path) -> None:
    fetched(model, "model.safetensors")
    assert hubcache.missing(model, "main") == "incomplete: 1 of 2 files are missing, config.json for one"


def test_an_index_that_is_damaged_is_named(model: Path) -> None:
    fetched(model, "config.json", hubcache.INDEX)
    assert hubcache.missing(model, "main") == f"incomplete: {hubcache.INDEX} cannot be read"
