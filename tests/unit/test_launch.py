"""Submission: both jobs or none, ``jobs.json`` written around each step, and the sweep cancelled first."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from submitit.core.utils import DelayedSubmission

from isambard_serve import launch, recipe
from isambard_serve.errors import HostError, UsageError
from isambard_serve.plan import Plan
from isambard_serve.process import Completed
from isambard_serve.records import Jobs
from isambard_serve.run import RunDir, Runs
from isambard_serve.slurm import Slurm
from isambard_serve.sweep import sweep
from tests.unit.helpers import RUN_ID, FakeSlurm, said, small_plan, small_recipe, written_run

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
    jobs = launch.submit(plan, small_recipe(), Slurm({}, fake))
    assert fake.calls == [
        ("sbatch", "--parsable", f"{plan.run_dir}/serve.sbatch"),
        ("sbatch", "--parsable", "--dependency=after:101+10", f"{plan.run_dir}/sweep.sbatch")]
    assert jobs == jobs_json(plan)
    assert jobs.complete
    assert [(job.role, job.job_id) for job in jobs.jobs] == [("serve", "101"), ("sweep", "102")]


def test_without_a_load_time_the_sweep_is_due_as_soon_as_the_serve_job_starts(tmp_path: Path) -> None:
    fake = FakeSlurm()
    launch.submit(small_plan(tmp_path), small_recipe(), Slurm({}, fake))
    assert fake.calls[1][2] == "--dependency=after:101"


def test_what_may_be_running_is_noted_before_and_after_each_submission(plan: Plan) -> None:
    noted: list[list[tuple[str, str | None]]] = []
    complete: list[bool] = []

    def sbatch(argv: tuple[str, ...]) -> Completed:
        seen = jobs_json(plan)
        noted.append([(job.role, job.job_id) for job in seen.jobs])
        complete.append(seen.complete)
        return said("101" if argv[-1].endswith("serve.sbatch") else "102")

    launch.submit(plan, small_recipe(), Slurm({}, FakeSlurm(sbatch=sbatch)))
    assert noted == [[("serve", None)], [("serve", "101"), ("sweep", None)]]
    assert complete == [False, False]


def test_any_job_id_leads_to_the_run_and_submitit_finds_its_function(plan: Plan) -> None:
    launch.submit(plan, small_recipe(), Slurm({}, FakeSlurm()))
    runs = Runs(Path(plan.run_dir).parent, plan.site)
    assert runs.find("101").path == runs.find("102").path == Path(plan.run_dir)
    pickle = Path(plan.run_dir) / "submitit" / "102_submitted.pkl"
    delayed = DelayedSubmission.load(pickle)
    assert (delayed.function, delayed.args) == (sweep, (plan.run_dir,))


def test_what_is_sent_is_what_is_rendered_byte_for_byte(plan: Plan) -> None:
    launch.submit(plan, small_recipe(), Slurm({}, FakeSlurm()))
    for name, text in launch.scripts(plan).items():
        assert (Path(plan.run_dir) / name).read_bytes() == text.encode()


def test_a_written_run_is_complete_and_the_owners_alone(plan: Plan) -> None:
    run = launch.write(plan, small_recipe())
    assert {str(path.relative_to(run.path)) for path in run.path.rglob("*")} == {
        "recipe.lock.yaml", "plan.json", "serve.sbatch", "sweep.sbatch", "send.sh", "submitit", "submitit/sweep.pkl",
        "events", "engine", "points"}
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert run.send_script.stat().st_mode & stat.S_IXUSR
    assert msgspec.json.decode(run.plan.read_bytes(), type=Plan) == plan
    assert recipe.load(str(run.lock)) == (small_recipe(), [])


def test_a_run_is_written_once(plan: Plan) -> None:
    launch.write(plan, small_recipe())
    with pytest.raises(UsageError, match="this run exists already"):
        launch.write(plan, small_recipe())


def test_a_missing_image_is_refused_before_anything_is_written_or_sent(plan: Plan, tmp_path: Path) -> None:
    fake = FakeSlurm()
    image = str(tmp_path / "none.sif")
    needy = msgspec.structs.replace(plan, needs={image: "pull it"})
    with pytest.raises(UsageError, match=r"none\.sif: the engine's image is not there\n.*pull it"):
        launch.submit(needy, small_recipe(), Slurm({}, fake))
    assert fake.calls == []
    assert not Path(plan.run_dir).exists()
    Path(image).touch()
    launch.submit(needy, small_recipe(), Slurm({}, fake))


def test_a_refused_serve_job_leaves_nothing_in_the_queue(plan: Plan) -> None:
    fake = FakeSlurm(sbatch=said(stderr="no credit", returncode=1))
    with pytest.raises(HostError, match="no credit"):
        launch.submit(plan, small_recipe(), Slurm({}, fake))
    assert fake.commands() == ["sbatch"]
    (event,) = RunDir(Path(plan.run_dir)).read_events()
    assert (event.writer, event.event) == ("submit", "failed")
    assert "no credit" in str(event.reason)


def test_a_refused_sweep_takes_the_serve_job_with_it(plan: Plan) -> None:
    fake = FakeSlurm(sbatch=per_script(said("101"), said(stderr="no credit", returncode=1)))
    with pytest.raises(HostError, match="no credit"):
        launch.submit(plan, small_recipe(), Slurm({}, fake))
    assert fake.calls[2:] == [("scancel", "101")]
    (event,) = RunDir(Path(plan.run_dir)).read_events()
    assert (event.writer, event.event) == ("submit", "failed")
    assert not jobs_json(plan).complete


def test_an_interruption_between_the_two_jobs_takes_the_serve_job_with_it(plan: Plan) -> None:
    fake = FakeSlurm(sbatch=per_script(said("101"), KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        launch.submit(plan, small_recipe(), Slurm({}, fake))
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
        launch.submit(plan, small_recipe(), Slurm({}, fake))
    assert fake.calls[2:] == [("scancel", "102"), ("scancel", "101")]


def test_if_even_cancelling_fails_the_reader_is_told_what_to_type(plan: Plan) -> None:
    refused = said(stderr="outage", returncode=1)
    fake = FakeSlurm(sbatch=per_script(said("101"), refused), scancel=refused)
    with pytest.raises(HostError) as caught:
        launch.submit(plan, small_recipe(), Slurm({}, fake))
    assert caught.value.remedy == "scancel 101"
    assert caught.value.where == plan.run_dir
    # Nobody knows whether the job is gone: the run is not called failed.
    assert RunDir(Path(plan.run_dir)).read_events() == []


def test_cancelling_a_run_ends_its_sweep_first_since_the_serve_jobs_end_would_set_it_free(plan: Plan) -> None:
    fake = FakeSlurm()
    launch.submit(plan, small_recipe(), Slurm({}, fake))
    run = RunDir(Path(plan.run_dir))
    assert sorted(launch.cancel(run, Slurm({}, fake))) == ["101", "102"]
    assert fake.calls[2:] == [("scancel", "102"), ("scancel", "101")]
    assert [event.event for event in run.read_events()] == ["submitted", "cancelled"]


def test_a_run_that_could_not_be_cancelled_is_not_called_cancelled(plan: Plan) -> None:
    launch.submit(plan, small_recipe(), Slurm({}, FakeSlurm()))
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
