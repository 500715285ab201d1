"""What Slurm binds of its own accord: a step's tasks, but not the batch step, which the engine is a child of."""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.cluster.pretend import PretendCluster

ALLOWED = "grep Cpus_allowed_list /proc/self/status | cut -f2"


@pytest.fixture(scope="module")
def tiny() -> Iterator[PretendCluster]:
    """A cluster whose nodes have two CPUs, to which processes are really bound."""
    if not {0, 1} <= os.sched_getaffinity(0):
        pytest.skip("needs the CPUs 0 and 1")
    with TemporaryDirectory(prefix="pretend-", dir="/tmp") as folder, PretendCluster.boot(
            Path(folder), tiny=True) as cluster:
        yield cluster


@pytest.mark.parametrize(("options", "batch"), [
    (["--gpus=4", "--cpus-per-task=2", "--exclusive"], "0-1"), (["--gpus=2"], "0-1"), (["--gpus=1"], "0")])
def test_the_batch_step_may_use_all_of_its_jobs_cpus_and_a_step_of_one_task_may_not(
    tiny: PretendCluster, options: list[str], batch: str
) -> None:
    script = f"#!/bin/bash\n{ALLOWED}\nsrun --overlap --ntasks=1 --cpus-per-task=1 bash -c '{ALLOWED}'\n"
    tiny.run(["sbatch", "--wait", "--output=said", *options], input=script)
    assert (tiny.home / "said").read_text().split() == [batch, "0"]
