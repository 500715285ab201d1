"""The whole way from a laptop: a real cluster behind a login node, a real engine on one of its nodes."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.pretend import PretendCluster
from tests.engine.environment import ensure
from tests.ssh.commands import SERVE
from tests.ssh.world import ALIAS, Laptop, World

SITE = """\
description: the pretend cluster of the tests, behind a login node
scheduler: slurm
partition: workq
detect: {mark}
node: {{gpus: 4, cpus: 288}}
runs_dir: {runs}
container: {{runtime: none, command: [{vllm}]}}
serve: {{interface: to-compute}}
sweep: {{gpus: 1, load_generator_cpus: 2}}
poll_interval_s: 2
export: [HOME, USER, LOGNAME, PATH, LANG, SLURM_CONF]
"""

CHAT = """
import openai
answer = openai.OpenAI().chat.completions.create(
    model=openai.OpenAI().models.list().data[0].id, max_tokens=4, messages=[{"role": "user", "content": "Hello"}],
    extra_body={"ignore_eos": True})
print(answer.usage.completion_tokens)
"""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""The tiny model has no template of its own."""


@pytest.fixture
def behind() -> Iterator[World]:
    """A world whose login node is that of a pretend cluster. The cluster's nodes have the login node's addresses."""
    folder = Path(tempfile.mkdtemp(prefix="w-", dir="/tmp"))
    folder.chmod(0o755)
    conf = folder / "cluster" / "etc" / "slurm.conf"
    try:
        with World.booted(folder / "world", {"SLURM_CONF": str(conf)}) as world, world.login.entered(), \
                PretendCluster.boot(folder / "cluster"):
            yield world
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_from_an_empty_login_node_to_a_chat_and_its_evidence(behind: World, tmp_path: Path,
                                                            offline: dict[str, str]) -> None:
    laptop = Laptop.unpacked(behind, tmp_path / "laptop")
    site = SITE.format(mark=behind.home, runs=behind.home / "runs", vllm=ensure() / "bin/vllm")
    for home in (laptop.folder, behind.home):
        path = home / ".config/isambard-serve/sites/pretend.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(site)
    (laptop.folder / ".config/isambard-serve/config.yaml").write_text(f"host: {ALIAS}\nsite: pretend\n")

    deployed = laptop.run([*SERVE, "deploy", "--in-job", "--json"], env=offline, timeout=400)
    assert json.loads(deployed.stdout)["new"]
    assert "in a job" in deployed.stderr

    ready = laptop.run([*SERVE, "submit", "tiny", "--serve", "--wait", "--json",
                        "--set", f"engine.args.chat-template={json.dumps(TEMPLATE)}"], timeout=300)
    (run,) = json.loads(ready.stdout)["runs"]
    assert run["state"] == "ready"
    chat = laptop.run([*SERVE, "tunnel", run["jobs"]["serve"], "--", sys.executable, "-c", CHAT], timeout=120)
    assert chat.stdout == "4\n"
    laptop.run([*SERVE, "cancel", run["run_id"]])
    laptop.run([*SERVE, "collect", run["run_id"], "--host", ALIAS], timeout=120)
    here = laptop.folder / "results" / run["run_id"]
    there = Path(run["directory"])
    assert (here / "engine" / "engine.log").read_bytes() == (there / "engine" / "engine.log").read_bytes()
    assert not (here / "api.key").exists()
