"""The sweep's job: it waits for the engine, measures, and says how it went, whatever happens."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from isambard_serve import asked, knee, points, sweep
from isambard_serve.claim import Claim, newest
from isambard_serve.engine import EngineClient
from isambard_serve.errors import NotReadyError, ServeError
from isambard_serve.outcome import Found
from isambard_serve.plan import Plan
from isambard_serve.points import EngineGoneError
from isambard_serve.records import Event, Writer
from isambard_serve.run import RunDir, read_record, write_whole
from isambard_serve.site import Container
from tests.support.waiting import wait_until
from tests.unit.fake_engine import FakeEngine
from tests.unit.helpers import (
    HERE,
    Stubs,
    answering,
    good_bench,
    keep_row,
    pretend_site,
    ready,
    small_plan,
    some_row,
    submitted,
    written_run,
)

SRUN = """\
printf '%s\\n' "$*" >> "$RECORD/srun"; env > "$RECORD/environ"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
BENCH = """\
while [ "$1" != --num-prompts ]; do shift; done
sed "s/PROMPTS/$2/; s/TOKENS/$(($2 * 4))/g" "$RECORD/result.json" > "${9}/bench.json"
"""
PYTHON = """\
PYTHONPATH=$RECORD exec {python} "$1" script_as_benchmark
"""
SCRIPT_AS_BENCHMARK = """\
import argparse, asyncio, os, sys

class FlexibleArgumentParser:
    def parse_args(self, words):
        return argparse.Namespace(words=words)

def add_cli_args(parser):
    pass

async def main_async(args):
    script = await asyncio.create_subprocess_exec(os.environ["VLLM"], *args.words)
    try:
        code = await script.wait()
    except asyncio.CancelledError:
        script.kill()
        raise
    if code:
        sys.exit(code)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often."""
    monkeypatch.setattr(sweep, "TICK_S", 0.02)
    monkeypatch.setattr(points, "TICK_S", 0.02)
    monkeypatch.setattr(points, "PROOF_S", 0.0)


@pytest.fixture
def run(tmp_path: Path, stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run whose load generator and whose Slurm are stubs that keep their records beside it."""
    (tmp_path / "result.json").write_text(
        json.dumps({**good_bench(0), "median_e2el_ms": 60_000.0, "completed": "C", "total_output_tokens": "T",
                    "duration": 1.0, "output_throughput": "T"})
        .replace('"C"', "PROMPTS").replace('"T"', "TOKENS"))
    stubs.add("srun", SRUN)
    stubs.add("squeue", 'echo "$SQUEUE"')
    stubs.add("sacct", "true")
    monkeypatch.setenv("RECORD", str(tmp_path))
    monkeypatch.setenv("SQUEUE", "")
    monkeypatch.setenv("SLURM_JOB_ID", "102")
    # The stub for the engine's benchmark, and beside it one for its interpreter, which imports the benchmark once.
    engine = Container(runtime="none", command=(str(stubs.add("vllm", BENCH)),))
    stubs.add("python3", PYTHON.format(python=sys.executable))
    (tmp_path / "script_as_benchmark.py").write_text(SCRIPT_AS_BENCHMARK)
    monkeypatch.setenv("VLLM", engine.command[0])
    site = pretend_site(container=engine, unset=("DROPPED",), set={"FROM_SITE": "x"})
    run = written_run(small_plan(tmp_path / "runs", site=site))
    write_whole(run.jobs, msgspec.json.encode(submitted()))
    write_whole(run.key, "secret")
    return run


def said(run: RunDir, writer: Writer = "sweep") -> list[Event]:
    """What ``writer`` has said, but for notes."""
    return [event for event in run.read_events([writer]) if event.event != "note"]


def test_a_sweep_measures_all_points_and_counts_the_valid_ones(run: RunDir, tmp_path: Path) -> None:
    ready(run)
    sweep.sweep(str(run.path))
    assert [event.event for event in said(run)] == ["waiting", "measuring", "point", "point", "finished"]
    assert said(run)[0].job_id == "102"
    assert said(run)[-1].reason == "2 points measured, 2 valid"
    (step,) = (tmp_path / "srun").read_text().splitlines()
    assert step.startswith("--jobid=101 --overlap ")
    assert f"python3 {run.client} vllm.benchmarks.serve" in step


def test_where_the_engine_cannot_be_imported_each_point_is_a_step_of_its_own(
        run: RunDir, tmp_path: Path, stubs: Stubs) -> None:
    stubs.add("python3", "exit 1")
    ready(run)
    sweep.sweep(str(run.path))
    assert said(run)[-1].reason == "2 points measured, 2 valid"
    _, *steps = (tmp_path / "srun").read_text().splitlines()
    assert len(steps) == 2
    assert all(step.startswith("--jobid=101 --overlap ") for step in steps)
    assert all("vllm bench serve" in step and "http://127.0.0.1:4711" in step for step in steps)
    (note,) = (event for event in run.read_events(["sweep"]) if event.event == "note")
    assert "each load is a command of its own" in str(note.reason)


def test_its_steps_get_the_key_and_the_engines_variables_and_nothing_of_slurms(
        run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROPPED", "x")
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "1")
    ready(run)
    sweep.sweep(str(run.path))
    given = (tmp_path / "environ").read_text().splitlines()
    assert {"OPENAI_API_KEY=secret", "FROM_SITE=x", "NO_COLOR=1"} <= set(given)
    assert not [line for line in given if line.startswith(("SLURM_", "DROPPED="))]


def test_a_sweep_waits_until_the_engine_is_ready(run: RunDir) -> None:
    run.record("serve", "loading")
    thread = threading.Thread(target=sweep.sweep, args=(str(run.path),))
    thread.start()
    wait_until(lambda: said(run), 10, "the sweep to begin", interval_s=0.01)
    assert [event.event for event in said(run)] == ["waiting"]
    ready(run)
    thread.join(10)
    assert said(run)[-1].event == "finished"


def test_an_engine_that_dies_before_it_is_ready_ends_the_sweep_which_is_no_cause_of_its_own(run: RunDir) -> None:
    run.record("serve", "failed", reason="out of memory")
    with pytest.raises(EngineGoneError, match="is not there any more: out of memory"):
        sweep.sweep(str(run.path))
    assert [event.event for event in said(run)] == ["waiting", "left"]


def test_a_cancelled_serve_job_sets_the_sweep_free_and_ends_it(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE", "101|CANCELLED|None")
    with pytest.raises(ServeError, match="CANCELLED"):
        sweep.sweep(str(run.path))
    assert said(run)[-1].event in ("left", "failed")


def test_an_engine_that_is_never_ready_is_given_up_after_its_load_limit(
        run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "START_GRACE_S", -1e6)
    with pytest.raises(NotReadyError, match="was not ready within 3600 s"):
        sweep.sweep(str(run.path))
    assert said(run)[-1].event == "failed"
    assert "load_limit" in str(said(run)[-1].reason)


def test_a_sweep_of_which_no_point_left_a_result_has_failed(
        run: RunDir, stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "PROOF_S", 60.0)
    stubs.add("vllm", "echo no such model >&2; exit 1")
    ready(run)
    with answering(run), pytest.raises(ServeError, match="no point left a result"):
        sweep.sweep(str(run.path))
    assert said(run)[-1].event == "failed"
    assert len(run.read_rows()) == 2
    assert "no such model" in (run.points / "c0001.r1" / "bench.log").read_text()


def test_one_bad_point_is_counted_as_not_valid(run: RunDir) -> None:
    keep_row(run, some_row(concurrency=1, valid=False, reasons=("none_failed",)))
    ready(run)
    sweep.sweep(str(run.path))
    assert said(run)[-1].reason == "2 points measured, 1 valid"


def test_a_sweep_whose_engine_goes_away_leaves_without_a_verdict(run: RunDir, stubs: Stubs) -> None:
    stubs.add("vllm", f"""echo '{{"time": 1, "writer": "serve", "event": "stopping"}}' >> {run.events}/serve.jsonl
                          exec sleep 60""")
    ready(run)
    with pytest.raises(EngineGoneError):
        sweep.sweep(str(run.path))
    assert [event.event for event in said(run)] == ["waiting", "measuring", "left"]


def test_a_sweep_that_comes_when_somebody_else_measures_leaves_quietly(run: RunDir, tmp_path: Path) -> None:
    Claim.take(run, "inside", "101", over=0)
    ready(run)
    sweep.sweep(str(run.path))
    assert [event.event for event in said(run)] == ["waiting", "left"]
    assert not (tmp_path / "srun").exists()


def test_measuring_inside_the_serve_job_needs_no_step(run: RunDir, tmp_path: Path) -> None:
    ready(run)
    sweep.inside(str(run.path), 0)
    assert [event.event for event in said(run, "inside")] == ["measuring", "point", "point", "finished"]
    assert newest(run) == 1
    assert not (tmp_path / "srun").exists()


@pytest.fixture
def people(run: RunDir) -> RunDir:
    """The run as a server for people, of which a point was asked."""
    plan = msgspec.structs.replace(read_record(run.plan, Plan), placement="none", points=())
    write_whole(run.plan, msgspec.json.encode(plan))
    asked.add(run, [4], 2)
    return run


def test_what_was_asked_of_a_server_for_people_is_measured_and_leaves_it_ready(people: RunDir) -> None:
    for claims in (1, 2):
        with FakeEngine() as engine:
            ready(people, engine.client().url)
            sweep.inside(str(people.path), claims - 1)
        assert newest(people) == claims
        asked.add(people, [4, 8], 2)
    assert [(event.event, event.point) for event in said(people, "inside")] == [
        ("measuring", None), ("point", "c0004.r1"), ("ready", None),
        ("measuring", None), ("point", "c0004.r2"), ("point", "c0008.r1"), ("ready", None)]


def test_a_search_whose_time_was_over_before_any_point_says_so(
        run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = Found(knee=None, saturation="plateau", reason="the budget is spent", scouts=4, points=0, gpu_s=163.0)
    monkeypatch.setattr(knee, "find", lambda *_: spent)
    loop: Any = SimpleNamespace(run=run, plan=SimpleNamespace(profile=None, search="some"))
    with pytest.raises(ServeError, match="no point was measured: after 4 scouts the budget is spent") as raised:
        sweep._work(loop, EngineClient("http://127.0.0.1:1", ""))
    assert raised.value.where == "bench.sweep_limit"


def test_a_sweep_that_fails_leaves_a_server_for_people_ready_and_says_why(
        people: RunDir, stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "PROOF_S", 60.0)
    stubs.add("vllm", "exit 1")
    ready(people)
    with answering(people), pytest.raises(ServeError, match="no point left a result"):
        sweep.inside(str(people.path), 0)
    assert [event.event for event in said(people, "inside")] == ["measuring", "point", "ready"]
    assert "no point left a result" in str(said(people, "inside")[-1].reason)


def test_taking_over_goes_on_after_the_last_kept_point(run: RunDir) -> None:
    Claim.take(run, "sweep", "102", over=0)
    keep_row(run, some_row(concurrency=1))
    with FakeEngine() as engine:
        ready(run, engine.client().url)
        sweep.inside(str(run.path), 1)
    assert [(event.event, event.point) for event in said(run, "inside")] == [
        ("measuring", None), ("point", "c0002.r1"), ("finished", None)]
    assert newest(run) == 2


def test_a_sweep_that_comes_when_the_run_has_ended_leaves(run: RunDir, tmp_path: Path) -> None:
    ready(run)
    run.record("serve", "done", reason="2 points measured, 2 valid")
    with pytest.raises(EngineGoneError, match="is not there any more: 2 points measured"):
        sweep.sweep(str(run.path))
    assert [event.event for event in said(run)] == ["waiting", "left"]
    assert newest(run) == 0
    assert not (tmp_path / "srun").exists()


def test_a_sweep_that_loses_its_claim_while_it_measures_leaves_and_says_so(run: RunDir, stubs: Stubs) -> None:
    stubs.add("vllm", f"""echo '{{"holder": "inside", "job_id": null, "time": 1}}' > {run.claims}/0002.json
                          exec sleep 60""")
    ready(run)
    sweep.sweep(str(run.path))
    assert [event.event for event in said(run)] == ["waiting", "measuring", "left"]
    assert "has taken over" in str(said(run)[-1].reason)
    assert run.read_rows() == []


def test_a_sweep_whose_last_point_was_kept_after_it_lost_its_claim_does_not_say_that_it_has_finished(
        run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for concurrency in (1, 2):
        keep_row(run, some_row(concurrency=concurrency))
    ready(run)
    taken = Claim.take

    def take_and_lose(run: RunDir, holder: str, job_id: str | None, *, over: int) -> Claim:
        claim = taken(run, holder, job_id, over=over)
        taken(run, "inside", "101", over=over + 1)
        return claim

    monkeypatch.setattr(Claim, "take", take_and_lose)
    sweep.sweep(str(run.path))
    assert [event.event for event in said(run)] == ["waiting", "measuring", "left"]


def test_its_heart_beats_while_it_measures(run: RunDir, stubs: Stubs, tmp_path: Path) -> None:
    stubs.add("vllm", f"cp {run.claims}/0001.beat {tmp_path}/; {BENCH}")
    ready(run)
    sweep.sweep(str(run.path))
    assert (tmp_path / "0001.beat").read_text() == "0\n"


def test_taking_over_from_a_sweep_that_was_not_gone_after_all_is_no_failure(run: RunDir) -> None:
    Claim.take(run, "sweep", "102", over=0)
    ready(run)
    sweep.inside(str(run.path), 0)
    assert run.read_rows() == []
    assert [event.event for event in said(run, "inside")] == ["left"]


def test_an_engine_that_does_not_let_go_of_a_predecessors_requests_is_a_failure(
        run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "DRAIN_S", 0.05)
    Claim.take(run, "sweep", "102", over=0)
    with FakeEngine(metrics="vllm:num_requests_running 3\n") as engine:
        ready(run, engine.client().url)
        with pytest.raises(ServeError, match="still works on earlier requests"):
            sweep.inside(str(run.path), 1)
    assert [event.event for event in said(run, "inside")] == ["failed"]


def test_inside_the_serve_job_an_engine_that_goes_away_is_left_without_a_verdict(run: RunDir, stubs: Stubs) -> None:
    stubs.add("vllm", f"""echo '{{"time": 1, "writer": "serve", "event": "stopping"}}' >> {run.events}/serve.jsonl
                          exec sleep 60""")
    ready(run)
    with pytest.raises(EngineGoneError):
        sweep.inside(str(run.path), 0)
    assert [event.event for event in said(run, "inside")] == ["measuring", "left"]


def test_measuring_inside_is_a_program_that_ends_its_load_generator_when_it_is_asked_to_end(
        run: RunDir, stubs: Stubs) -> None:
    stubs.add("vllm", f"echo $$ > {run.path}/pid; exec sleep 60")
    ready(run)
    argv = [sys.executable, "-m", "isambard_serve.sweep", str(run.path), "0"]
    program = subprocess.Popen(argv, cwd=HERE.parents[1])
    try:
        pid = int(wait_until(lambda: (run.path / "pid").exists() and (run.path / "pid").read_text().strip(), 10,
                             "the load generator", interval_s=0.01))
        program.terminate()
        assert program.wait(10) == 1
    finally:
        program.kill()
        program.wait()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 10,
               "the load generator's end", interval_s=0.01)
    assert [event.event for event in said(run, "inside")] == ["measuring"]


def test_the_program_takes_over_the_claim_that_it_is_told(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int]] = []
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sweep, "inside", lambda run_dir, over: told.append((run_dir, over)))
    monkeypatch.setattr("sys.argv", ["sweep", str(run.path), "3"])
    try:
        sweep.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [(str(run.path), 3)]


def test_a_sweep_whose_engine_gives_no_sign_of_life_leaves_the_verdict_to_slurm(run: RunDir, stubs: Stubs) -> None:
    stubs.add("vllm", "exit 1")
    ready(run)
    with pytest.raises(EngineGoneError, match="no sign of life"):
        sweep.sweep(str(run.path))
    assert [event.event for event in said(run)] == ["waiting", "measuring", "left"]
    assert run.read_rows() == []


def test_inside_the_serve_job_an_engine_of_whose_end_the_watcher_says_nothing_is_a_failure(
        run: RunDir, stubs: Stubs) -> None:
    stubs.add("vllm", "exit 1")
    ready(run)
    with pytest.raises(EngineGoneError, match="no sign of life"):
        sweep.inside(str(run.path), 0)
    assert [event.event for event in said(run, "inside")] == ["measuring", "failed"]
    assert "no sign of life" in str(said(run, "inside")[-1].reason)
