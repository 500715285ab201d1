"""Somebody with an account on the pretend cluster, who has installed the package and has a site file."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.pretend import PretendCluster
from tests.support import coverage

SITE = """
description: the pretend cluster of the tests, four nodes of four GPUs that are none
scheduler: slurm
partition: workq
node: {{gpus: 4, cpus: 288}}
runs_dir: {runs}
container: {container}
sweep: {{gpus: 1, load_generator_cpus: 2}}
poll_interval_s: 2
export: [HOME, USER, LOGNAME, PATH, LANG, SLURM_CONF, COVERAGE_PROCESS_START]
"""


@dataclass(frozen=True)
class Person:
    """Acts by commands only. ``bin`` holds the installed ``isambard-serve``."""

    cluster: PretendCluster
    bin: Path
    site: str
    path: str | None = None
    """The PATH of the commands and of their jobs, if not the usual one."""

    @classmethod
    def with_site(cls, cluster: PretendCluster, bin_folder: Path, site: str, container: str,
                  path: str | None = None) -> Person:
        """The cluster's ordinary user, whose site ``site`` is the pretend cluster with that ``container``."""
        settings = cluster.home / ".config/isambard-serve/sites"
        cluster.run(["mkdir", "-p", settings])
        text = SITE.format(runs=cluster.home / "runs" / site, container=container)
        cluster.run(["tee", settings / f"{site}.yaml"], input=text)
        return cls(cluster, bin_folder, site, path)

    @property
    def runs(self) -> Path:
        """Where this person's runs lie."""
        return self.cluster.home / "runs" / self.site

    def does(
        self, *arguments: str, check: bool = True, timeout: float = 300, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``isambard-serve ARGUMENTS``."""
        env = {"ISAMBARD_SERVE_SITE": self.site, **({"PATH": self.path} if self.path else {}),
               **coverage.environment(self.cluster.folder), **(env or {})}
        return self.cluster.run([self.bin / "isambard-serve", *arguments], check=check, timeout=timeout, env=env)

    def asks(self, *arguments: str, env: dict[str, str] | None = None) -> Any:
        """What ``isambard-serve ARGUMENTS --json`` prints."""
        return json.loads(self.does(*arguments, "--json", env=env).stdout)

    def submits(self, *arguments: str) -> str:
        """Submit a recipe and return the run id."""
        return self.starts(*arguments)[0]

    def starts(self, *arguments: str, env: dict[str, str] | None = None) -> list[str]:
        """Submit recipes, the rungs of a ladder, and return their run ids."""
        return [run["run_id"] for run in self.asks("submit", *arguments, env=env)["runs"]]

    def run_of(self, name: str) -> dict[str, Any]:
        """The run ``name`` as ``status`` reports it."""
        run: dict[str, Any] = self.asks("status", name)["runs"][0]
        return run

    def waits_for(self, name: str, *states: str, timeout_s: float = 240) -> dict[str, Any]:
        """Wait until the run is in one of ``states``, and return it."""
        run: dict[str, Any] = {}

        def reached() -> bool:
            nonlocal run
            run = self.run_of(name)
            return run["state"] in states

        try:
            self.cluster.wait_until(reached, timeout_s, f"{name} to be {' or '.join(states)}")
        except TimeoutError as error:
            error.add_note(f"it is {run}")
            raise
        return run

    def waits_for_an_empty_queue(self, timeout_s: float = 60) -> None:
        """Wait until no job is left."""
        self.cluster.wait_until(lambda: not self.cluster.queue(), timeout_s, "an empty queue")

    def engine_of(self, run_id: str) -> list[psutil.Process]:
        """The engine's processes of a run: the one that the watcher started first, then those below it."""
        return self.job_of(run_id)[1:]

    def job_of(self, run_id: str) -> list[psutil.Process]:
        """The processes of a run's serve job: the watcher first, then those below it."""
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if "isambard_serve.watch" in command and str(self.runs / run_id) in command:
                # Not by their numbers, which begin anew after the largest.
                return [process, *sorted(process.children(recursive=True), key=psutil.Process.create_time)]
        raise AssertionError(f"no watcher of {run_id} runs")
