"""`doctor` on a real Slurm: it finds nothing wrong, and it names each fault that is put there."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

import pytest

from tests.cluster.person import Person

LONG = "extends: tiny\ndescription: longer than the partition allows\nresources: {time: 48h}\n"


@dataclass(frozen=True)
class Fault:
    """What is put wrong, and which check must fail for it.

    ``site`` is laid over the site file. ``recipe`` is named to doctor. ``down``: the daemon that does not answer.
    """

    check: str
    says: str
    site: str = ""
    recipe: str | None = None
    path: str = "/usr/local/bin:/usr/bin:/bin"
    down: str | None = None


FAULTS = {
    "a variable that is not set": Fault("site", "$NOWHERE is not set", "runs_dir: $NOWHERE/runs"),
    "another partition": Fault("job of a small job", "invalid partition", "partition: nope"),
    "another's account": Fault("account", "account brics.other is none of yours", "directives: {account: brics.other}"),
    "another's QoS": Fault("account", "qos gold is none of yours", "directives: {qos: gold}"),
    "no GPU asked for": Fault("job of a small job", "no GPU directive", "sweep: {gpus: 0, load_generator_cpus: 1}"),
    "too long": Fault("time of recipe long", "its partition allows 1-00:00:00", recipe="long"),
    "a folder of somebody else's": Fault("runs_dir", "cannot be written", "runs_dir: /root/runs"),
    "a folder in memory": Fault("runs_dir", "of this machine alone (tmpfs)", "runs_dir: /dev/shm/runs"),
    "no container program": Fault("container", "podman-hpc is not on the PATH", "container: {runtime: podman-hpc}"),
    "no image": Fault("engine's image of tp4", "/nowhere/vllm-0.33.sif", recipe="tp4",
                      site="container: {runtime: apptainer, images_dir: /nowhere}"),
    "no weights": Fault("model's weights of tp4", "models--deepseek-ai", recipe="tp4",
                        site="container: {runtime: none}\nset: {HF_HOME: /nowhere, HF_HUB_OFFLINE: '1'}"),
    "no Slurm here": Fault("commands", "not on the PATH: sbatch", path="/nowhere"),
    "no controller": Fault("slurm", "DOWN", down="slurmctld"),
}


def test_nothing_is_wrong_with_a_cluster_that_runs_jobs(accounted: Person) -> None:
    checks = {check["name"]: check for check in accounted.asks("doctor", "tiny")["checks"]}
    assert not [check for check in checks.values() if check["state"] == "fail"]
    assert (checks["slurm"]["state"], checks["accounting"]["state"], checks["account"]["state"]) == ("ok", "ok", "ok")
    assert "brics.pretend" in checks["account"]["found"]
    assert checks["job of recipe tiny"]["found"] == "Slurm would take it"
    assert accounted.cluster.queue() == []


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named_with_what_to_do_about_it(accounted: Person, fault: Fault) -> None:
    cluster = accounted.cluster
    settings = cluster.home / ".config/isambard-serve"
    cluster.run(["mkdir", "-p", settings / "jobs"])
    cluster.run(["tee", settings / "jobs/long.yaml"], input=LONG)
    cluster.run(["tee", settings / "sites/broken.yaml"], input=f"extends: accounted\n{fault.site}\n")
    with cluster.outage(fault.down) if fault.down else contextlib.nullcontext():
        named = [fault.recipe] if fault.recipe else []
        done = accounted.does("doctor", *named, "--site=broken", "--json", check=False, env={"PATH": fault.path})
    assert (done.returncode, done.stdout != "") == (1, True), done.stderr
    checks = json.loads(done.stdout)["checks"]
    (found,) = [check for check in checks if check["name"] == fault.check and check["state"] == "fail"]
    assert fault.says in found["found"]
    assert fault.check in done.stderr
