"""Slurm: what is sent to it, what its answers mean, and how seldom it is asked."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from isambard_serve import slurm
from isambard_serve.errors import HostError
from isambard_serve.slurm import JobState, Slurm, Use
from tests.unit.helpers import FakeSlurm, said

SCRIPT = Path("/shared/runs/x/serve.sbatch")
OUTAGE = said(stderr="slurm_load_jobs error: Unable to contact slurm controller", returncode=1)


def test_commands_get_what_they_need_and_nothing_that_could_override_a_script() -> None:
    environ = {"HOME": "/h", "PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_GPUS": "2", "SLURM_JOB_ID": "1",
               "SLURM_GPUS_PER_NODE": "4", "SCRATCHDIR": "/s", "OTHER": "x"}
    given = slurm.environment(("SCRATCHDIR", "NOT_SET"), environ)
    assert given == {"HOME": "/h", "PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SCRATCHDIR": "/s"}


def test_an_inner_step_sees_nothing_of_the_outer_job() -> None:
    environ = {"PATH": "/bin", "SLURM_CONF": "/c", "SLURM_GPUS_PER_NODE": "4", "SRUN_CPUS_PER_TASK": "1",
               "SBATCH_TIMELIMIT": "1", "SALLOC_PARTITION": "p", "MY_SLURM_THING": "x"}
    assert slurm.stripped(environ) == {"PATH": "/bin", "SLURM_CONF": "/c", "MY_SLURM_THING": "x"}


@pytest.mark.parametrize("answer", ["123\n", "123;isambard-ai\n", "  123  \n"])
def test_a_job_id_is_read_whatever_surrounds_it(answer: str) -> None:
    assert Slurm({}, FakeSlurm(sbatch=said(answer, stderr="sbatch: a warning"))).submit(SCRIPT) == "123"


def test_a_dependency_and_the_environment_are_passed_on() -> None:
    fake = FakeSlurm()
    submitter = Slurm({"PATH": "/bin"}, fake)
    submitter.submit(SCRIPT)
    submitter.submit(SCRIPT, dependency="after:101+10")
    assert fake.calls == [("sbatch", "--parsable", str(SCRIPT)),
                          ("sbatch", "--parsable", "--dependency=after:101+10", str(SCRIPT))]
    assert fake.environments == [{"PATH": "/bin"}] * 2


@pytest.mark.parametrize(("answer", "message"), [
    (said(stderr="sbatch: error: QOSMaxWallDurationPerJobLimit", returncode=1), "--time"),
    (said(stderr="sbatch: error: Invalid account or account/partition combination", returncode=1), "check account"),
    (said(stderr="sbatch: error: new trouble", returncode=1), "new trouble"),
    (said("123\n", returncode=1), "Slurm refused the job: 123"),
    (said("", returncode=1), "exit code 1"),
    (said("Submitted batch job 123\n"), "Submitted batch job"),
    (said(""), "exit code 0"),
])
def test_a_refusal_is_told_in_slurms_words_with_a_remedy_where_one_is_known(answer: object, message: str) -> None:
    with pytest.raises(HostError) as caught:
        Slurm({}, FakeSlurm(sbatch=answer)).submit(SCRIPT)
    assert message in str(caught.value)
    assert caught.value.where == str(SCRIPT)


def test_jobs_are_cancelled_one_by_one_in_the_order_given() -> None:
    fake = FakeSlurm()
    Slurm({}, fake).cancel(["102", "101"])
    assert fake.calls == [("scancel", "102"), ("scancel", "101")]


def test_a_job_that_has_ended_already_needs_no_cancelling() -> None:
    gone = said(stderr="scancel: error: Kill job error on job id 101: Invalid job id specified", returncode=1)
    Slurm({}, FakeSlurm(scancel=gone)).cancel(["101"])


def test_all_jobs_are_asked_to_end_even_if_slurm_refuses_one() -> None:
    fake = FakeSlurm(scancel=lambda argv: said(stderr="no", returncode=1) if argv[1] == "102" else said())
    with pytest.raises(HostError, match="scancel failed for 102: no"):
        Slurm({}, fake).cancel(["102", "101"])
    assert fake.calls[-1] == ("scancel", "101")


@pytest.mark.parametrize(("text", "states"), [
    # squeue --format=%i|%T|%r, the same in 22.05 and 24.11
    ("101|RUNNING|None\n102|PENDING|Dependency\n", {"101": ("RUNNING", None), "102": ("PENDING", "Dependency")}),
    ("101|PENDING|QOSMaxWallDurationPerJobLimit\n", {"101": ("PENDING", "QOSMaxWallDurationPerJobLimit")}),
    ("  101|COMPLETING|None  \n", {"101": ("COMPLETING", None)}),
    # sacct -nPX --format=JobID,State,ExitCode
    ("101|CANCELLED by 1000|0:15\n", {"101": ("CANCELLED", "0:15")}),
    ("101|OUT_OF_MEMORY|0:125\n102|COMPLETED|0:0\n", {"101": ("OUT_OF_MEMORY", "0:125"), "102": ("COMPLETED", "0:0")}),
    ("101.batch|FAILED|1:0\n101_4|RUNNING|0:0\n", {}),
    ("", {}), ("\n", {}), ("nonsense\n", {}), ("101|\n", {}), ("101\n", {}),
    ("slurm_load_jobs error: Invalid job id specified\n", {}),
])
def test_states_are_read_from_squeue_and_sacct(text: str, states: dict[str, tuple[str, str | None]]) -> None:
    assert slurm.parse_states(text) == {job: JobState(state=state, reason=why) for job, (state, why) in states.items()}


@pytest.mark.parametrize(("state", "ended"), [
    ("PENDING", False), ("RUNNING", False), ("COMPLETING", False), ("CONFIGURING", False), ("SUSPENDED", False),
    ("REQUEUED", False), ("COMPLETED", True), ("CANCELLED", True), ("FAILED", True), ("TIMEOUT", True),
    ("NODE_FAIL", True), ("OUT_OF_MEMORY", True), ("PREEMPTED", True),
])
def test_a_state_is_terminal_or_it_is_not(state: str, ended: bool) -> None:
    assert JobState(state=state).ended is ended


def test_sacct_is_asked_only_for_what_squeue_has_forgotten() -> None:
    fake = FakeSlurm(squeue="101|RUNNING|None\n999|RUNNING|None\n", sacct="102|FAILED|1:0\n")
    found = Slurm({}, fake).states(["102", "101", "101"])
    assert (found["101"], found["102"]) == (JobState(state="RUNNING"), JobState(state="FAILED", reason="1:0"))
    assert fake.calls[1][:4] == ("sacct", "-nPX", "-j", "102")
    fake = FakeSlurm(squeue="101|RUNNING|None\n")
    Slurm({}, fake).states(["101"])
    assert fake.commands() == ["squeue"]


def test_nobody_is_asked_about_no_jobs() -> None:
    fake = FakeSlurm()
    assert Slurm({}, fake).states([]) == {}
    assert fake.calls == []


def test_a_job_that_nobody_knows_is_left_out() -> None:
    assert Slurm({}, FakeSlurm(squeue="", sacct="")).states(["101"]) == {}


@pytest.mark.parametrize("outage", [OUTAGE, HostError("squeue gave no answer within 60 s")])
def test_in_an_outage_nothing_is_said_of_any_job(outage: object) -> None:
    fake = FakeSlurm(squeue=outage, sacct=outage)
    assert Slurm({}, fake).states(["101"]) == {}
    assert fake.commands() == ["squeue", "sacct"]


def test_without_accounting_what_squeue_says_still_counts() -> None:
    refused = said("", stderr="Slurm accounting storage is disabled", returncode=1)
    fake = FakeSlurm(squeue="101|RUNNING|None\n", sacct=refused)
    assert Slurm({}, fake).states(["101", "102"]) == {"101": JobState(state="RUNNING")}


@pytest.mark.parametrize(("text", "at"), [
    ("JobId=101 JobName=x StartTime=2026-11-29T18:00:00 EndTime=2026-11-29T22:00:00 Deadline=N/A",
     "2026-11-29T22:00:00"),
    ("JobId=101 EndTime=Unknown", None),
    ("JobId=101 PreemptEndTime=2026-11-29T22:00:00", None),
    ("", None),
])
def test_the_time_at_which_a_job_must_end_is_read_in_this_machines_time_zone(text: str, at: str | None) -> None:
    parsed = Slurm({}, FakeSlurm(scontrol=text)).end_time("101")
    assert parsed == (None if at is None else time.mktime(time.strptime(at, "%Y-%m-%dT%H:%M:%S")))


def test_in_an_outage_no_end_is_known() -> None:
    assert Slurm({}, FakeSlurm(scontrol=HostError("no"))).end_time("101") is None


def test_slurm_is_asked_once_an_interval_by_whoever_asks(tmp_path: Path) -> None:
    cache = tmp_path / ".jobs" / "slurm.json"
    fake = FakeSlurm(squeue="101|RUNNING|None\n")
    for now in (1000.0, 1001.0, 1059.9):
        found = slurm.states_within_limit(Slurm({}, fake), ["101"], cache, 60, now=now)
        assert found == {"101": JobState(state="RUNNING")}
    assert fake.commands() == ["squeue"]
    fake.answers["squeue"] = "101|COMPLETING|None\n"
    assert slurm.states_within_limit(Slurm({}, fake), ["101"], cache, 60, now=1060.0)["101"].state == "COMPLETING"
    assert fake.commands() == ["squeue", "squeue"]


def test_one_answer_serves_all_of_a_users_runs(tmp_path: Path) -> None:
    cache = tmp_path / ".jobs" / "slurm.json"
    fake = FakeSlurm(squeue="101|RUNNING|None\n201|PENDING|Priority\n")
    assert list(slurm.states_within_limit(Slurm({}, fake), ["101"], cache, 60, now=1000)) == ["101"]
    assert slurm.states_within_limit(Slurm({}, fake), ["201"], cache, 60, now=1010) == {
        "201": JobState(state="PENDING", reason="Priority")}
    assert fake.commands() == ["squeue"]


@pytest.mark.parametrize(("text", "used"), [
    ("101|COMPLETED|3600|2026-11-29T19:12:58|billing=4,cpu=288,gres/gpu=4,mem=460G,node=1\n", {"101": (4, 3600)}),
    ("101|CANCELLED by 1000|60|2026-11-29T19:12:58|cpu=1,gres/gpu:gh200=1,gres/gpu=1\n"
     "102|FAILED|0|2026-11-29T19:12:58|\n",
     {"101": (1, 60), "102": (0, 0)}),
    ("101|RUNNING|60|Unknown|gres/gpu=1\n101.batch|COMPLETED|60|2026-11-29T19:12:58|\n", {}),
    ("101|COMPLETED|60|Unknown|gres/gpu=1\n102|NODE_FAIL|60||gres/gpu=1\n", {}),  # nobody knows yet when it ended
    ("101|COMPLETED||2026-11-29T19:12:58|gres/gpu=1\n", {}), ("", {}), ("nonsense\n", {}),
])
def test_what_ended_jobs_have_held_is_read_from_the_accounting(text: str, used: dict[str, tuple[int, int]]) -> None:
    assert Slurm({}, FakeSlurm(sacct=text)).used(["101", "102"]) == {
        job: Use(gpus=gpus, elapsed_s=elapsed_s) for job, (gpus, elapsed_s) in used.items()}


@pytest.mark.parametrize("outage", [OUTAGE, HostError("no")])
def test_in_an_outage_no_use_is_known(outage: object) -> None:
    assert Slurm({}, FakeSlurm(sacct=outage)).used(["101"]) == {}


def test_nodes_can_be_left_out() -> None:
    fake = FakeSlurm()
    Slurm({}, fake).submit(SCRIPT, exclude="nid[001-002],nid003")
    assert fake.calls == [("sbatch", "--parsable", "--exclude=nid[001-002],nid003", str(SCRIPT))]


def test_a_pending_job_gets_another_dependency_and_a_refusal_is_no_error() -> None:
    fake = FakeSlurm(scontrol=said(stderr="Job dependency problem", returncode=1))
    Slurm({}, fake).depend("103", "afterany:101")
    assert fake.calls == [("scontrol", "update", "JobId=103", "Dependency=afterany:101")]


def test_a_job_that_has_ended_stays_known_without_asking_again(tmp_path: Path) -> None:
    cache = tmp_path / ".jobs" / "slurm.json"
    fake = FakeSlurm(squeue="101|TIMEOUT|None\n102|RUNNING|None\n")
    slurm.states_within_limit(Slurm({}, fake), ["101", "102"], cache, 60, now=1000)
    fake.answers["squeue"] = ""
    assert slurm.states_within_limit(Slurm({}, fake), ["101"], cache, 60, now=5000) == {
        "101": JobState(state="TIMEOUT")}
    assert fake.commands() == ["squeue"]


@pytest.mark.parametrize("content", ["", "{", '{"time": 1}', "[]", '{"time": 999999, "states": {}}'])
def test_a_cache_that_is_broken_or_from_the_future_is_not_believed(tmp_path: Path, content: str) -> None:
    cache = tmp_path / "slurm.json"
    cache.write_text(content)
    found = slurm.states_within_limit(Slurm({}, FakeSlurm(squeue="101|RUNNING|None\n")), ["101"], cache, 60, now=1000)
    assert found == {"101": JobState(state="RUNNING")}


def test_the_clock_is_this_machines_unless_given(tmp_path: Path) -> None:
    fake = FakeSlurm(squeue="101|RUNNING|None\n")
    for _ in range(2):
        slurm.states_within_limit(Slurm({}, fake), ["101"], tmp_path / "slurm.json", 60)
    assert fake.commands() == ["squeue"]
