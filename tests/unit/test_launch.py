"""Submission: both jobs or none, ``jobs.json`` written around each step, and the sweep cancelled first."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from submitit.core.utils import DelayedSubmission

from isambard_serve import launch, local, recipe
from isambard_serve import plan as plans
from isambard_serve.container import Need
from isambard_serve.errors import HostError, NoProgramError, UsageError
from isambard_serve.local import Local
from isambard_serve.plan import Plan
from isambard_serve.process import Completed
from isambard_serve.records import Jobs, SubmittedJob
from isambard_serve.run import RunDir, Runs
from isambard_serve.slurm import Slurm
from isambard_serve.sweep import sweep
from tests.unit.helpers import (
    RUN_ID,
    FakeSlurm,
    Shown,
    ladder_plans,
    pretend_site,
    said,
    small_plan,
    small_recipe,
    submitted,
    written_run,
)

Answer = Callable[[tuple[str, ...]], Completed | BaseException]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """A plan whose sweep is due ten minutes after the engine's start."""
    return small_plan(tmp_path / "runs", {"resources": {"load_time": "10m"}})


def jobs_json(plan: Plan) -> Jobs:
    return RunDir(Path(plan.run_dir)).read_jobs()


def per_script(serve: Completed | BaseException, sweep: Completed | BaseException) -> Answer:
    """What sbatch answers for each of the two scripts."""
    return lambda argv: serve if argv[-1].endswith("serve.sbatch") else sweep


def test_the_sweep_depends_on_the_serve_job_and_is_sent_after_it(plan: Plan) -> None:
    fake = FakeSlurm()
    (run,) = launch.submit([(plan, small_recipe())], Slurm({}, fake))
    assert fake.calls == [
        ("sbatch", "--parsable", f"{plan.run_dir}/serve.sbatch"),
        ("sbatch", "--parsable", "--dependency=after:101+10", f"{plan.run_dir}/sweep.sbatch")]
    assert run.path == Path(plan.run_dir)
    jobs = jobs_json(plan)
    assert jobs.complete
    assert [(job.role, job.job_id) for job in jobs.jobs] == [("serve", "101"), ("sweep", "102")]


def test_without_a_load_time_the_sweep_is_due_as_soon_as_the_serve_job_starts(tmp_path: Path) -> None:
    fake = FakeSlurm()
    launch.submit([(small_plan(tmp_path), small_recipe())], Slurm({}, fake))
    assert fake.calls[1][2] == "--dependency=after:101"


def test_what_may_be_running_is_noted_before_and_after_each_submission(plan: Plan) -> None:
    noted: list[list[tuple[str, str | None]]] = []
    complete: list[bool] = []

    def sbatch(argv: tuple[str, ...]) -> Completed:
        seen = jobs_json(plan)
        noted.append([(job.role, job.job_id) for job in seen.jobs])
        complete.append(seen.complete)
        return said("101" if argv[-1].endswith("serve.sbatch") else "102")

    launch.submit([(plan, small_recipe())], Slurm({}, FakeSlurm(sbatch=sbatch)))
    assert noted == [[("serve", None)], [("serve", "101"), ("sweep", None)]]
    assert complete == [False, False]


def test_any_job_id_leads_to_the_run_and_submitit_finds_its_function(plan: Plan) -> None:
    launch.submit([(plan, small_recipe())], Slurm({}, FakeSlurm()))
    runs = Runs(Path(plan.run_dir).parent, plan.site)
    assert runs.find("101").path == runs.find("102").path == Path(plan.run_dir)
    pickle = Path(plan.run_dir) / "submitit" / "102_submitted.pkl"
    delayed = DelayedSubmission.load(pickle)
    assert (delayed.function, delayed.args) == (sweep, (plan.run_dir,))


def test_what_is_sent_is_what_is_rendered_byte_for_byte(plan: Plan) -> None:
    launch.submit([(plan, small_recipe())], Slurm({}, FakeSlurm()))
    for name, text in launch.scripts(plan).items():
        assert (Path(plan.run_dir) / name).read_bytes() == text.encode()


def test_a_written_run_is_complete_and_the_owners_alone(plan: Plan) -> None:
    run = launch.write(plan, small_recipe())
    assert {str(path.relative_to(run.path)) for path in run.path.rglob("*")} == {
        "recipe.lock.yaml", "plan.json", "serve.sbatch", "sweep.sbatch", "send.sh", "submitit", "submitit/sweep.pkl",
        "search", "events", "engine", "points", "claims"}
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert run.send_script.stat().st_mode & stat.S_IXUSR
    assert msgspec.json.decode(run.plan.read_bytes(), type=Plan) == plan
    assert recipe.load(str(run.lock)) == (small_recipe(), [])


def test_a_run_is_written_once(plan: Plan) -> None:
    launch.write(plan, small_recipe())
    with pytest.raises(UsageError, match="this run exists already"):
        launch.write(plan, small_recipe())


def test_what_is_missing_is_refused_before_anything_is_written_or_sent(plan: Plan, tmp_path: Path) -> None:
    fake = FakeSlurm()
    image, weights = tmp_path / "none.sif", tmp_path / "weights"
    needy = msgspec.structs.replace(plan, needs=(
        Need(path=str(image), what="the engine's image", remedy="pull it"),
        Need(path=str(weights), what="the model's weights", remedy="fetch them")))
    with pytest.raises(UsageError, match=r"none\.sif: the engine's image not found\n.*pull it"):
        launch.submit([(needy, small_recipe())], Slurm({}, fake))
    image.touch()
    with pytest.raises(UsageError, match=r"weights: the model's weights not found\n.*fetch them"):
        launch.submit([(needy, small_recipe())], Slurm({}, fake))
    assert fake.calls == []
    assert not Path(plan.run_dir).exists()
    weights.mkdir()
    launch.submit([(needy, small_recipe())], Slurm({}, fake))


def test_what_only_a_program_knows_is_asked_of_it() -> None:
    asked: list[Sequence[str]] = []

    def runner(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float = 60) -> Completed:
        asked.append(argv)
        return said(returncode=len(asked) - 1)

    need = Need(what="the engine's image", remedy="pull it", command=("podman-hpc", "image", "exists", "a b"))
    launch.check_needs([need], runner)
    with pytest.raises(UsageError, match=r"podman-hpc image exists 'a b': the engine's image not found\n.*pull it"):
        launch.check_needs([need], runner)
    assert asked == [need.command] * 2


def test_a_refused_serve_job_leaves_nothing_in_the_queue(plan: Plan) -> None:
    fake = FakeSlurm(sbatch=said(stderr="no credit", returncode=1))
    with pytest.raises(HostError, match="no credit"):
        launch.submit([(plan, small_recipe())], Slurm({}, fake))
    assert fake.calls[1:] == [("scancel", "--me", f"--name={RUN_ID}")]
    (event,) = RunDir(Path(plan.run_dir)).read_events()
    assert (event.writer, event.event) == ("submit", "failed")
    assert "no credit" in str(event.reason)


def test_a_refused_sweep_takes_the_serve_job_with_it(plan: Plan) -> None:
    fake = FakeSlurm(sbatch=per_script(said("101"), said(stderr="no credit", returncode=1)))
    with pytest.raises(HostError, match="no credit"):
        launch.submit([(plan, small_recipe())], Slurm({}, fake))
    assert fake.calls[2:] == [("scancel", "--me", f"--name={RUN_ID}-sweep"), ("scancel", "101")]
    (event,) = RunDir(Path(plan.run_dir)).read_events()
    assert (event.writer, event.event) == ("submit", "failed")
    assert not jobs_json(plan).complete


@pytest.mark.parametrize(("serve", "sweep", "names"), [
    (HostError("sbatch gave no answer within 60 s"), said("102"), [f"--name={RUN_ID}"]),
    (said("101"), HostError("sbatch gave no answer within 60 s"), [f"--name={RUN_ID}-sweep", "101"]),
])
def test_a_job_that_slurm_may_have_taken_without_an_answer_is_cancelled_by_its_name(
        plan: Plan, serve: Completed | BaseException, sweep: Completed | BaseException, names: list[str]) -> None:
    fake = FakeSlurm(sbatch=per_script(serve, sweep))
    with pytest.raises(HostError, match="no answer"):
        launch.submit([(plan, small_recipe())], Slurm({}, fake))
    assert [call[-1] for call in fake.calls if call[0] == "scancel"] == names


def test_an_interruption_between_the_two_jobs_takes_the_serve_job_with_it(plan: Plan) -> None:
    fake = FakeSlurm(sbatch=per_script(said("101"), KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        launch.submit([(plan, small_recipe())], Slurm({}, fake))
    assert ("scancel", "101") in fake.calls
    (event,) = RunDir(Path(plan.run_dir)).read_events()
    assert (event.writer, event.event) == ("submit", "failed")


def test_whatever_fails_after_both_were_sent_cancels_the_sweep_first(
        plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", fail)
    fake = FakeSlurm()
    with pytest.raises(OSError, match="No space"):
        launch.submit([(plan, small_recipe())], Slurm({}, fake))
    assert fake.calls[2:] == [("scancel", "102"), ("scancel", "101")]


def test_if_even_cancelling_fails_the_reader_is_told_what_to_type(plan: Plan) -> None:
    refused = said(stderr="outage", returncode=1)
    fake = FakeSlurm(sbatch=per_script(said("101"), refused), scancel=refused)
    with pytest.raises(HostError) as caught:
        launch.submit([(plan, small_recipe())], Slurm({}, fake))
    assert caught.value.remedy == f"scancel --me --name={RUN_ID},{RUN_ID}-sweep"
    assert caught.value.where == plan.run_dir
    # Nobody knows whether the job is gone: the run is not called failed.
    assert RunDir(Path(plan.run_dir)).read_events() == []


def test_without_sbatch_there_is_nothing_to_cancel(plan: Plan) -> None:
    missing = NoProgramError("sbatch cannot be started here")
    fake = FakeSlurm(sbatch=missing, scancel=missing)
    with pytest.raises(NoProgramError, match="sbatch cannot be started here"):
        launch.submit([(plan, small_recipe())], Slurm({}, fake))
    assert fake.commands() == ["sbatch"]
    assert [event.event for event in RunDir(Path(plan.run_dir)).read_events()] == ["failed"]


def test_what_to_type_names_the_jobs_of_every_rung(tmp_path: Path) -> None:
    refused = said(stderr="outage", returncode=1)
    made = ladder_plans(tmp_path, 2)
    with pytest.raises(HostError) as caught:
        launch.submit([(plan, small_recipe()) for plan in made], Slurm({}, FakeSlurm(sbatch=refused, scancel=refused)))
    commands = str(caught.value.remedy).split("; ")
    assert [command.partition("--name=")[2].split(",") for command in commands] == [
        [plan.serve_directives["job-name"], plan.sweep_directives["job-name"]] for plan in made]


@pytest.mark.parametrize("stop", [launch.cancel, launch.end_jobs])
@pytest.mark.parametrize(("serve", "sweep", "calls"), [
    (None, "102", [("scancel", "--me", f"--name={RUN_ID}"), ("scancel", "102")]),
    ("101", None, [("scancel", "--me", f"--name={RUN_ID}-sweep"), ("scancel", "101")]),
])
def test_a_job_whose_id_was_never_noted_is_cancelled_by_its_name(
        plan: Plan, stop: Callable[[RunDir, Slurm], None], serve: str | None, sweep: str | None,
        calls: list[tuple[str, ...]]) -> None:
    run = written_run(plan)
    run.write_jobs(submitted(serve, sweep, complete=False))
    fake = FakeSlurm()
    stop(run, Slurm({}, fake))
    assert fake.calls == calls


def test_cancelling_a_run_ends_its_sweep_first_since_the_serve_jobs_end_would_set_it_free(plan: Plan) -> None:
    fake = FakeSlurm()
    launch.submit([(plan, small_recipe())], Slurm({}, fake))
    run = RunDir(Path(plan.run_dir))
    launch.cancel(run, Slurm({}, fake))
    assert fake.calls[2:] == [("scancel", "102"), ("scancel", "101")]
    assert [event.event for event in run.read_events()] == ["submitted", "cancelled"]


def test_a_run_that_could_not_be_cancelled_is_not_called_cancelled(plan: Plan) -> None:
    launch.submit([(plan, small_recipe())], Slurm({}, FakeSlurm()))
    run = RunDir(Path(plan.run_dir))
    with pytest.raises(HostError):
        launch.cancel(run, Slurm({}, FakeSlurm(scancel=said(stderr="outage", returncode=1))))
    assert [event.event for event in run.read_events()] == ["submitted"]


def test_a_run_that_was_sent_by_hand_is_cancelled_by_the_ids_that_its_jobs_wrote(plan: Plan) -> None:
    run = written_run(plan)
    run.record("serve", "started", job_id="301")
    run.record("sweep", "waiting", job_id="302")
    fake = FakeSlurm()
    launch.cancel(run, Slurm({}, fake))
    assert fake.calls == [("scancel", "302"), ("scancel", "301")]


def test_the_sweeps_script_is_submitits_with_the_planned_directives(plan: Plan) -> None:
    text = launch.sweep_script(plan)
    assert f"#SBATCH --job-name={RUN_ID}-sweep\n" in text
    assert "#SBATCH --account=pretend\n" in text
    assert "#SBATCH --no-requeue\n" in text
    assert "srun" not in text


@pytest.fixture
def rungs(tmp_path: Path) -> list[tuple[Plan, recipe.Recipe]]:
    """Three rungs of a ladder."""
    ids = tuple(f"20261129-181258-{name}-3f2a" for name in ("one", "two", "three"))
    return [(plans.make(small_recipe(), pretend_site(), run_id=run_id, runs_dir=str(tmp_path), python="/opt/python",
                        ladder=ids), small_recipe()) for run_id in ids]


def test_the_rungs_of_a_ladder_run_one_after_another_however_each_ends(rungs: list[launch.Rung]) -> None:
    fake = FakeSlurm()
    runs = launch.submit(rungs, Slurm({}, fake))
    assert [run.job_ids() for run in runs] == [
        {"serve": "101", "sweep": "102"}, {"serve": "103", "sweep": "104"}, {"serve": "105", "sweep": "106"}]
    assert [call[2] for call in fake.calls if len(call) > 3] == [
        "--dependency=after:101", "--dependency=afterany:101", "--dependency=after:103", "--dependency=afterany:103",
        "--dependency=after:105"]


def test_a_ladder_is_submitted_whole_or_not_at_all(rungs: list[launch.Rung]) -> None:
    accepted = iter(["101", "102", "103"])

    def sbatch(_: tuple[str, ...]) -> Completed:
        job = next(accepted, None)
        return said(job) if job else said(stderr="no credit", returncode=1)

    fake = FakeSlurm(sbatch=sbatch)
    with pytest.raises(HostError, match="no credit"):
        launch.submit(rungs, Slurm({}, fake))
    assert [call[-1] for call in fake.calls if call[0] == "scancel"] == [
        "--name=20261129-181258-two-3f2a-sweep", "103", "102", "101"]
    for plan, _ in rungs:
        assert RunDir(Path(plan.run_dir)).read_events()[-1].event == "failed"


def test_when_a_rung_is_cancelled_the_one_behind_it_keeps_waiting_for_the_one_before(rungs: list[launch.Rung]) -> None:
    fake = FakeSlurm()
    runs = launch.submit(rungs, Slurm({}, fake))
    del fake.calls[:]
    launch.cancel(runs[1], Slurm({}, fake))
    assert fake.calls == [("scontrol", "update", "JobId=105", "Dependency=afterany:101,afterany:103"),
                          ("scancel", "104"), ("scancel", "103")]


def test_a_whole_ladder_is_cancelled_from_its_last_rung_and_what_has_ended_is_left_alone(
        rungs: list[launch.Rung]) -> None:
    fake = FakeSlurm()
    runs = launch.submit(rungs, Slurm({}, fake))
    runs[0].record("serve", "done")
    launch.cancel_ladder(runs, Slurm({}, fake))
    assert [call[1] for call in fake.calls if call[0] == "scancel"] == ["106", "105", "104", "103"]


def test_a_run_that_is_measured_inside_is_one_job(tmp_path: Path) -> None:
    plan = small_plan(tmp_path, site=pretend_site(placement="inside"))
    fake = FakeSlurm()
    (run,) = launch.submit([(plan, small_recipe())], Slurm({}, fake))
    assert fake.commands() == ["sbatch"]
    assert (run.job_ids(), run.read_jobs().complete) == ({"serve": "101"}, True)
    assert set(launch.scripts(plan)) == {"serve.sbatch", "send.sh"}


@pytest.mark.parametrize(("rung", "cancelled"), [(0, ["102", "101"]), (2, ["106", "105"])])
def test_nobody_behind_the_first_or_the_last_rung_needs_to_wait_for_somebody_else(
        rungs: list[launch.Rung], rung: int, cancelled: list[str]) -> None:
    fake = FakeSlurm()
    runs = launch.submit(rungs, Slurm({}, fake))
    del fake.calls[:]
    launch.cancel(runs[rung], Slurm({}, fake))
    assert fake.calls == [("scancel", job) for job in cancelled]


def test_when_two_rungs_in_a_row_are_cancelled_the_one_behind_still_waits_for_the_one_that_runs(
        tmp_path: Path) -> None:
    fake = FakeSlurm()
    runs = launch.submit([(plan, small_recipe()) for plan in ladder_plans(tmp_path, 4)], Slurm({}, fake))
    launch.cancel(runs[1], Slurm({}, fake))
    launch.cancel(runs[2], Slurm({}, fake))
    (last,) = [call[-1] for call in fake.calls if call[0] == "scontrol" and call[2] == "JobId=107"]
    assert "afterany:101" in last


def test_a_rung_that_was_cancelled_already_is_not_cancelled_again_with_its_ladder(rungs: list[launch.Rung]) -> None:
    fake = FakeSlurm()
    runs = launch.submit(rungs, Slurm({}, fake))
    launch.cancel(runs[1], Slurm({}, fake))
    del fake.calls[:]
    launch.cancel_ladder(runs, Slurm({}, fake))
    assert [call[1] for call in fake.calls if call[0] == "scancel"] == ["106", "105", "102", "101"]
    assert [[event.event for event in run.read_events()] for run in runs] == [["submitted", "cancelled"]] * 3


def test_a_ladders_index_leads_from_every_job_to_its_rung(rungs: list[launch.Rung], tmp_path: Path) -> None:
    runs = launch.submit(rungs, Slurm({}, FakeSlurm()))
    index = Runs(tmp_path, "pretend")
    assert [index.find(str(job)).path for job in range(101, 107)] == [run.path for run in runs for _ in range(2)]
    assert [run.path for run in index.ladder("104")] == [run.path for run in runs]


def here(tmp_path: Path) -> list[launch.Rung]:
    """The rungs of a ladder on this machine."""
    return [(plan, small_recipe()) for plan in ladder_plans(tmp_path, scheduler="local")]


def test_without_slurm_one_controller_takes_all_rungs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[object, ...]] = []
    monkeypatch.setattr("isambard_serve.controller.start", lambda *given: started.append(given))
    rungs = here(tmp_path)
    runs = launch.submit(rungs, None)
    assert started == [(runs, rungs[0][0].python, rungs[0][0].export)]
    assert [[event.event for event in run.read_events()] for run in runs] == [["submitted"]] * 3
    assert not list(tmp_path.glob("*/send.sh"))
    assert not list(tmp_path.glob("*/sweep.sbatch"))


def test_without_slurm_a_controller_that_cannot_be_started_leaves_failed_runs(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise OSError(8, "Exec format error")

    monkeypatch.setattr("isambard_serve.controller.start", start)
    rungs = here(tmp_path)
    with pytest.raises(OSError, match="Exec format"):
        launch.submit(rungs, None)
    assert {RunDir(Path(plan.run_dir)).read_events()[-1].event for plan, _ in rungs} == {"failed"}


def test_without_slurm_a_cancelled_run_says_so_before_its_process_is_ended(
        tmp_path: Path, child: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, chosen = here(tmp_path)[0]
    run = launch.write(plan, chosen)
    process = child("sleep", "60")
    job = local.job_id(process.pid)
    run.write_jobs(Jobs(jobs=(SubmittedJob(role="controller", job_id="local-1-1", time=1.0),
                              SubmittedJob(role="serve", job_id=job, time=1.0)), complete=True))
    seen: list[list[str]] = []
    cancel = Local.cancel

    def watched(self: Local, job_ids: Iterable[str]) -> None:
        seen.append([event.event for event in run.read_events()])
        cancel(self, job_ids)

    monkeypatch.setattr(Local, "cancel", watched)
    launch.cancel(run, None)
    assert seen == [["cancelled"]]
    assert Local().states([job])[job].ended


def test_without_slurm_a_rung_that_waits_is_cancelled_by_its_word_alone(tmp_path: Path) -> None:
    run = launch.write(*here(tmp_path)[1])
    run.write_jobs(Jobs(jobs=(SubmittedJob(role="controller", job_id="local-1-1", time=1.0),), complete=True))
    launch.cancel(run, None)
    assert [event.event for event in run.read_events()] == ["cancelled"]


def test_without_slurm_a_full_disk_keeps_nothing_running(
        tmp_path: Path, child: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    run = launch.write(*here(tmp_path)[0])
    job = local.job_id(child("sleep", "60").pid)
    run.write_jobs(Jobs(jobs=(SubmittedJob(role="serve", job_id=job, time=1.0),), complete=True))
    monkeypatch.setattr(RunDir, "record", full)
    launch.cancel(run, None)
    assert Local().states([job])[job].ended
