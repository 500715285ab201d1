"""What a job asks Slurm for: its sbatch directives, by the site's ways."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from isambard_serve.errors import UsageError
from isambard_serve.run import job_name
from isambard_serve.site import Site


def holder_directives(site: Site, run_id: str, run_dir: str, log: str, gpus: int, time_s: int
                      ) -> dict[str, str | bool]:
    """The directives of the job that a run stands and falls with; its output goes to ``log`` in ``run_dir``.

    Raises:
        UsageError: a value cannot be written.
    """
    wanted: dict[str, str | bool | None] = {
        "job-name": run_id,
        "partition": site.partition,
        **_passed_on(site),
        **held(site, gpus, time_s),
        # A requeued job would go on on another node: that is another run.
        "no-requeue": True,
        "export": ",".join(site.export),
        "chdir": run_dir,
        "output": f"{run_dir}/{log}",
        "open-mode": "append",
    }
    return _checked(wanted, site)


def sweep_directives(site: Site, run_id: str, run_dir: str) -> dict[str, str | bool]:
    """The directives of the job that measures a run, the smallest that the site allows.

    Raises:
        UsageError: a value cannot be written.
    """
    wanted: dict[str, str | bool | None] = {
        "job-name": job_name(run_id, "sweep"),
        "partition": site.partition,
        **_passed_on(site),
        "gpus": str(site.sweep.gpus) if site.sweep.gpus else None,
        "no-requeue": True,
        "export": ",".join(site.export),
        "chdir": run_dir,
    }
    return _checked(wanted, site)


def held(site: Site, gpus: int, time_s: int) -> dict[str, str | bool | None]:
    """What a job on one node holds, and for how long at most."""
    whole_node = gpus == site.node.gpus
    return {
        "nodes": "1",
        # A part of a node: the GPUs bring their cores and memory. A whole node: all its cores, nobody beside.
        "gpus": str(gpus) if gpus else None,
        "cpus-per-task": str(site.node.cpus) if whole_node else None,
        "exclusive": True if whole_node else None,
        "time": clock(time_s),
    }


def words(given: Mapping[str, str | bool]) -> list[str]:
    """Directives as they are given to a command."""
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]


def _passed_on(site: Site) -> dict[str, str | None]:
    passed: dict[str, str | None] = msgspec.to_builtins(site.directives)
    return passed


def _checked(directives: dict[str, str | bool | None], site: Site) -> dict[str, str | bool]:
    """``directives`` without those that are None. Line breaks are refused: they would end Slurm's comment."""
    result: dict[str, str | bool] = {}
    for name, value in directives.items():
        if isinstance(value, str) and not value.isprintable():
            raise UsageError(f"{value!r} holds characters that cannot be printed", where=f"site {site.name}: {name}")
        if value is not None:
            result[name] = value
    return result


def clock(total_s: int) -> str:
    """Seconds as Slurm's ``HH:MM:SS``, rounded up to whole minutes, which is what Slurm counts in."""
    minutes = math.ceil(total_s / 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"
