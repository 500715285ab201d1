"""With accounting `sacct` knows every job, also those that ran while slurmdbd was away."""

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

from tests.cluster.pretend import Completed, PretendCluster
from tests.support import processes

WHOLE_NODE = "billing=288,cpu=288,gres/gpu=4,mem=460000M,node=1"
ONE_GPU = "billing=72,cpu=72,gres/gpu=1,mem=115000M,node=1"
PATIENCE_S = 30


class Entry(NamedTuple):
    """One line of `sacct`."""

    job_id: str
    state: str
    exit_code: str
    elapsed_s: int
    tres: str


@pytest.fixture(scope="module")
def cluster() -> Iterator[PretendCluster]:
    """A cluster with accounting, which the others of this folder go without."""
    scratch = TemporaryDirectory(prefix="pretend-", dir="/tmp")
    with scratch as folder, PretendCluster.boot(Path(folder), accounting=True) as booted:
        yield booted


@pytest.fixture(autouse=True)
def empty_queue(cluster: PretendCluster) -> Iterator[None]:
    """Let no job outlive its test."""
    yield
    cluster.cancel_all()


def submit(cluster: PretendCluster, command: str, *options: str) -> str:
    return cluster.run(["sbatch", "--parsable", "--gpus=1", *options, f"--wrap={command}"]).stdout.strip()


def sacct(cluster: PretendCluster, job_id: str, *fields: str) -> Completed:
    return cluster.run(["sacct", "-nPX", "-j", job_id, f"--format={','.join(fields)}"], check=False)


def entry_of_ended(cluster: PretendCluster, job_id: str) -> Entry:
    """Wait for the end: a state may come seconds before it, and the elapsed time grows meanwhile."""

    def has_end() -> bool:
        return sacct(cluster, job_id, "End").stdout.strip() not in ("", "Unknown")

    cluster.wait_until(has_end, PATIENCE_S, f"the end of job {job_id} in the books")
    line = sacct(cluster, job_id, "JobID", "State", "ExitCode", "ElapsedRaw", "AllocTRES").stdout.strip()
    same_id, state, exit_code, elapsed, tres = line.split("|")
    return Entry(same_id, state, exit_code, int(elapsed), tres)


def names(cluster: PretendCluster) -> list[str]:
    """All jobs of the last hour; slurmctld sends a job's name up to 5 s late, even after its end."""
    return cluster.run(["sacct", "-nPX", "--starttime=now-1hours", "--format=JobName"]).stdout.split()


def run_time_s(cluster: PretendCluster, job_id: str) -> int:
    hours, minutes, seconds = cluster.show(job_id)["RunTime"].split(":")
    return int(hours) * 3600 + int(minutes) * 60 + int(seconds)


def test_a_finished_job_is_known_with_its_time_and_its_share_of_the_node(cluster: PretendCluster) -> None:
    completed, failed = submit(cluster, "sleep 2", "--gpus=4", "--nodes=1"), submit(cluster, "exit 3")
    entry = entry_of_ended(cluster, completed)
    assert entry == (completed, "COMPLETED", "0:0", run_time_s(cluster, completed), WHOLE_NODE)
    assert entry.elapsed_s >= 1  # whole seconds on the clock, not a span
    assert entry_of_ended(cluster, failed)[:3] == (failed, "FAILED", "3:0")
    assert sacct(cluster, completed, "Account", "User").stdout == "brics.pretend|isambard\n"


def test_a_cancelled_job_is_known_with_who_did_it(cluster: PretendCluster) -> None:
    mine, yours = submit(cluster, "sleep 300"), submit(cluster, "sleep 300")
    cluster.wait_until(lambda: {job.state for job in cluster.queue()} == {"RUNNING"}, PATIENCE_S, "two jobs to run")
    cluster.run(["scancel", mine])
    cluster.admin(["scancel", yours])
    assert entry_of_ended(cluster, mine).state == f"CANCELLED by {cluster.user.pw_uid}"
    assert entry_of_ended(cluster, yours).state == "CANCELLED by 0"


def test_a_job_that_nobody_submitted_is_unknown_without_an_error(cluster: PretendCluster) -> None:
    answer = sacct(cluster, "4711", "JobID", "State")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")


def test_what_ends_in_an_outage_is_known_after_it(cluster: PretendCluster) -> None:
    with cluster.outage("slurmdbd"):
        job_id = submit(cluster, "sleep 1")
        cluster.wait_until(lambda: not cluster.queue(), PATIENCE_S, "the end of the job")
        assert cluster.show(job_id)["JobState"] == "COMPLETED"
        asked = time.monotonic()
        answer = sacct(cluster, job_id, "JobID", "State")
        assert time.monotonic() - asked < 5
        assert (answer.returncode, answer.stdout) == (1, "")
        assert "Problem talking to the database: Connection refused" in answer.stderr
    ran_s = run_time_s(cluster, job_id)
    assert entry_of_ended(cluster, job_id) == (job_id, "COMPLETED", "0:0", ran_s, ONE_GPU)


def test_a_second_cluster_has_books_of_its_own_and_leaves_nothing_running(cluster: PretendCluster) -> None:
    with TemporaryDirectory(prefix="pretend-", dir="/tmp") as folder:
        with PretendCluster.boot(Path(folder), accounting=True) as second:
            submit(cluster, "true", "--job-name=here")
            submit(second, "true", "--job-name=there")
            cluster.wait_until(lambda: "here" in names(cluster), PATIENCE_S, "the first cluster's entry")
            second.wait_until(lambda: names(second) == ["there"], PATIENCE_S, "the second cluster's entry")
            assert "there" not in names(cluster)
            running = {each.name for each in processes.using(second.folder)}
            assert {"mariadbd", "slurmdbd"} <= running & second.daemons.keys()
        assert processes.using(second.folder) == []
        assert all(daemon.returncode == 0 for daemon in second.daemons.values())
