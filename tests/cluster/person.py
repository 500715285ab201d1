"""Somebody with an account on the pretend cluster, who has installed the package and has a site file."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.pretend import PretendCluster

SITE = """
description: the pretend cluster of the tests, four nodes of four GPUs that are none
scheduler: slurm
partition: workq
node: {{gpus: 4, cpus: 288}}
runs_dir: {runs}
container: {{runtime: none, command: [{vllm}]}}
sweep: {{gpus: 1, load_generator_cpus: 2}}
poll_interval_s: 2
export: [HOME, USER, LOGNAME, PATH, LANG, SLURM_CONF]
"""


@dataclass(frozen=True)
class Person:
    """Acts by commands only. ``bin`` holds the installed ``isambard-serve``."""

    cluster: PretendCluster
    bin: Path

    @classmethod
    def with_site(cls, cluster: PretendCluster, bin_folder: Path, vllm: Path) -> Person:
        """The cluster's ordinary user, with a settings folder that names the pretend cluster as its site."""
        settings = cluster.home / ".config/isambard-serve"
        cluster.run(["mkdir", "-p", settings / "sites"])
        site = SITE.format(runs=cluster.home / "runs", vllm=vllm)
        cluster.run(["tee", settings / "sites/pretend.yaml"], input=site)
        cluster.run(["tee", settings / "config.yaml"], input="site: pretend\n")
        return cls(cluster, bin_folder)

    @property
    def runs(self) -> Path:
        """Where this person's runs lie."""
        return self.cluster.home / "runs"

    def does(
        self, *arguments: str, check: bool = True, timeout: float = 300, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``isambard-serve ARGUMENTS``."""
        return self.cluster.run([self.bin / "isambard-serve", *arguments], check=check, timeout=timeout, env=env)

    def asks(self, *arguments: str) -> Any:
        """What ``isambard-serve ARGUMENTS --json`` prints."""
        return json.loads(self.does(*arguments, "--json").stdout)

    def submits(self, *arguments: str) -> str:
        """Submit a recipe and return the run id."""
        run_id: str = self.asks("submit", *arguments)["runs"][0]["run_id"]
        return run_id

    def run_of(self, name: str) -> dict[str, Any]:
        """The run ``name`` as ``status`` reports it."""
        run: dict[str, Any] = self.asks("status", name)["runs"][0]
        return run

    def waits_for(self, name: str, *states: str, timeout_s: float = 240) -> dict[str, Any]:
        """Wait until the run is in one of ``states``, and return it."""

        def reached() -> dict[str, Any] | None:
            run = self.run_of(name)
            return run if run["state"] in states else None

        run = self.cluster.wait_until(reached, timeout_s, f"{name} to be {' or '.join(states)}")
        assert run is not None
        return run

    def waits_for_an_empty_queue(self, timeout_s: float = 60) -> None:
        """Wait until no job is left."""
        self.cluster.wait_until(lambda: not self.cluster.queue(), timeout_s, "an empty queue")

    def engine_of(self, run_id: str) -> list[psutil.Process]:
        """The engine's processes of a run: the one that the watcher started first, then those below it."""
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if "isambard_serve.watch" in command and str(self.runs / run_id) in command:
                return process.children(recursive=True)
        raise AssertionError(f"no watcher of {run_id} runs")
