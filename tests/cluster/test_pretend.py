"""The pretend cluster does what the toolkit relies on a real one to do."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.cluster.pretend import NODES, PretendCluster
from tests.support import processes

NODE = ("--gpus=4", "--nodes=1", "--time=0:05:00")
PATIENCE_S = 60


@pytest.fixture(autouse=True)
def empty_queue(cluster: PretendCluster) -> Iterator[None]:
    """Let no job outlive its test."""
    yield
    cluster.cancel_all()


def submit(cluster: PretendCluster, script: str, *options: str) -> str:
    sbatch = ["sbatch", "--parsable", "--output=%j.out", *NODE, *options]
    return cluster.run(sbatch, input=f"#!/bin/bash\n{script}\n").stdout.strip()


def wait_for(cluster: PretendCluster, job_id: str, state: str) -> dict[str, str]:
    what = f"job {job_id} to be {state}"
    cluster.wait_until(lambda: cluster.show(job_id)["JobState"] == state, PATIENCE_S, what)
    return cluster.show(job_id)


def output(cluster: PretendCluster, script: str, *options: str) -> list[str]:
    job_id = submit(cluster, script, *options)
    wait_for(cluster, job_id, "COMPLETED")
    return (cluster.home / f"{job_id}.out").read_text().splitlines()


def test_four_idle_nodes(cluster: PretendCluster) -> None:
    nodes = cluster.run(["sinfo", "--noheader", "--Node", "--format=%N %T %c %m %G %P"]).stdout.splitlines()
    assert nodes == [f"{node} idle 288 460000 gpu:gh200:4 workq*" for node in NODES]


def test_a_job_gets_a_whole_node(cluster: PretendCluster) -> None:
    script = "echo $SLURM_CPUS_ON_NODE $CUDA_VISIBLE_DEVICES; id -un; echo $HOME"
    assert output(cluster, script) == ["288 0,1,2,3", "isambard", str(cluster.home)]


def test_a_gpu_brings_its_share_of_the_node(cluster: PretendCluster) -> None:
    job = wait_for(cluster, submit(cluster, "sleep 300", "--gpus=1"), "RUNNING")
    assert job["TRES"] == "cpu=72,mem=115000M,node=1,billing=72"


def test_a_job_without_gpus_is_refused(cluster: PretendCluster) -> None:
    refused = cluster.run(["sbatch", "--wrap=true"], check=False)
    assert refused.returncode == 1
    assert "no GPU directive" in refused.stderr
    assert cluster.queue() == []


def test_a_dependent_job_starts_after_the_other(cluster: PretendCluster) -> None:
    first = submit(cluster, "sleep 300", "--hold", "--job-name=first of two")
    second = submit(cluster, "true", f"--dependency=after:{first}", "--job-name=second")
    assert set(cluster.queue()) == {(first, "first of two", "PENDING"), (second, "second", "PENDING")}
    assert cluster.show(second)["Dependency"] == f"after:{first}(unfulfilled)"
    cluster.run(["scontrol", "release", first])
    ended = wait_for(cluster, second, "COMPLETED")
    assert ended["StartTime"] >= wait_for(cluster, first, "RUNNING")["StartTime"]


def test_a_step_from_another_job_joins_the_first_jobs_node(cluster: PretendCluster) -> None:
    first = submit(cluster, "sleep 300")
    node = wait_for(cluster, first, "RUNNING")["NodeList"]
    script = f"""\
echo $SLURMD_NODENAME
unset ${{!SLURM@}}
export SLURM_CONF={cluster.conf}
srun --jobid={first} --overlap --nodes=1 --ntasks=1 printenv SLURMD_NODENAME SLURM_JOB_ID
"""
    own_node, *step = output(cluster, script)
    assert own_node != node
    assert step == [node, first]


def test_cancelling_ends_the_batch_script_by_term(cluster: PretendCluster) -> None:
    job_id = submit(cluster, "trap 'echo TERM; exit' TERM; touch $SLURM_JOB_ID.ready; sleep 300 & wait")
    cluster.wait_until((cluster.home / f"{job_id}.ready").exists, PATIENCE_S, "the trap")
    cluster.run(["scancel", job_id])
    cluster.wait_until(lambda: not cluster.queue(), PATIENCE_S, "the end of the job")
    assert cluster.show(job_id)["JobState"] == "CANCELLED"
    assert "TERM" in (cluster.home / f"{job_id}.out").read_text().splitlines()


def test_jobs_may_open_many_files(cluster: PretendCluster) -> None:
    login = cluster.run(["bash", "-c", "ulimit -Hn"]).stdout
    (job,) = output(cluster, "ulimit -Hn")
    assert min(int(login), int(job)) >= 16_384


def test_there_is_no_accounting(cluster: PretendCluster) -> None:
    answer = cluster.run(["sacct"], check=False)
    assert answer.returncode == 1
    assert "accounting storage is disabled" in answer.stderr


def test_a_command_runs_as_the_ordinary_user_alone(cluster: PretendCluster) -> None:
    said = cluster.run(["sh", "-c", "id -un; id -Gn; pwd; env"], env={"MINE": "yes"}).stdout
    user, groups, cwd, *environment = said.splitlines()
    assert (user, groups, cwd) == ("isambard", "isambard", str(cluster.home))
    assert "MINE=yes" in environment
    assert {line.partition("=")[0] for line in environment} == {"MINE", "PWD", *cluster.environment}


def test_a_second_cluster_leaves_nothing_running(cluster: PretendCluster) -> None:
    """Not even a job that ignores TERM, nor a process that left its job for a session of its own."""
    script = """\
trap '' TERM
(setsid sleep 600 > /dev/null 2>&1 < /dev/null &)
touch $SLURM_JOB_ID.ready
while :; do sleep 600; done
"""
    with TemporaryDirectory(prefix="pretend-", dir="/tmp") as folder:
        with PretendCluster.boot(Path(folder), extra_slurm_conf="KillWait=2") as second:
            job_id = submit(second, script)
            second.wait_until((second.home / f"{job_id}.ready").exists, PATIENCE_S, "the job")
            waiting = second.popen(["srun", "--gpus=4", "--nodes=1", "sleep", "600"])
            second.wait_until(lambda: len(second.queue()) == 2, PATIENCE_S, "two jobs")
            assert cluster.queue() == []
            running = processes.using(second.folder)
            assert {"munged", "slurmctld", "slurmd", "slurmstepd", "sleep"} <= {each.name for each in running}
        assert processes.using(second.folder) == []
        assert all(daemon.returncode == 0 for daemon in second.daemons.values())
        waiting.communicate()


def test_a_folder_that_will_not_do_is_refused(cluster: PretendCluster, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    refused = {tmp_path / "x": "cannot enter", cluster.folder: "already", Path("/"): "neither empty nor"}
    for folder, reason in refused.items():
        with pytest.raises(ValueError, match=reason), PretendCluster.boot(folder):
            pass


def test_a_daemon_that_dies_at_boot_says_why() -> None:
    with TemporaryDirectory(prefix="pretend-", dir="/tmp") as folder:
        boot = PretendCluster.boot(Path(folder), extra_slurm_conf="NoSuchKey=1")
        with pytest.raises(RuntimeError, match="NoSuchKey"), boot:
            pass
        assert processes.using(Path(folder)) == []
