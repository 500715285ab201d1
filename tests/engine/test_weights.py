"""Fetching weights with the hub's own client, from a stand-in for the hub, by our own command and without a cluster."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from isambard_serve import hubcache
from tests.engine.hub import Hub

NAME = "them/theirs"
BIG = os.urandom(25_000_000)  # more than two of the client's pieces
FILES = {
    "config.json": b"{}",
    "model-1.safetensors": BIG,
    "model-2.safetensors": b"second",
    "model.safetensors.index.json": json.dumps(
        {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode(),
    "pytorch_model.bin": b"the same weights in another form",
}
SITE = """\
description: a machine without Slurm, with the real engine
scheduler: local
node: {{gpus: 1, cpus: 1}}
runs_dir: {home}/runs
container: {{runtime: none, command: [{vllm}]}}
sweep: {{gpus: 0, load_generator_cpus: 1}}
set: {{HF_HOME: {home}/cache, HF_HUB_OFFLINE: "1", HF_ENDPOINT: "{url}"}}
export: [HOME, PATH]
"""
RECIPE = """\
description: a model of the hub
model: them/theirs
engine: {version: 0.32.0}
resources: {gpus: 1, time: 30m}
bench: {isl: 8, osl: 8, concurrency: [1]}
"""

Does = Callable[..., "subprocess.CompletedProcess[str]"]


def at_home(home: Path, vllm: Path, hub: Hub) -> Does:
    """Run ``isambard-serve`` with a home, a site and a recipe of one's own."""
    settings = home / "config" / "isambard-serve"
    for name, text in (("sites/here.yaml", SITE.format(home=home, vllm=vllm, url=hub.url)),
                       ("jobs/theirs.yaml", RECIPE)):
        path = settings / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environ = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "config"), "PATH": os.environ["PATH"],
               "ISAMBARD_SERVE_SITE": "here"}

    def does(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "isambard_serve", *words], env=environ, capture_output=True,
                              text=True, timeout=120, check=False, cwd=home)

    return does


def test_weights_are_fetched_once_gone_on_with_where_they_were_cut_and_then_all_there(
        engine_venv: Path, tmp_path: Path) -> None:
    hub = Hub(NAME, FILES, cuts={"model-1.safetensors": [15_000_000]})
    with hub.serving():
        does = at_home(tmp_path, engine_venv / "bin/vllm", hub)
        assert "the model's weights not found" in does("submit", "theirs", "--dry-run").stderr
        fetched = does("weights", "fetch", "theirs", "--wait")
        assert fetched.returncode == 0, fetched
        assert "4 files, 0.03 GB" in fetched.stdout
        assert "0.03 of 0.03 GB (100 %)" in fetched.stdout
        asked = [wanted for name, wanted in hub.got if name == "model-1.safetensors"]
        assert len(asked) == 2
        assert asked[0] is None
        assert int(str(asked[1]).removeprefix("bytes=").rstrip("-")) > 0  # not from the beginning again
        assert "pytorch_model.bin" not in {name for name, _ in hub.got}

        model = Path(hubcache.folder(str(tmp_path / "cache"), NAME))
        assert hubcache.missing(model, "main") is None
        assert (model / "snapshots" / (model / "refs/main").read_text() / "model-1.safetensors").read_bytes() == BIG
        assert does("submit", "theirs", "--dry-run").returncode == 0

        hub.got.clear()
        assert does("weights", "fetch", "theirs", "--wait").returncode == 0
        assert hub.got == []


def test_a_model_that_the_hub_shows_to_some_is_fetched_with_the_token_in_the_persons_file(
        engine_venv: Path, tmp_path: Path) -> None:
    token = secrets.token_hex()
    hub = Hub(NAME, {"config.json": b"{}", "model.safetensors": b"x"}, token=token)
    with hub.serving():
        does = at_home(tmp_path, engine_venv / "bin/vllm", hub)
        refused = does("weights", "fetch", "theirs", "--wait")
        assert refused.returncode == 1
        assert "HF_TOKEN_PATH" in refused.stdout
        own = tmp_path / ".cache" / "huggingface" / "token"
        own.parent.mkdir(parents=True)
        own.write_text(token)
        assert does("weights", "fetch", "theirs", "--wait").returncode == 0
    for path in (tmp_path / "runs").rglob("*"):
        assert not path.is_file() or token.encode() not in path.read_bytes()


def test_the_real_engines_environment_is_tried_and_lacks_a_gpu(engine_venv: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [engine_venv / "bin/python3", "-m", "isambard_serve.imagecheck", "--out", str(tmp_path / "check.json")],
        env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done
    found = json.loads((tmp_path / "check.json").read_text())
    assert {each["what"]: each["passed"] for each in found["findings"]}["engine"] is True
    assert "sees no GPU" in done.stdout
    assert found["versions"]["vllm"].startswith("0.32.0")
    assert "torch" in found["versions"]
