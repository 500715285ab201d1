"""Real podman-hpc and podman, without root, in real Slurm jobs: all is in place inside, and nothing is left outside.

It is ended TRIALS times, at a random moment in a random way: three here, more by `make soak`.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.cluster.person import Person
from tests.cluster.podman import IMAGE, Podman
from tests.cluster.pretend import PretendCluster
from tests.engine.environment import ensure
from tests.support.installation import dependencies
from tests.support.waiting import wait_until

TRIALS = int(os.environ.get("ISAMBARD_SERVE_TRIALS", "3"))
KEEPERS = ("conmon", "fuse-overlayfs", "runc")
QUICK = ("--set", f"image={IMAGE}", "--set", "bench.concurrency=[1, 2]", "--set", "resources.gpus=2",
         "--set", "engine.extra_args=[--sim-time-scale, '20']")


@pytest.fixture(scope="module")
def podman(cluster: PretendCluster) -> Iterator[Podman]:
    """The user's podman."""
    with Podman.ready(cluster, dependencies()) as ready:
        yield ready


@pytest.fixture(scope="module")
def contained(cluster: PretendCluster, installed: Path, podman: Podman) -> Person:
    """Somebody whose engine, the simulated one, runs in a container."""
    settings = {"runtime": "podman-hpc", "command": [str(installed / "python"), "-m", "isambard_serve.sim"],
                "args": ["--gpu"], "binds": podman.mounts, "local": str(cluster.home / "local"),
                "kernels_dir": str(cluster.home / "kernels")}
    cluster.run(["mkdir", "-p", cluster.home / "local"])
    return Person.with_site(cluster, installed, "contained", json.dumps(settings), podman.path)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(cluster: PretendCluster, podman: Podman) -> Iterator[None]:
    """What one test fails to end is none of the next one's business."""
    yield
    cluster.cancel_all()
    podman.run("rm", "--all", "--force", "--time=0")
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if any(name in words for name in KEEPERS) and belongs(process, cluster):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def of_run(person: Person, run_id: str) -> list[psutil.Process]:
    """The processes that have to do with a run, in containers and around them."""
    found = []
    for process in psutil.process_iter(["cmdline", "username", "status"]):
        words = " ".join(process.info["cmdline"] or [])
        own = process.info["username"] == person.cluster.user.pw_name and process.info["status"] != "zombie"
        names = (run_id, "isambard_serve.sim", *KEEPERS, "VLLM:")
        if own and any(name in words for name in names) and belongs(process, person.cluster):
            found.append(process)
    return found


def belongs(process: psutil.Process, cluster: PretendCluster) -> bool:
    """Whether a process is this cluster's: others may run beside it. In a container its mounts tell."""
    place = Path(f"/proc/{process.pid}")
    try:
        told = place.joinpath("cmdline").read_bytes() + place.joinpath("environ").read_bytes()
        if os.readlink(place / "ns/mnt") != os.readlink("/proc/self/ns/mnt"):
            told += place.joinpath("mountinfo").read_bytes()
    except OSError:  # it has ended
        return False
    return str(cluster.folder).encode() in told


def assert_nothing_is_left(person: Person, podman: Podman, run_id: str) -> None:
    """No container, no process, no folder on the node."""
    try:
        wait_until(lambda: not of_run(person, run_id), 30, "the run's processes to end")
    except TimeoutError as error:
        error.add_note(str([process.info["cmdline"] for process in of_run(person, run_id)]))
        raise
    wait_until(lambda: not podman.containers(), 10, "no container to be left", interval_s=0.5)


def test_a_run_in_a_container_is_measured_and_leaves_nothing(contained: Person, podman: Podman) -> None:
    run_id = contained.submits("tiny", *QUICK)
    wait_until(lambda: {"conmon", "python"} <= {Path(process.info["cmdline"][0]).name
                                                for process in of_run(contained, run_id)},
               60, "the engine and the container's keeper to be seen")
    run = contained.waits_for(run_id, "done", "failed", timeout_s=120)
    assert run["state"] == "done", run
    rows = contained.asks("collect", run_id)["rows"]
    assert [row["output_tok_s"] > 0 for row in rows] == [True, True], rows
    contained.waits_for_an_empty_queue()
    assert_nothing_is_left(contained, podman, run_id)
    assert not list((contained.cluster.home / "local").iterdir())


def by_scancel(person: Person, run_id: str) -> None:
    """As somebody does it by hand."""
    person.cluster.run(["scancel", person.run_of(run_id)["jobs"]["serve"]])


def by_cancel(person: Person, run_id: str) -> None:
    """As our own command does it."""
    person.does("cancel", run_id)


def by_killing_podman(person: Person, run_id: str) -> None:
    """The program that was started is gone; the container's own keeper is not."""
    for process in of_run(person, run_id):
        if process.info["cmdline"][:2] == ["/usr/bin/podman", "run"]:
            process.kill()
    by_cancel(person, run_id)


def by_killing_the_watcher(person: Person, run_id: str) -> None:
    """As the kernel does it when memory is short."""
    person.job_of(run_id)[0].kill()


def by_killing_the_watcher_and_cancelling(person: Person, run_id: str) -> None:
    """The job's script clears up after the watcher, and is hurried."""
    person.job_of(run_id)[0].kill()
    by_cancel(person, run_id)


WAYS = [by_scancel, by_cancel, by_killing_podman, by_killing_the_watcher, by_killing_the_watcher_and_cancelling]


@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_run_that_is_ended_somehow_at_a_random_moment_leaves_nothing(
        contained: Person, podman: Podman, trial: int) -> None:
    run_id = contained.submits("tiny", *QUICK, "--set", "bench.concurrency=[1, 2, 3, 4, 5]",
                               "--set", "bench.prompts_per_concurrency=40")
    contained.waits_for(run_id, "loading", "ready", "measuring", "done")
    end = random.choice(WAYS)  # noqa: S311
    moment = random.uniform(0, 6)  # noqa: S311
    time.sleep(moment)
    print(f"{end.__name__} after {moment:.2f} s, {len(of_run(contained, run_id))} processes")
    end(contained, run_id)
    contained.waits_for_an_empty_queue()
    assert_nothing_is_left(contained, podman, run_id)


@pytest.fixture(scope="module")
def real(cluster: PretendCluster, installed: Path, podman: Podman) -> Person:
    """Somebody whose engine, the real one, runs in a container."""
    settings = {"runtime": "podman-hpc", "command": [str(ensure() / "bin/vllm")], "binds": podman.mounts,
                "local": str(cluster.home / "local"), "kernels_dir": str(cluster.home / "kernels")}
    cluster.run(["mkdir", "-p", cluster.home / "local"])
    return Person.with_site(cluster, installed, "real", json.dumps(settings), podman.path)


def test_the_real_engine_in_a_container_is_seen_through_and_no_secret_is(real: Person, podman: Podman) -> None:
    token = secrets.token_hex()
    run_id = real.starts("tiny", "--set", f"image={IMAGE}", "--set", "bench.concurrency=[8]",
                         env={"HF_TOKEN": token})[0]
    real.waits_for(run_id, "measuring", "done", "failed")
    folder = real.runs / run_id
    key = (folder / "api.key").read_text()
    seen = {" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])}
    engine = [process for process in of_run(real, run_id) if process.info["cmdline"][0].startswith("VLLM::")]
    run = real.waits_for(run_id, "done", "failed")
    assert run["state"] == "done", run
    (row,) = real.asks("collect", run_id)["rows"]
    assert not row["reasons"], row
    real.waits_for_an_empty_queue()
    assert_nothing_is_left(real, podman, run_id)

    assert any(run_id in words and "podman" in words for words in seen)
    assert engine  # found through the container's own process ids
    holders = [path for path in folder.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert holders == [folder / "api.key"]
    assert not [words for words in seen if key in words or token in words]
    assert not [path for path in folder.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]

    (kept,) = (real.cluster.home / "kernels").glob("*-no-gpu.tar")
    with tarfile.open(kept) as archive:
        assert any(name.startswith("./vllm/") for name in archive.getnames())
