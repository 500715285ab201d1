"""What doctor makes of what it finds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from isambard_serve import doctor, host
from isambard_serve.doctor import FULL_BYTES, LOW_BYTES
from isambard_serve.errors import HostError, NoProgramError
from isambard_serve.health import BadNode, remember
from isambard_serve.process import Completed
from isambard_serve.site import Directives
from isambard_serve.slurm import Slurm
from isambard_serve.ssh.config import Hop
from isambard_serve.ssh.keys import Certificate
from tests.unit.helpers import FakeSlurm, Stubs, pretend_site, said, small_recipe

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:25 / /dev/shm rw,nosuid - tmpfs tmpfs rw
31 22 0:40 / /lus/lfs1\\040aip2 rw shared:9 - lustre 10.0.0.1@tcp:/lfs1 rw
torn line
"""
PARTITION = "PartitionName=batch AllowGroups=ALL QoS=batch_qos MaxTime=1-00:00:00 State=UP"
ASSOCIATIONS = "brics.one||normal,gold\nbrics.two||normal\n"


@pytest.mark.parametrize(("version", "state"), [((3, 11, 0), "ok"), ((3, 12), "ok"), ((3, 10, 9), "fail")])
def test_python_is_new_enough_or_not(version: Sequence[int], state: str) -> None:
    assert doctor.python(version, "/env").state == state


@pytest.mark.parametrize(("answer", "state"), [
    ("Slurmctld(primary) at nid001 is UP\n", "ok"), ("Slurmctld(primary) at nid001 is DOWN\n", "fail"),
    (HostError("scontrol gave no answer within 15 s"), "fail"), ("", "fail")])
def test_slurm_answers_or_it_does_not(answer: str | HostError, state: str) -> None:
    check = doctor.controller(answer)
    assert (check.state, check.remedy is None) == (state, state == "ok")


@pytest.mark.parametrize(("text", "directives", "state", "words"), [
    (ASSOCIATIONS, {}, "ok", "account brics.one, brics.two, qos gold, normal"),
    (ASSOCIATIONS, {"account": "brics.two", "qos": "gold"}, "ok", "account brics.two, qos gold"),
    (ASSOCIATIONS, {"account": "brics.three"}, "fail", "account brics.three is none of yours"),
    (ASSOCIATIONS, {"qos": "platinum"}, "fail", "qos platinum is none of yours"),
    ("", {}, "warn", "no account"), ("", {"account": "brics.one"}, "fail", "none of yours"),
    (HostError("the database is away"), {"account": "brics.one"}, "warn", "the database is away")])
def test_account_and_qos_are_the_users_own(
        text: str | HostError, directives: dict[str, str], state: str, words: str) -> None:
    check = doctor.account(text, pretend_site(directives=Directives(**directives)))
    assert check.state == state
    assert words in check.found
    if state == "fail" and text:
        assert "one of: " in (check.remedy or "")


@pytest.mark.parametrize(("time_s", "partition", "qos", "words"), [
    (86_400, PARTITION, "", None), (86_460, PARTITION, "", "its partition allows 1-00:00:00"),
    (86_460, PARTITION.replace("1-00:00:00", "UNLIMITED"), "batch_qos|12:00:00\n", "its QoS allows 12:00:00"),
    (3600, PARTITION, "batch_qos|12:00:00\n", None), (3600, PARTITION, "batch_qos|\n", None), (3600, "", "", None)])
def test_a_job_longer_than_partition_or_qos_allow_would_wait_for_ever(
        time_s: int, partition: str, qos: str, words: str | None) -> None:
    check = doctor.time_limit("x", time_s, partition, qos)
    assert check.state == ("fail" if words else "ok")
    assert (words or "") in check.found


def test_the_qos_is_the_site_files_or_the_partitions() -> None:
    site = pretend_site(directives=Directives())
    assert doctor.quality(PARTITION, site) == "batch_qos"
    assert doctor.quality(PARTITION.replace("batch_qos", "N/A"), site) is None
    assert doctor.quality(PARTITION, pretend_site(directives=Directives(qos="gold"))) == "gold"


@pytest.mark.parametrize(("path", "kind"), [
    ("/home/me", "ext4"), ("/dev/shm/runs", "tmpfs"), ("/dev/shmx", "ext4"), ("/lus/lfs1 aip2/runs", "lustre")])
def test_a_paths_file_system_is_that_of_its_innermost_mount(path: str, kind: str) -> None:
    assert doctor.kind_of(Path(path), MOUNTS) == kind
    assert doctor.kind_of(Path(path), "") == "unknown"


@pytest.mark.parametrize(("kind", "scheduler", "state"), [
    ("lustre", "slurm", "ok"), ("nfs4", "slurm", "ok"), ("ext4", "slurm", "warn"), ("tmpfs", "slurm", "fail"),
    ("tmpfs", "local", "ok")])
def test_what_jobs_need_is_where_compute_nodes_see_it(kind: str, scheduler: Any, state: str) -> None:
    assert doctor.filesystem("runs_dir", "/x", kind, pretend_site(scheduler=scheduler)).state == state


@pytest.mark.parametrize(("free", "state"), [(LOW_BYTES, "ok"), (LOW_BYTES - 1, "warn"), (FULL_BYTES - 1, "fail")])
def test_there_is_room_for_a_run_or_there_is_not(free: int, state: str) -> None:
    assert doctor.space(free, "by the file system").state == state


# The form of lfs-quota(1); not recorded on the machine.
@pytest.mark.parametrize(("text", "left"), [
    (" /lus/lfs1 1048576 0 5242880 - 12 0 0 -\n", 4 << 30), (" /lus/lfs1 5300000* 0 5242880 6d 12 0 0 -\n", 0),
    (" /lus/lfs1 1048576 0 0 - 12 0 0 -\n", None), ("", None), ("lfs: no such project", None)])
def test_a_lustre_quota_says_what_is_left(text: str, left: int | None) -> None:
    assert doctor.quota_left(text) == left


@pytest.mark.parametrize(("skew_s", "state"), [(0.0, "ok"), (-4.9, "ok"), (5.1, "warn"), (-61.0, "fail")])
def test_clocks_agree_or_they_do_not(skew_s: float, state: str) -> None:
    assert doctor.clock(skew_s).state == state


def valid(after: float, before: float) -> Certificate:
    """A certificate that is good between two moments."""
    return Certificate(file="me-cert.pub", key=b"", valid_after=after, valid_before=before)


@pytest.mark.parametrize(("found", "state", "words"), [
    ([], "ok", "none"), ([valid(0, 2**64 - 1)], "ok", "me-cert.pub, until"),
    ([valid(0, 1e9 + 7200)], "ok", "until 2001-09-09 03:46 UTC"), ([valid(0, 1e9 + 3000)], "warn", "until"),
    ([valid(0, 1e9)], "fail", "expired at 2001-09-09 01:46 UTC"), ([valid(1e9 + 9, 2e9)], "fail", "not valid yet"),
    ([valid(0, 2e9), valid(0, 1e9 - 1)], "fail", "expired")])
def test_a_certificate_lasts_or_is_to_be_renewed(found: list[Certificate], state: str, words: str) -> None:
    check = doctor.certificate(found, 1e9)
    assert (check.state, check.remedy is None) == (state, state == "ok")
    assert words in check.found


def test_the_way_to_a_login_node_is_tried_and_a_refusal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    hop = Hop(alias="there", hostname="login.example.org", port=22, user="me")
    monkeypatch.setattr(host, "resolve", lambda _: [hop])
    monkeypatch.setattr(host, "connect", lambda *_, **__: _Answering())
    assert [(check.name, check.state, check.found) for check in doctor.way("there")] == [
        ("certificate", "ok", "none: a key alone logs in"), ("login", "ok", "me@login.example.org")]

    def refuse(*_: object, **__: object) -> None:
        raise HostError("there is no key to log in with", where="there", remedy="run `clifton auth`")

    monkeypatch.setattr(host, "connect", refuse)
    check = list(doctor.way("there"))[-1]
    assert (check.state, check.found, check.remedy) == (
        "fail", "there: there is no key to log in with", "run `clifton auth`")


class _Answering:
    """A host that runs whatever it is asked to run."""

    def run(self, argv: Sequence[str], **_: object) -> None:
        """Run nothing."""

    def close(self) -> None:
        """Close nothing."""


def test_numactl_is_missed_only_where_a_recipe_wants_it() -> None:
    assert [doctor.numactl(there, wanted).state for there, wanted in ((True, True), (False, False), (False, True))] == [
        "ok", "ok", "warn"]


def ended(checks: Mapping[str, doctor.Check]) -> dict[str, str]:
    """The names of the checks that did not end well, and how they ended."""
    return {name: check.state for name, check in checks.items() if check.state != "ok"}


def examined(tmp_path: Path, fake: FakeSlurm, **changes: Any) -> dict[str, doctor.Check]:
    """What doctor says of a site whose Slurm is ``fake``, and of a small recipe there."""
    site = pretend_site(runs_dir=str(tmp_path / "runs"), **{"directives": Directives(), **changes})
    return {check.name: check for check in doctor.examine(site, [small_recipe()], os.environ, Slurm({}, fake))}


@pytest.fixture
def slurm(stubs: Stubs) -> FakeSlurm:
    """A Slurm with which nothing is wrong, its commands on the PATH."""
    for command in doctor.COMMANDS:
        stubs.add(command, "exit 1")

    def scontrol(argv: tuple[str, ...]) -> str:
        return "Slurmctld(primary) at nid001 is UP" if argv[1] == "ping" else PARTITION

    return FakeSlurm(scontrol=scontrol, sacctmgr=lambda argv: "q|2:00:00" if argv[3] == "qos" else ASSOCIATIONS)


def test_everything_is_asked_and_nothing_is_left_behind(tmp_path: Path, slurm: FakeSlurm) -> None:
    checks = examined(tmp_path, slurm)
    assert set(ended(checks)) <= {"installation", "runs_dir", "space"}  # this machine's own disks
    assert {"python", "slurm", "account", "clock", "bad nodes", "job of recipe small"} <= checks.keys()
    (trial,) = [call for call in slurm.calls if call[0] == "sbatch"]
    assert trial[:2] == ("sbatch", "--test-only")
    assert {"--gpus=1", "--time=01:00:00", "--wrap=true"} <= set(trial)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("answers", "changes", "faults"), [
    ({"sbatch": said(stderr="allocation failure: Invalid qos", returncode=1)}, {}, {"job of recipe small": "fail"}),
    ({"scontrol": HostError("no answer")}, {}, {"slurm": "fail"}),
    ({"sacct": said(stderr="storage is disabled", returncode=1)}, {}, {"accounting": "warn"}),
    ({"sacctmgr": NoProgramError("sacctmgr cannot be started")}, {}, {"account": "warn"}),
    ({}, {"directives": Directives(account="brics.three")}, {"account": "fail"}),
])
def test_what_slurm_would_refuse_is_named(
        tmp_path: Path, slurm: FakeSlurm, answers: dict[str, Any], changes: dict[str, Any], faults: dict[str, str]
) -> None:
    slurm.answers |= answers
    found = ended(examined(tmp_path, slurm, **changes))
    assert faults.items() <= found.items()
    assert set(found) <= {*faults, "installation", "runs_dir", "space"}


def test_where_runs_cannot_be_written_the_file_that_says_so_is_named(
        tmp_path: Path, user_file: Callable[[str, str], Path]) -> None:
    (tmp_path / "file").touch()
    site = pretend_site(runs_dir=str(tmp_path / "file" / "runs"), scheduler="local")

    def remedy() -> str | None:
        return {check.name: check for check in doctor.examine(site, [], {}, None)}["runs_dir"].remedy

    own = f"isambard-serve/sites/{site.name}.yaml"
    assert f"{own} with `extends: {site.name}` and another runs_dir" in str(remedy())
    user_file(f"sites/{site.name}.yaml", "extends: mine")
    assert f"{own} another runs_dir" in str(remedy())


def test_nodes_that_were_found_bad_are_listed(tmp_path: Path, slurm: FakeSlurm) -> None:
    remember(tmp_path / "runs", BadNode(node="nid003", time=time.time(), run_id="r", faults=("it hangs",)))
    check = examined(tmp_path, slurm)["bad nodes"]
    assert (check.state, check.found) == ("warn", "nid003 (it hangs)")


def test_on_lustre_the_quota_counts_and_not_the_whole_file_system(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"project": "1000 P /lus", "quota": f"/lus {1 << 20} 0 {(1 << 20) + 4} - 1 0 0 -"}

    def lfs(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float = 60) -> Completed:
        if not answers:
            raise NoProgramError("no lfs")
        return said(answers[argv[1]])

    monkeypatch.setattr(doctor, "kind_of", lambda *_: "lustre")
    site = pretend_site(runs_dir=str(tmp_path), scheduler="local")

    def space() -> doctor.Check:
        return {check.name: check for check in doctor.examine(site, [], {}, None, lfs)}["space"]

    assert (space().state, space().found) == ("fail", "0.0 GiB free, by the project's quota")
    answers.clear()
    assert space().found.endswith("but the quota cannot be told")
