"""The command line: one JSON document on stdout, errors on stderr alone, and exit codes that can be relied on."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from isambard_serve import __version__, asked, doctor, health, process, remote
from isambard_serve import run as runs
from isambard_serve.cli import main, options
from isambard_serve.errors import HostError, NoProgramError
from isambard_serve.health import BadNode
from isambard_serve.outcome import Found
from isambard_serve.process import Completed
from isambard_serve.records import Row, Writer
from isambard_serve.run import RunDir, write_whole
from isambard_serve.slurm import Slurm
from tests.unit.helpers import HERE, PRETEND, SMALL, FakeSlurm, keep_row, ready, said, some_row

Write = Callable[[str, str], Path]
COMMANDS = sorted(main.commands)


class Cluster:
    """What a person at a login node has: a site with a place for runs, a recipe, and a Slurm that is none."""

    def __init__(self, runs_dir: Path, slurm: FakeSlurm) -> None:
        self.runs_dir = runs_dir
        self.slurm = slurm

    def __call__(self, *words: str, code: int = 0) -> Result:
        """Run the command ``words``, which must end with ``code``."""
        result = CliRunner().invoke(main, words)
        assert result.exit_code == code, (result.output, result.exception)
        if code:
            assert isinstance(result.exception, SystemExit)
        return result

    def json(self, *words: str, code: int = 0) -> dict[str, Any]:
        """The one document that ``words --json`` prints."""
        result = self(*words, "--json", code=code)
        document: dict[str, Any] = json.loads(result.stdout)
        return document

    def submitted(self) -> RunDir:
        """A run of the recipe ``small``."""
        document = self.json("submit", "small")
        return RunDir(self.runs_dir / document["runs"][0]["run_id"])


@pytest.fixture
def cluster(user_file: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    runs_dir = tmp_path / "runs"
    user_file("sites/here.yaml", PRETEND.read_text().replace("/shared/runs", str(runs_dir)))
    user_file("config.yaml", "site: here")
    user_file("jobs/small.yaml", SMALL)
    fake = FakeSlurm()
    monkeypatch.setattr(options, "open_slurm", lambda site: Slurm({}, fake))
    return Cluster(runs_dir, fake)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_its_options(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--help"])
    assert result.exit_code == 0
    assert main.commands[command].help
    for parameter in main.commands[command].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name


def test_the_help_names_every_command_and_every_exit_code() -> None:
    text = CliRunner().invoke(main, ["-h"]).output
    assert all(command in text for command in COMMANDS)
    assert "Exit codes: 0 good, 1" in text
    assert all(f"{code} " in " ".join(text.partition("Exit codes:")[2].split()) for code in (0, 1, 2, 3, 4, 130))
    assert "\\b" not in text
    assert "\b" not in text
    assert CliRunner().invoke(main, ["--version"]).output.strip().endswith(__version__)


def test_the_package_runs_as_a_module_and_is_quick_to_say_what_it_can() -> None:
    code = ("import sys, isambard_serve.cli as cli\ncli.main(['recipes'], standalone_mode=False)\n"
            "heavy = {'pandas', 'submitit', 'numpy', 'jinja2', 'psutil', 'prometheus_client'}\n"
            "print(sorted(heavy & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE.parents[1], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    done = subprocess.run([sys.executable, "-m", "isambard_serve", "show", "none"], cwd=HERE.parents[1],
                          capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no recipe is called 'none'")


@pytest.mark.parametrize("words", [
    [], ["nonsense"], ["submit"], ["collect"], ["cancel"], ["logs"], ["show"], ["plan"], ["status", "a", "b"],
    ["render", "tp4", "--script", "x"], ["submit", "small", "--nonsense"],
    ["show", "nonsense"], ["show", "tp4", "--set", "x"], ["show", "tp4", "--set", "modle=x"],
    ["plan", "tp4", "--site", "nonsense"], ["plan", "small", "--time", "soon"], ["render", "small", "--run-id", "../x"],
    ["status", "../nonsense"], ["status", "nonsense"], ["status", "77"], ["collect", "77"], ["cancel", "77"],
    ["logs", "77"], ["submit", "nonsense"], ["plan", "tiny", "--site", "isambard-ai"],
])
def test_wrong_usage_ends_with_2_and_says_so_on_stderr_alone(cluster: Cluster, words: list[str]) -> None:
    result = cluster(*words, code=2)
    assert result.stdout == ""
    assert result.stderr
    assert "Traceback" not in result.stderr
    assert cluster.slurm.calls == []


def test_without_a_site_the_remedy_is_told(user_file: Write) -> None:
    result = CliRunner().invoke(main, ["status"])
    assert result.exit_code == 2
    assert "error: --site: this machine is none of the known sites\n  → name one: --site isambard-ai" in result.stderr


def test_a_refusal_by_slurm_ends_with_3(cluster: Cluster) -> None:
    cluster.slurm.answers["sbatch"] = said(stderr="sbatch: error: Invalid account", returncode=1)
    result = cluster("submit", "small", "--json", code=3)
    assert result.stdout == ""
    assert "Slurm refused the job" in result.stderr
    assert "check account" in result.stderr


def test_a_machine_without_sbatch_ends_with_3_and_nothing_else_is_asked_for(cluster: Cluster) -> None:
    cluster.slurm.answers["sbatch"] = NoProgramError("sbatch cannot be started here: No such file or directory")
    assert cluster("submit", "small", "--json", code=3).stdout == ""
    assert cluster.slurm.commands() == ["sbatch"]


def test_a_run_that_cannot_be_cancelled_ends_with_3(cluster: Cluster) -> None:
    run = cluster.submitted()
    cluster.slurm.answers["scancel"] = HostError("scancel gave no answer within 60 s")
    assert cluster("cancel", run.run_id, code=3).stdout == ""


def test_a_folder_that_cannot_be_written_ends_with_1_and_is_named(cluster: Cluster, isolated: Path) -> None:
    run = cluster.submitted()
    (isolated / "results").write_text("a file")
    result = cluster("collect", run.run_id, code=1)
    assert "error: " in result.stderr
    assert "results" in result.stderr


def test_recipes_are_listed_with_what_they_are(cluster: Cluster) -> None:
    document = cluster.json("recipes")
    assert document["schema"] == "isambard-serve/recipes/1"
    assert [entry["recipe"] for entry in document["recipes"]] == ["dp4", "dp4-humming", "small", "tiny", "tp4"]
    lines = cluster("recipes").stdout.splitlines()
    assert len(lines) == 5
    assert lines[2].split(maxsplit=1) == ["small", "a recipe as small as they come"]


@pytest.mark.parametrize("text", ["extends: [", SMALL.replace("isl: 8", "isl: x"), SMALL.replace("1h", "soon")])
def test_a_recipe_that_cannot_be_used_is_left_out_of_the_list_with_a_warning(
        cluster: Cluster, user_file: Write, text: str) -> None:
    user_file("jobs/broken.yaml", text)
    result = cluster("recipes", "--json")
    assert [entry["recipe"] for entry in json.loads(result.stdout)["recipes"]] == [
        "dp4", "dp4-humming", "small", "tiny", "tp4"]
    assert result.stderr.startswith("warning: left out: ")
    assert "broken.yaml" in result.stderr


def test_a_recipe_is_shown_in_full_with_the_changes_worked_in(cluster: Cluster, write: Write) -> None:
    text = cluster("show", "dp4", "--set", "engine.args.max-num-seqs=512").stdout
    assert "max-num-seqs: 512" in text
    assert "extends" not in text
    again = cluster("show", str(write("shown.yaml", text))).stdout
    assert again == text
    document = cluster.json("show", "dp4")
    assert (document["schema"], document["engine"]["args"]["data-parallel-size"]) == ("isambard-serve/recipe/1", 4)


def test_a_warning_goes_to_stderr(cluster: Cluster) -> None:
    result = cluster("show", "small", "--set", "engine.version='9.9'", "--json")
    assert json.loads(result.stdout)["engine"]["version"] == "9.9"
    assert result.stderr.startswith("warning: no list of flags for engine 9.9")
    result = cluster("plan", "small", "--set", "resources.gpus=4", "--json")
    assert json.loads(result.stdout)["plans"][0]["gpus"] == 4
    assert result.stderr == "warning: its parallel shape uses 1 of the 4 GPUs that it asks for\n"


def test_a_plan_is_priced_for_several_recipes_and_predicts_nothing_that_is_not_modelled(cluster: Cluster) -> None:
    document = cluster.json("plan", "tp4", "dp4", "--time", "2h")
    assert document["schema"] == "isambard-serve/plan/1"
    assert [entry["recipe"] for entry in document["plans"]] == ["tp4", "dp4"]
    for entry in document["plans"]:
        assert (entry["predicted_output_tok_s"], entry["predicted_knee"]) == (None, None)
        assert entry["node_hours"] == {"inside": 2.0, "dependent": 2.0}
    text = cluster("plan", "tp4").stdout
    assert "filled in on the node: PORT" in text
    assert "at most 04:00:00 and 4 node-hours (4 without the sweep's own job)" in text
    assert "expected: nothing is known of deepseek-ai/DeepSeek-V4-Flash, of here's GPUs, or of the two together" in text


def test_a_plan_says_what_is_expected_where_model_and_site_are_known(cluster: Cluster) -> None:
    (entry,) = cluster.json("plan", "tp4", "--site", "isambard-ai")["plans"]
    assert entry["predicted_output_tok_s"] == pytest.approx(5856, rel=0.02)
    assert entry["predicted_knee"] == entry["predicted"]["knee"] > 1000
    text = cluster("plan", "tp4", "--site", "isambard-ai").stdout
    assert "output tok/s, knee at concurrency" in text
    assert "run at once (KV cache full)" in text
    assert "node-minutes" in text
    assert "--moe-backend marlin" in text
    assert "SIMULATED" not in text
    assert not cluster.runs_dir.exists()


def test_a_plan_and_a_script_of_a_simulated_run_say_so(cluster: Cluster) -> None:
    text = cluster("plan", "tp4", "dp4", "--site", "sandbox").stdout
    assert text.startswith("SIMULATED: ")
    assert text.count("SIMULATED: ") == 2
    assert "# SIMULATED: " in cluster("render", "tp4", "--site", "sandbox").stdout
    assert "SIMULATED" not in cluster("render", "tp4").stdout


def test_weights_that_are_not_there_are_missed_before_anything_is_sent(
        cluster: Cluster, user_file: Write, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    text = PRETEND.read_text().replace("/shared/runs", str(cluster.runs_dir))
    user_file("sites/offline.yaml", f"{text}\nset: {{HF_HOME: {cache}, HF_HUB_OFFLINE: '1'}}\n")
    for words in ([], ["--dry-run"]):
        result = cluster("submit", "small", "--site", "offline", *words, code=2)
        assert "models--small-model: the model's weights not found\n  → isambard-serve weights fetch" in result.stderr
    assert cluster.slurm.calls == []
    assert not cluster.runs_dir.exists()
    snapshot = cache / "hub" / "models--small-model" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    incomplete = cluster("submit", "small", "--site", "offline", code=2).stderr
    assert "the model's weights incomplete: 1 of 2 files are missing, model.safetensors for one" in incomplete
    (snapshot / "model.safetensors").touch()
    cluster("submit", "small", "--site", "offline")


def test_a_profile_instead_of_points_is_planned(cluster: Cluster) -> None:
    (plan,) = cluster.json("submit", "small", "--profile-at", "16", "--dry-run")["plans"]
    assert (plan["points"], plan["profile"], plan["placement"]) == ([], {"concurrency": 16, "steps": 30}, "inside")
    text = cluster("plan", "small", "--set", "bench.profile_at=16").stdout
    assert "points: none; 30 steps are recorded at concurrency 16 at ISL/OSL" in text
    assert "without the sweep's own job" not in text
    assert "--profile-at" in cluster("submit", "small", "--profile-at", "0", code=2).stderr
    assert "not profiled" in cluster("submit", "small", "--profile-at", "1", "--serve", "--dry-run", code=2).stderr


def test_a_plan_from_afar_names_the_values_that_are_only_examples(cluster: Cluster) -> None:
    result = cluster("plan", "tp4", "--site", "isambard-ai", "--json")
    assert json.loads(result.stdout)["plans"][0]["site"] == "isambard-ai"
    assert result.stderr == ("note: PROJECTDIR, SCRATCHDIR, UID not set here; isambard-ai's example values are shown "
                             "in their place\n")
    assert "$SCRATCHDIR is not set" in cluster("submit", "tp4", "--site", "isambard-ai", code=2).stderr


@pytest.mark.parametrize("script", ["serve.sbatch", "sweep.sbatch", "send.sh"])
def test_a_script_rendered_for_a_runs_id_is_what_was_sent_byte_for_byte(cluster: Cluster, script: str) -> None:
    run = cluster.submitted()
    result = cluster("render", "small", "--run-id", run.run_id, "--script", script)
    assert result.stdout_bytes == (run.path / script).read_bytes()


def test_a_run_is_written_to_be_sent_by_hand(cluster: Cluster, isolated: Path) -> None:
    path = Path(cluster("render", "small", "-o", "out").stdout.strip())
    assert path.parent == isolated / "out"
    assert os.access(path / "send.sh", os.X_OK)
    assert cluster.slurm.calls == []


def test_a_submission_names_the_run_and_its_jobs(cluster: Cluster) -> None:
    document = cluster.json("submit", "small")
    assert list(document) == ["schema", "runs"]
    assert document["schema"] == "isambard-serve/submit/1"
    (run,) = document["runs"]
    assert run["jobs"] == {"serve": "101", "sweep": "102"}
    assert (run["recipe"], run["site"], run["state"], run["simulated"]) == ("small", "here", "submitted", False)
    text = cluster("submit", "small").stdout
    assert "serve job 103, sweep job 104, at most 0.25 node-hours" in text


def test_a_dry_run_prints_the_script_and_sends_and_writes_nothing(cluster: Cluster) -> None:
    text = cluster("submit", "small", "--dry-run").stdout
    assert text.startswith("#!/bin/bash\n")
    document = cluster.json("submit", "small", "--dry-run")
    assert document["plans"][0]["recipe"] == "small"
    assert document["plans"][0]["predicted_output_tok_s"] is None
    assert cluster.slurm.calls == []
    assert not cluster.runs_dir.exists()


def test_binding_can_be_left_out_to_measure_its_gain(cluster: Cluster, user_file: Write) -> None:
    user_file("jobs/bound.yaml", SMALL.replace("0.33.0", "0.33.0, args: {numa-bind: true}"))
    bound = cluster("submit", "bound", "--dry-run").stdout
    assert ('"${membind[@]}"' in bound, '"${numa_bind[@]}"' in bound) == (True, True)
    unbound = cluster("submit", "bound", "--dry-run", "--no-numa-bind").stdout
    assert ("--no-numa-bind" in unbound, "membind" in unbound) == (True, False)
    assert "MEMBIND /opt/engine/bin/vllm serve" in cluster("plan", "bound").stdout


def test_a_node_that_was_found_bad_of_late_is_left_out_and_said_so(cluster: Cluster) -> None:
    bad = BadNode(node="nid003", time=time.time(), run_id="r1", faults=("GPU x: it hangs",))
    health.remember(cluster.runs_dir, bad)
    done = cluster("submit", "small", "--dry-run")
    assert "#SBATCH --exclude='nid[001-002],nid003'\n" in done.stdout
    assert done.stderr == "note: nid003 is left out, where run r1 found: GPU x: it hangs\n"


@pytest.mark.parametrize("words", [("submit", "probe", "--image-of", "small"), ("weights", "fetch", "small"),
                                   ("shell",), ("shell", "small")])
def test_no_other_job_goes_to_a_bad_node_either(cluster: Cluster, monkeypatch: pytest.MonkeyPatch,
                                                words: tuple[str, ...]) -> None:
    bad = BadNode(node="nid003", time=time.time(), run_id="r1", faults=("GPU x: it hangs",))
    health.remember(cluster.runs_dir, bad)
    monkeypatch.setattr(process, "attended", lambda argv, env: 0)
    done = cluster(*words)
    written = "".join(path.read_text() for path in cluster.runs_dir.glob("*/*.sbatch"))
    assert "--exclude='nid[001-002],nid003'\n" in written or "'--exclude=nid[001-002],nid003'" in done.stderr
    assert done.stderr.count("nid003 is left out") == 1


@pytest.fixture
def goes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Row], None]:
    """What happens to a run while somebody waits for it."""

    def _goes(end: str, row: Row) -> None:
        def meanwhile(_: float) -> None:
            (run,) = runs.Runs(cluster.runs_dir, "here").newest(1)
            keep_row(run, row)
            run.record("serve", end, reason="that was it")

        monkeypatch.setattr("time.sleep", meanwhile)

    return _goes


def test_waiting_for_a_run_that_goes_well_ends_with_0(cluster: Cluster, goes: Callable[[str, Row], None]) -> None:
    goes("done", some_row())
    result = cluster("submit", "small", "--wait", "--json")
    assert json.loads(result.stdout)["runs"][0]["state"] == "done"
    assert result.stderr.splitlines()[-1].startswith("small: done, 1 of 2 points")


@pytest.mark.parametrize(("end", "row", "why"), [
    ("failed", some_row(), "failed"), ("failed", some_row(valid=False), "failed"),
    ("cancelled", some_row(), "cancelled"), ("done", some_row(valid=False), "rows that are not valid")])
def test_waiting_for_a_run_that_fails_or_is_not_valid_ends_with_1_and_says_which_and_why(
        cluster: Cluster, goes: Callable[[str, Row], None], end: str, row: Row, why: str) -> None:
    goes(end, row)
    result = cluster("submit", "small", "--wait", "--json", code=1)
    (run,) = json.loads(result.stdout)["runs"]
    assert run["state"] == end
    assert f"error: {run['run_id']}: {why}\n  → isambard-serve collect {run['run_id']}\n" in result.stderr


def interrupted(*_: object) -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt


def test_who_stops_to_wait_is_told_that_the_run_goes_on(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", interrupted)
    result = cluster("submit", "small", "--wait", "--json", code=130)
    assert result.stdout == ""
    assert result.stderr.endswith("error: interrupted; runs that were submitted go on by themselves\n")
    assert "scancel" not in cluster.slurm.commands()
    assert cluster.json("status", "101")["runs"][0]["state"] == "submitted"


def test_an_interrupted_submission_leaves_nothing_in_the_queue(cluster: Cluster) -> None:
    cluster.slurm.answers["sbatch"] = (
        lambda argv: said("101") if argv[-1].endswith("serve.sbatch") else KeyboardInterrupt())
    cluster("submit", "small", code=130)
    assert ("scancel", "101") in cluster.slurm.calls
    assert cluster.json("status")["runs"][0]["state"] == "failed"


@pytest.mark.parametrize("handler", [signal.SIG_DFL, lambda *_: pytest.fail("the old one was called")])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_told_to_end_tidies_up_as_for_ctrl_c(cluster: Cluster, number: signal.Signals,
                                                                       handler: Any) -> None:
    cluster.slurm.answers["sbatch"] = (
        lambda argv: said("101") if argv[-1].endswith("serve.sbatch") else os.kill(os.getpid(), number))
    before = signal.signal(number, handler)
    try:
        cluster("submit", "small", code=130)
        assert ("scancel", "101") in cluster.slurm.calls
        assert signal.getsignal(number) == handler
    finally:
        signal.signal(number, before)


def test_a_command_below_nohup_hears_no_hangup(cluster: Cluster) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        def sbatch(argv: Sequence[str]) -> Completed:
            os.kill(os.getpid(), signal.SIGHUP)
            return said("101")

        cluster.slurm.answers["sbatch"] = sbatch
        cluster("submit", "small")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_submission_says_on_stderr_what_comes_next(
        cluster: Cluster, goes: Callable[[str, Row], None]) -> None:
    result = cluster("submit", "small", "small")
    first = result.stdout.partition(":")[0]
    assert result.stderr == f"  → isambard-serve status {first}\n"
    assert cluster("submit", "small", "--json").stderr == ""
    goes("done", some_row())
    assert "→" not in cluster("submit", "small", "--wait").stderr


def test_status_tells_one_run_by_any_of_its_ids_or_lists_the_newest(cluster: Cluster) -> None:
    assert "no runs in" in cluster("status").stderr
    run = cluster.submitted()
    keep_row(run, some_row(run_id=run.run_id))
    for name in (run.run_id, "101", "102", str(run.path)):
        document = cluster.json("status", name)
        assert document["schema"] == "isambard-serve/status/1"
        assert [entry["run_id"] for entry in document["runs"]] == [run.run_id]
        assert len(document["rows"]) == 1
    assert [entry["run_id"] for entry in cluster.json("status")["runs"]] == [run.run_id]
    assert f"{run.run_id}: submitted, 1 of 2 points" in cluster("status", "101").stdout


def test_older_runs_are_counted_below_the_ten_newest(cluster: Cluster) -> None:
    cluster.json("submit", *["small"] * 10)
    assert cluster("status").stderr == ""
    cluster.json("submit", *["small"] * 2)
    result = cluster("status")
    assert len(result.stdout.splitlines()) == 10
    assert result.stderr == f"and 2 older in {cluster.runs_dir}\n"
    assert cluster("status", "101").stderr == ""
    assert len(cluster.json("status")["runs"]) == 10


def test_below_a_failed_run_stands_how_to_read_its_log(cluster: Cluster) -> None:
    run = cluster.submitted()
    run.record("serve", "failed", reason="the engine died")
    assert cluster("status", run.run_id).stdout.splitlines()[-1] == f"  → isambard-serve logs {run.run_id}"


def test_a_cancelled_run_says_so_and_is_not_cancelled_twice(cluster: Cluster) -> None:
    run = cluster.submitted()
    document = cluster.json("cancel", "101")
    assert (document["schema"], document["runs"][0]["state"]) == ("isambard-serve/cancel/1", "cancelled")
    assert cluster.slurm.calls[-2:] == [("scancel", "102"), ("scancel", "101")]
    again = cluster("cancel", run.run_id)
    assert again.stdout == f"{run.run_id}: cancelled\n"
    assert "has ended already: cancelled" in again.stderr
    assert [event.event for event in run.read_events()] == ["submitted", "cancelled"]


@pytest.mark.parametrize(("writer", "end"), [("serve", "failed"), ("submit", "failed"), ("cancel", "cancelled")])
def test_cancelling_a_run_that_has_ended_still_takes_its_jobs_out_of_the_queue(
        cluster: Cluster, writer: Writer, end: str) -> None:
    run = cluster.submitted()
    run.record(writer, end)
    result = cluster("cancel", run.run_id)
    assert f"has ended already: {end}" in result.stderr
    assert cluster.slurm.calls[2:] == [("scancel", "102"), ("scancel", "101")]
    assert [event.event for event in run.read_events()] == ["submitted", end]


def test_a_run_that_is_done_has_nothing_to_cancel(cluster: Cluster) -> None:
    run = cluster.submitted()
    run.record("serve", "done")
    assert "has ended already: done" in cluster("cancel", run.run_id).stderr
    assert "scancel" not in cluster.slurm.commands()


def test_a_damaged_run_hides_no_other_in_the_list_and_is_an_error_to_whoever_names_it(cluster: Cluster) -> None:
    good, damaged = cluster.submitted(), cluster.submitted()
    damaged.plan.write_text("{")
    result = cluster("status", "--json")
    assert [run["run_id"] for run in json.loads(result.stdout)["runs"]] == [good.run_id]
    assert result.stderr.startswith("warning: left out: ")
    assert str(damaged.plan) in result.stderr
    assert "older" not in cluster("status").stderr
    assert str(damaged.plan) in cluster("status", damaged.run_id, code=1).stderr


@pytest.mark.parametrize("name", ["plan.json", "jobs.json"])
def test_a_damaged_run_can_be_told_to_end_all_the_same(cluster: Cluster, name: str) -> None:
    run = cluster.submitted()
    (run.path / name).write_text("{")
    assert "the run's jobs have been told to end by themselves" in cluster("cancel", run.run_id, code=1).stderr
    assert [event.event for event in run.read_events(["cancel"])] == ["cancelled"]


@pytest.mark.parametrize("below", [".", "results", "points/x"])
def test_results_are_not_collected_into_the_run_that_they_are_of(cluster: Cluster, below: str) -> None:
    run = cluster.submitted()
    before = set(run.path.rglob("*"))
    result = cluster("collect", run.run_id, "-o", str(run.path / below), code=2)
    assert "results cannot be collected into the run that they are of" in result.stderr
    assert set(run.path.rglob("*")) == before


def test_logs_are_printed_as_they_are(cluster: Cluster) -> None:
    run = cluster.submitted()
    assert "→" not in cluster("logs", run.run_id).stderr
    run.serve_log.touch()
    assert cluster("logs", run.run_id).stderr == (
        f"nothing yet: {run.engine_log}\n  → isambard-serve logs --of serve {run.run_id}\n")
    run.engine_log.write_bytes(b"engine \xff\n")
    run.serve_log.write_bytes(b"serve\n")
    run.log("sweep").write_bytes(b"sweep\n")
    assert cluster("logs", run.run_id).stdout_bytes == b"engine \xff\n"
    assert cluster("logs", run.run_id, "--of", "serve").stdout == "serve\n"
    assert cluster("logs", run.run_id, "--of", "sweep").stdout == "sweep\n"
    run.record("serve", "done")
    assert cluster("logs", "-f", run.run_id).stdout_bytes == b"engine \xff\n"


def test_collecting_brings_the_evidence_here_and_tables_it(cluster: Cluster, isolated: Path) -> None:
    run = cluster.submitted()
    keep_row(run, some_row(run_id=run.run_id, output_tok_s=5856.0))
    keep_row(run, some_row(run_id=run.run_id, concurrency=2, valid=False, reasons=("none_failed",)))
    result = cluster("collect", "101")
    here = isolated / "results" / run.run_id
    assert "5,856.00" in result.stdout
    assert "NO: none_failed" in result.stdout
    assert "files" in result.stderr
    assert (here / "points" / "c0001.r1" / "row.json").exists()
    assert (here / "results.csv").read_text().splitlines()[0].startswith("run_id,recipe,simulated,node,")
    document = json.loads((here / "results.json").read_text())
    assert document == cluster.json("collect", run.run_id)
    assert list(document) == ["schema", "simulated", "runs", "rows"]
    assert (document["schema"], document["simulated"]) == ("isambard-serve/collect/1", False)
    assert [row["output_tok_s"] for row in document["rows"]] == [5856.0, 100.0]


def test_a_row_that_cannot_be_read_is_not_taken_for_a_valid_one(cluster: Cluster) -> None:
    run = cluster.submitted()
    for concurrency in (1, 2):
        keep_row(run, some_row(run_id=run.run_id, concurrency=concurrency))
    run.record("serve", "done")
    cluster("collect", run.run_id, "--require-valid")
    (run.points / "c0002.r1" / "row.json").write_text('{"valid": false')
    (told,) = cluster.json("status", run.run_id)["runs"]
    assert (told["points_done"], told["points_invalid"]) == (2, 1)
    result = cluster("collect", run.run_id, "--require-valid", code=1)
    assert "2 of 2 points, 1 NOT VALID" in result.stdout


def test_several_runs_are_collected_into_one_document_and_a_folder_each(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.submitted(), cluster.submitted()
    for run in (first, second):
        keep_row(run, some_row(run_id=run.run_id))
    document = cluster.json("collect", first.run_id, second.run_id, "-o", str(tmp_path / "out"))
    assert [run["run_id"] for run in document["runs"]] == [first.run_id, second.run_id]
    assert [row["run_id"] for row in document["rows"]] == [first.run_id, second.run_id]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {first.run_id, second.run_id}


def test_nothing_is_collected_if_one_of_the_names_is_wrong(cluster: Cluster, isolated: Path) -> None:
    run = cluster.submitted()
    cluster("collect", run.run_id, "77", code=2)
    assert not (isolated / "results").exists()


def ladder(cluster: Cluster, count: int = 3) -> list[RunDir]:
    """The rungs of a ladder of the recipe ``small``."""
    document = cluster.json("submit", *["small"] * count)
    return [RunDir(cluster.runs_dir / run["run_id"]) for run in document["runs"]]


def test_several_recipes_are_submitted_as_the_rungs_of_a_ladder(cluster: Cluster) -> None:
    document = cluster.json("submit", "small", "small", "small")
    ids = [run["run_id"] for run in document["runs"]]
    assert [run["jobs"] for run in document["runs"]] == [
        {"serve": "101", "sweep": "102"}, {"serve": "103", "sweep": "104"}, {"serve": "105", "sweep": "106"}]
    assert {run["ladder"] for run in document["runs"]} == {ids[0]}
    assert cluster.json("submit", "small")["runs"][0]["ladder"] is None
    assert len(cluster("submit", "small", "small").stdout.splitlines()) == 2


def test_a_dry_run_of_several_recipes_prints_every_script(cluster: Cluster) -> None:
    text = cluster("submit", "small", "tiny", "--dry-run").stdout
    assert text.count("#!/bin/bash\n") == 2
    document = cluster.json("submit", "small", "tiny", "--dry-run")
    assert [plan["recipe"] for plan in document["plans"]] == ["small", "tiny"]
    assert cluster.slurm.calls == []


def test_one_wrong_recipe_stops_the_whole_ladder_before_anything_is_sent(cluster: Cluster) -> None:
    cluster("submit", "small", "nonsense", code=2)
    assert cluster.slurm.calls == []
    assert not cluster.runs_dir.exists()


def test_measuring_inside_can_be_asked_for(cluster: Cluster) -> None:
    (run,) = cluster.json("submit", "small", "--placement", "inside")["runs"]
    assert run["jobs"] == {"serve": "101"}
    result = cluster("render", "small", "--placement", "inside", "--script", "sweep.sbatch", code=2)
    assert "there is no sweep.sbatch with placement inside at here" in result.stderr
    assert "sweep" not in cluster("render", "small", "--placement", "inside", "--script", "send.sh").stdout


@pytest.mark.parametrize("rung", range(3))
def test_a_whole_ladder_is_collected_by_any_of_its_rungs_and_compared_with_the_first(
        cluster: Cluster, isolated: Path, rung: int) -> None:
    runs = ladder(cluster)
    for run, speed in zip(runs, (100.0, 220.0, 300.0), strict=True):
        keep_row(run, some_row(run_id=run.run_id, output_tok_s=speed))
    document = cluster.json("collect", "--ladder", runs[rung].run_id)
    assert [run["run_id"] for run in document["runs"]] == [run.run_id for run in runs]
    assert [row["ratio"] for row in document["rows"]] == [1.0, 2.2, 3.0]
    heading, *lines = cluster("collect", "--ladder", "101").stdout.splitlines()
    assert "ratio" in heading
    assert [line.split()[5] for line in lines[:3]] == ["1.00", "2.20", "3.00"]
    # The files of each say what the table says.
    for run, ratio in zip(runs, (1.0, 2.2, 3.0), strict=True):
        assert kept_ratios(isolated / "results" / run.run_id) == ([ratio], [str(ratio)])
    # Alone, a run is compared with nothing.
    assert "ratio" not in cluster("collect", runs[rung].run_id).stdout
    assert kept_ratios(isolated / "results" / runs[rung].run_id) == ([None], [""])


@pytest.mark.parametrize("change", ["bench.osl=5", "bench.isl=9"])
def test_runs_of_another_load_are_shown_together_and_not_compared(cluster: Cluster, change: str) -> None:
    (other,) = cluster.json("submit", "small", "--set", change)["runs"]
    runs = [cluster.submitted(), RunDir(cluster.runs_dir / other["run_id"])]
    for run in runs:
        keep_row(run, some_row(run_id=run.run_id))
    document = cluster.json("collect", *(run.run_id for run in runs))
    assert [row["ratio"] for row in document["rows"]] == [1.0, None]
    assert [run["verdict"]["ratio"] for run in document["runs"]] == [None, None]
    told = cluster("collect", *(run.run_id for run in runs)).stderr
    assert f"note: {runs[1].run_id} is not compared with {runs[0].run_id}" in told
    assert cluster.json("compare", *(run.run_id for run in runs))["factors"] is None
    assert "no ratio: the load was another" in cluster("compare", *(run.run_id for run in runs)).stdout


def kept_ratios(folder: Path) -> tuple[list[float | None], list[str]]:
    """The ratios in ``results.json`` and in ``results.csv``."""
    document = json.loads((folder / "results.json").read_text())
    with open(folder / "results.csv", encoding="utf-8") as file:
        return [row["ratio"] for row in document["rows"]], [row["ratio"] for row in csv.DictReader(file)]


def test_a_run_that_is_named_twice_is_collected_once(cluster: Cluster) -> None:
    first, second = cluster.submitted(), cluster.submitted()
    for run in (first, second):
        keep_row(run, some_row(run_id=run.run_id))
    document = cluster.json("collect", second.run_id, "101", "103", first.run_id)
    assert [run["run_id"] for run in document["runs"]] == [second.run_id, first.run_id]
    assert [row["run_id"] for row in document["rows"]] == [second.run_id, first.run_id]


def test_one_rung_is_cancelled_and_the_others_stay(cluster: Cluster) -> None:
    runs = ladder(cluster)
    document = cluster.json("cancel", runs[1].run_id)
    assert [(run["run_id"], run["state"]) for run in document["runs"]] == [(runs[1].run_id, "cancelled")]
    assert [run["state"] for run in cluster.json("status")["runs"]].count("cancelled") == 1


def test_who_cancels_a_rung_is_told_which_are_still_to_come(cluster: Cluster) -> None:
    runs = ladder(cluster)
    result = cluster("cancel", runs[0].run_id)
    assert result.stdout == f"{runs[0].run_id}: cancelled\n"
    assert result.stderr == f"still to come: {runs[1].run_id}, {runs[2].run_id} (--ladder ends them too)\n"
    assert cluster("cancel", runs[2].run_id).stderr == ""
    assert cluster("cancel", cluster.submitted().run_id).stderr == ""
    assert cluster("cancel", "--ladder", runs[1].run_id).stderr == ""


def test_a_whole_ladder_is_cancelled_by_any_of_its_rungs(cluster: Cluster) -> None:
    runs = ladder(cluster)
    runs[0].record("serve", "done", reason="2 points")
    result = cluster("cancel", "--ladder", runs[2].run_id)
    assert result.stdout.splitlines() == [
        f"{runs[0].run_id}: done", f"{runs[1].run_id}: cancelled", f"{runs[2].run_id}: cancelled"]
    assert [call[1] for call in cluster.slurm.calls if call[0] == "scancel"] == ["106", "105", "104", "103"]


def test_waiting_for_a_ladder_names_the_rung_that_went_wrong(
        cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(_: float) -> None:
        for run in runs.Runs(cluster.runs_dir, "here").newest(2):
            keep_row(run, some_row(run_id=run.run_id))
            first = run.job_ids()["serve"] == "101"
            run.record("serve", "done" if first else "failed", reason="that was it")

    monkeypatch.setattr("time.sleep", meanwhile)
    result = cluster("submit", "small", "small", "--wait", "--json", code=1)
    good, bad = json.loads(result.stdout)["runs"]
    assert (good["state"], bad["state"]) == ("done", "failed")
    assert f"error: {bad['run_id']}: failed\n" in result.stderr
    assert f"isambard-serve collect {bad['run_id']}\n" in result.stderr


def test_the_latest_run_needs_no_id(cluster: Cluster) -> None:
    assert "there are no runs yet\n  → isambard-serve submit RECIPE" in cluster("status", "latest", code=2).stderr
    run = cluster.submitted()
    assert cluster.json("status", "latest")["runs"][0]["run_id"] == run.run_id
    assert cluster.json("cancel", "latest")["runs"][0]["state"] == "cancelled"


def test_the_latest_of_a_ladder_is_the_rung_that_runs(cluster: Cluster) -> None:
    runs = ladder(cluster)
    assert cluster.json("status", "latest")["runs"][0]["run_id"] == runs[0].run_id
    runs[0].record("serve", "done")
    runs[1].record("serve", "started")
    assert cluster.json("status", "latest")["runs"][0]["run_id"] == runs[1].run_id
    assert [run["run_id"] for run in cluster.json("status")["runs"]] == [run.run_id for run in reversed(runs)]


def test_a_recipe_is_compared_with_another_in_the_engines_words(cluster: Cluster) -> None:
    result = cluster("diff", "tp4", "dp4")
    assert result.stdout.splitlines()[:2] == ["- --tensor-parallel-size 4", "+ --tensor-parallel-size 1"]
    assert result.stderr == "not shown without --all: description\n"
    everything = cluster("diff", "tp4", "dp4", "--all")
    assert "+ description: " in everything.stdout
    assert everything.stderr == ""
    document = cluster.json("diff", "tp4", "dp4")
    assert document["schema"] == "isambard-serve/diff/1"
    assert document["changes"][0] == {
        "key": "engine.args.tensor-parallel-size", "before": 4, "after": 1, "engine": True}


def test_a_submission_without_slurm_is_simulated_and_costs_nothing(
        user_file: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[RunDir]] = []
    monkeypatch.setattr("isambard_serve.controller.start", lambda found, *_: started.append(found))
    user_file("config.yaml", "site: sandbox")
    user_file("jobs/small.yaml", SMALL)
    result = CliRunner().invoke(main, ["submit", "small", "small"])
    assert result.exit_code == 0, result.output
    assert [line.partition(": ")[2] for line in result.stdout.splitlines()] == [", simulated"] * 2
    ((first, second),) = started
    assert first.path.parent == second.path.parent == tmp_path / "home/.local/share/isambard-serve/runs"
    assert "no send.sh" in CliRunner().invoke(main, ["render", "small", "--script", "send.sh"]).stderr


COMPLETED = {
    "bash": ({"COMP_WORDS": "isambard-serve {} dp", "COMP_CWORD": "2"}, ["plain,dp4", "plain,dp4-humming"]),
    "zsh": ({"COMP_WORDS": "isambard-serve {} dp", "COMP_CWORD": "2"},
            ["plain", "dp4", "_", "plain", "dp4-humming", "_"]),
    "fish": ({"COMP_WORDS": "isambard-serve {} dp", "COMP_CWORD": "dp"}, ["plain,dp4", "plain,dp4-humming"]),
}


@pytest.mark.parametrize("command", ["show", "diff", "plan", "render", "submit"])
@pytest.mark.parametrize("shell", COMPLETED)
def test_a_shell_completes_the_recipes_that_there_are(shell: str, command: str) -> None:
    env, words = COMPLETED[shell]
    env = {name: value.format(command) for name, value in env.items()}
    result = CliRunner().invoke(main, [], prog_name="isambard-serve",
                                env={**env, "_ISAMBARD_SERVE_COMPLETE": f"{shell}_complete"})
    assert [line for line in result.stdout.splitlines() if line] == words


@pytest.mark.parametrize("command", ["plan", "render", "submit", "status", "collect", "cancel", "logs"])
def test_a_shell_completes_the_sites_that_there_are(user_file: Write, command: str) -> None:
    user_file("sites/is-mine.yaml", "")
    env = {"COMP_WORDS": f"isambard-serve {command} --site is", "COMP_CWORD": "3",
           "_ISAMBARD_SERVE_COMPLETE": "bash_complete"}
    result = CliRunner().invoke(main, [], prog_name="isambard-serve", env=env)
    assert result.stdout.split() == ["plain,is-mine", "plain,isambard-ai"]


@pytest.mark.parametrize("shell", COMPLETED)
def test_the_completion_for_a_shell_is_a_script_that_asks_this_program(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert f"_ISAMBARD_SERVE_COMPLETE={shell}_complete" in result.stdout
    assert "isambard-serve" in result.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=result.stdout, text=True, check=True)
    assert CliRunner().invoke(main, ["completion", "csh"]).exit_code == 2


def test_doctor_says_what_is_wrong_and_how_to_mend_it_and_ends_with_1(
        cluster: Cluster, user_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "open_slurm", lambda _: None)
    text = PRETEND.read_text().replace("/shared/runs", "/proc/runs")
    user_file("sites/wrong.yaml", text.replace("scheduler: slurm", "scheduler: local"))
    result = cluster("doctor", "nonsense", "--site", "wrong", code=1)
    assert "FAIL  runs_dir: /proc/runs cannot be written: " in result.stdout
    assert "/sites/wrong.yaml another runs_dir\n" in result.stdout
    assert "FAIL  recipe nonsense: " in result.stdout
    assert "checks failed: recipe nonsense, runs_dir\n" in result.stderr
    document = cluster.json("doctor", "--site", "nonsense", code=1)
    assert document["schema"] == "isambard-serve/doctor/1"
    assert [(check["name"], check["state"]) for check in document["checks"]] == [("site", "fail")]


def test_doctor_finds_nothing_wrong_with_the_sandbox(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "open_slurm", lambda _: None)
    result = cluster("doctor", "small", "--site", "sandbox")
    assert "FAIL" not in result.stdout
    assert cluster("doctor", "--site", "sandbox").stderr.startswith("no recipe was named")
    assert cluster.slurm.calls == []


def test_a_server_for_people_is_one_job_that_measures_nothing(cluster: Cluster) -> None:
    (run,) = cluster.json("submit", "small", "--serve")["runs"]
    assert (run["jobs"], run["points_planned"], run["url"]) == ({"serve": "101"}, 0, None)
    assert cluster.slurm.commands() == ["sbatch"]
    script = (cluster.runs_dir / run["run_id"] / "serve.sbatch").read_text()
    assert '--host "${host:?}"' in script
    assert "--middleware isambard_serve_inengine.guard.Guard" in script
    (plan,) = cluster.json("submit", "small", "--serve", "--dry-run")["plans"]
    assert (plan["placement"], plan["limits"]["idle_s"]) == ("none", 7200)


def test_who_waits_for_a_server_for_people_is_told_where_it_answers_once_it_does(
        cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(_: float) -> None:
        (run,) = runs.Runs(cluster.runs_dir, "here").newest(1)
        ready(run, "http://10.253.0.1:4711")

    monkeypatch.setattr("time.sleep", meanwhile)
    result = cluster("submit", "small", "--serve", "--wait")
    assert "  http://10.253.0.1:4711, key in " in result.stdout
    monkeypatch.setattr("time.sleep", lambda _: runs.Runs(cluster.runs_dir, "here").newest(1)[0].record(
        "serve", "failed", reason="it died"))
    assert ": failed\n" in cluster("submit", "small", "--serve", "--wait", code=1).stderr


@pytest.mark.parametrize("words", [["small", "small"], ["--resume", "101"]])
def test_people_are_served_by_one_recipe_from_its_beginning(cluster: Cluster, words: list[str]) -> None:
    assert "--serve: one recipe is served at a time" in cluster("submit", "--serve", *words, code=2).stderr


@pytest.mark.parametrize(("words", "end", "why"), [
    ([], None, "has not ended: it is submitted"), ([], "measuring", "has not ended: it is measuring"),
    (["--serve"], "cancelled", "was to measure no points"),
    (["--profile-at", "2"], "failed", "was to measure no points"),
])
def test_a_run_that_goes_on_or_has_no_points_is_not_resumed(
        cluster: Cluster, words: list[str], end: str | None, why: str) -> None:
    (run,) = cluster.json("submit", "small", *words)["runs"]
    if end:
        RunDir(cluster.runs_dir / run["run_id"]).record("serve", end)
    assert f"{run['run_id']}: {why}" in cluster("submit", "--resume", "101", code=2).stderr
    assert cluster.slurm.commands().count("sbatch") == len(run["jobs"])


def test_a_search_that_ended_without_a_knee_is_resumed(cluster: Cluster) -> None:
    (submitted,) = cluster.json("submit", "small", "--set", "bench.concurrency=saturate")["runs"]
    run = RunDir(cluster.runs_dir / submitted["run_id"])
    keep_row(run, some_row(valid=False))
    run.record("serve", "done")
    found = Found(knee=None, saturation=None, reason="no point was valid", scouts=1, points=1, gpu_s=1.0)
    for knee, code in ((None, 0), (1, 2)):
        write_whole(run.knee, msgspec.json.encode(msgspec.structs.replace(found, knee=knee)))
        result = cluster("submit", "--resume", run.run_id, "--dry-run", code=code)
        assert ("no point left" in result.stderr) == bool(code)


def lost(cluster: Cluster) -> RunDir:
    """A run with a valid point, whose engine has died."""
    run = cluster.submitted()
    keep_row(run, some_row(concurrency=2))
    run.record("serve", "failed", reason="it died")
    return run


def test_a_lost_run_is_resumed_in_no_more_time_than_is_asked_for(cluster: Cluster) -> None:
    run = lost(cluster)
    assert cluster("submit", "--resume", run.run_id, "--time", "1h", "--dry-run").exit_code == 0


@pytest.mark.parametrize(("before", "after", "named"), [
    ("isl: 8", "isl: 9", "isl, bench_argv"), ("args: {}", "args: {max-num-seqs: 32}", "engine_argv"),
    ("prompts_per_concurrency: 2", "prompts_per_concurrency: 3", "points")])
def test_rows_are_not_mixed_with_those_of_a_recipe_that_was_edited(
        cluster: Cluster, before: str, after: str, named: str) -> None:
    run = lost(cluster)
    text = run.lock.read_text()
    assert before in text
    run.lock.write_text(text.replace(before, after, 1))
    assert f"was measured with other values of {named} than" in cluster("submit", "--resume", run.run_id, code=2).stderr


def test_rows_are_not_mixed_with_those_of_a_site_that_was_edited(cluster: Cluster, user_file: Write) -> None:
    run = lost(cluster)
    site = PRETEND.read_text().replace("/shared/runs", str(cluster.runs_dir))
    user_file("sites/here.yaml", f"{site}\nset: {{VLLM_USE_X: '1'}}\n")
    assert "other values of environment" in cluster("submit", "--resume", run.run_id, code=2).stderr


def test_a_run_is_resumed_where_it_was_measured(cluster: Cluster, tmp_path: Path) -> None:
    run = lost(cluster)
    copy = shutil.copytree(run.path, tmp_path / "elsewhere" / run.run_id)
    assert "lies elsewhere" in cluster("submit", "--resume", str(copy), code=2).stderr


def test_a_limit_of_node_hours_that_is_no_number_allows_nothing(cluster: Cluster) -> None:
    assert "more than nan" in cluster("submit", "small", "--dry-run", "--max-node-hours", "nan", code=1).stderr


def test_doctor_looks_at_the_way_to_a_login_node_first_and_at_the_rest_there(
        cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    result = cluster("doctor", "--host", "no such host", code=1)
    assert result.stdout == "FAIL  login: --host: 'no such host' is no name of a host\n"
    (check,) = cluster.json("doctor", "--host", "no such host", code=1)["checks"]
    assert (check["name"], check["state"]) == ("login", "fail")

    asked: list[list[str]] = []

    def relay(alias: str, words: list[str], **_: object) -> int:
        asked.append([alias, *words])
        return 1

    monkeypatch.setattr(doctor, "way", lambda _: [doctor.Check(name="login", state="ok", found="me@there")])
    monkeypatch.setattr(remote, "relay", relay)
    assert cluster("doctor", "small", "--host", "there", code=1).stdout == "ok    login: me@there\n"
    assert asked == [["there", "doctor", "--site=here", "--", "small"]]


@pytest.fixture
def people(cluster: Cluster) -> RunDir:
    """A server for people, which is ready."""
    (run,) = cluster.json("submit", "small", "--serve")["runs"]
    served = RunDir(cluster.runs_dir / run["run_id"])
    ready(served)
    return served


def test_a_server_for_people_is_asked_for_points_and_for_further_repeats_of_them(
        cluster: Cluster, people: RunDir) -> None:
    keep_row(people, some_row(concurrency=2, repeat=1))
    document = cluster.json("sweep", "101", "--concurrency", "2,4")
    assert (document["run"]["run_id"], document["points"]) == (people.run_id, ["c0002.r2", "c0004.r1"])
    assert document["run"]["points_planned"] == 2
    again = cluster("sweep", "101")
    assert again.stdout == f"{people.run_id}: c0001.r1, c0002.r3\n"
    points = asked.read(people)
    assert [(point.concurrency, point.prompts) for point in points] == [(2, 4), (4, 8), (1, 2), (2, 4)]
    assert len({point.seed for point in points}) == 4


@pytest.mark.parametrize("words", ["", "0", "1,", "1;2", "two", "-1", "1000001", "9" * 5000])
def test_what_is_no_concurrency_is_asked_of_nobody(cluster: Cluster, people: RunDir, words: str) -> None:
    if words:
        assert "no list of concurrencies" in cluster("sweep", "101", f"--concurrency={words}", code=2).stderr
    assert asked.read(people) == []


def test_a_server_that_searches_is_told_where_to_measure(cluster: Cluster) -> None:
    cluster("submit", "small", "--serve", "--set", "bench.concurrency=saturate")
    assert "name where to measure" in cluster("sweep", "101", code=2).stderr
    assert cluster.json("sweep", "101", "--concurrency", "8")["points"] == ["c0008.r1"]


def test_a_server_that_ends_with_its_sweep_is_not_measured_again(cluster: Cluster) -> None:
    cluster.submitted()
    assert "submit --serve starts one that stays" in cluster("sweep", "101", code=2).stderr


def test_a_server_that_has_ended_is_not_measured(cluster: Cluster, people: RunDir) -> None:
    people.record("serve", "done")
    assert "its server has ended: done" in cluster("sweep", "101", code=1).stderr
