"""Runs without Slurm: rungs one after another, their jobs noted as they start, and none started that was cancelled."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from isambard_serve import controller, local
from isambard_serve.plan import Plan
from isambard_serve.records import Jobs
from isambard_serve.run import RunDir, Runs, read_record
from tests.support.waiting import wait_until
from tests.unit.helpers import HERE, ladder_plans, written_run

pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # by intention

SAYS = """echo '{{"time": 1, "writer": "serve", "event": "{event}"}}' >> {run.events}/serve.jsonl"""


@pytest.fixture
def plans(tmp_path: Path) -> list[Plan]:
    """The plans of three rungs on this machine, each measured inside its serve job."""
    return [msgspec.structs.replace(plan, python=sys.executable)
            for plan in ladder_plans(tmp_path / "runs", scheduler="local", placement="inside")]


@pytest.fixture
def rungs(plans: list[Plan]) -> list[RunDir]:
    """The rungs themselves. Each one's script tells what it does, and does nothing else."""
    runs = [written_run(plan) for plan in plans]
    for run in runs:
        run.serve_script.write_text(f"{SAYS.format(run=run, event='done')}\necho printed; pwd\n")
    return runs


def dependent(run: RunDir, script: str) -> None:
    """Have ``run`` measured by a sweep of its own, while its serve job does ``script``."""
    plan = msgspec.structs.replace(read_record(run.plan, Plan), placement="dependent")
    run.plan.write_bytes(msgspec.json.encode(plan))
    run.serve_script.write_text(script)


def test_rungs_are_run_in_their_order_but_for_those_cancelled_meanwhile(
        rungs: list[RunDir], monkeypatch: pytest.MonkeyPatch) -> None:
    # The first one's end cancels the second: it has not begun yet.
    rungs[0].serve_script.write_text(
        SAYS.format(run=rungs[0], event="done") + "\n"
        + SAYS.format(run=rungs[1], event="cancelled").replace('"serve"', '"cancel"').replace("serve.jsonl",
                                                                                               "cancel.jsonl"))
    monkeypatch.setattr("sys.argv", ["controller", *(str(run.path) for run in rungs)])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(controller.GO)))
    controller.main()
    assert [[event.event for event in run.read_events()] for run in rungs] == [["done"], ["cancelled"], ["done"]]
    assert rungs[1].read_jobs() == Jobs()


@pytest.mark.parametrize("word", [b"", controller.GO[:-1], b"stop\n"])
def test_without_the_word_that_all_is_noted_nothing_runs(
        rungs: list[RunDir], monkeypatch: pytest.MonkeyPatch, word: bytes) -> None:
    monkeypatch.setattr("sys.argv", ["controller", *(str(run.path) for run in rungs)])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(word)))
    controller.main()
    assert [run.read_events() for run in rungs] == [[], [], []]


def test_a_rungs_job_is_noted_found_by_its_id_and_prints_into_its_log(rungs: list[RunDir], plans: list[Plan]) -> None:
    controller.serve(rungs[0])
    ids = rungs[0].job_ids()
    assert list(ids) == ["serve"]
    assert local.Local().states(ids.values())[ids["serve"]].ended
    assert Runs(rungs[0].path.parent, plans[0].site).find(ids["serve"]).path == rungs[0].path
    assert rungs[0].serve_log.read_text() == f"printed\n{rungs[0].path}\n"


def test_what_was_noted_before_stays_noted(rungs: list[RunDir]) -> None:
    controller._note(rungs[0], {"controller": "local-1-1"})
    controller._note(rungs[0], {"serve": "local-2-2"})
    assert rungs[0].job_ids() == {"serve": "local-2-2", "controller": "local-1-1"}
    assert rungs[0].read_jobs().complete
    assert {path.name for path in (rungs[0].path.parent / ".jobs").iterdir()} == {
        "pretend-local-1-1", "pretend-local-2-2"}


def test_a_sweep_sees_by_itself_that_its_engine_has_gone(rungs: list[RunDir]) -> None:
    dependent(rungs[0], SAYS.format(run=rungs[0], event="failed"))
    controller.serve(rungs[0])
    assert list(rungs[0].job_ids()) == ["serve", "sweep"]
    assert [event.event for event in rungs[0].read_events(["sweep"])] == ["waiting", "left"]


def test_a_sweep_that_does_not_leave_is_ended(rungs: list[RunDir], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "SWEEP_GRACE_S", 0.0)
    dependent(rungs[0], "true")
    controller.serve(rungs[0])
    sweep = rungs[0].job_ids()["sweep"]
    wait_until(lambda: local.Local().states([sweep])[sweep].ended, 10, "the sweep's end", interval_s=0.01)
    assert rungs[0].read_rows() == []


def test_the_controller_is_a_process_of_its_own_and_known_to_every_rung(
        rungs: list[RunDir], plans: list[Plan]) -> None:
    controller.start(rungs, plans[0].python, plans[0].export)
    (job,) = {run.job_ids()["controller"] for run in rungs}
    wait_until(lambda: local.Local().states([job])[job].ended, 20, "the controller's end", interval_s=0.01)
    assert [[event.event for event in run.read_events()] for run in rungs] == [["done"]] * 3
    assert all(set(run.job_ids()) == {"serve", "controller"} for run in rungs)
    assert Runs(rungs[0].path.parent, plans[0].site).find(job).path == rungs[-1].path
    assert (rungs[0].path / "controller.log").read_text() == ""


def test_a_controller_waits_for_the_word_however_long_the_noting_takes(
        rungs: list[RunDir], plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[list[bool]] = []
    note = controller._note

    def slowly(run: RunDir, ids: dict[str, str]) -> None:
        note(run, ids)
        (job,) = ids.values()
        time.sleep(0.2)
        noted.append([local.Local().states([job])[job].ended, any(rung.read_events() for rung in rungs)])

    monkeypatch.setattr(controller, "_note", slowly)
    controller.start(rungs, plans[0].python, plans[0].export)
    assert noted == [[False, False]] * 3
    job = rungs[0].job_ids()["controller"]
    wait_until(lambda: local.Local().states([job])[job].ended, 20, "the controller's end", interval_s=0.01)
    assert [[event.event for event in run.read_events()] for run in rungs] == [["done"]] * 3


DIES = """\
import os, sys
from pathlib import Path
from isambard_serve import controller
from isambard_serve.plan import Plan
from isambard_serve.run import RunDir, read_record
note = controller._note
def dies(run, ids):
    note(run, ids)
    if run.path == runs[1].path:
        os._exit(9)
controller._note = dies
runs = [RunDir(Path(path)) for path in sys.argv[1:]]
plan = read_record(runs[0].plan, Plan)
controller.start(runs, plan.python, plan.export)
"""


def test_if_who_submits_dies_before_all_is_noted_the_controller_ends_and_nothing_runs(rungs: list[RunDir]) -> None:
    done = subprocess.run([sys.executable, "-c", DIES, *(str(run.path) for run in rungs)], check=False,
                          cwd=HERE.parents[1])
    assert done.returncode == 9
    job = rungs[0].job_ids()["controller"]
    wait_until(lambda: local.Local().states([job])[job].ended, 20, "the controller's end", interval_s=0.01)
    assert [list(run.job_ids()) for run in rungs] == [["controller"], ["controller"], []]
    assert [run.read_events() for run in rungs] == [[], [], []]
