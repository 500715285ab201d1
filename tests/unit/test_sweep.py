"""The sweep's job: it waits for the engine, measures, and says how it went, whatever happens."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import msgspec
import pytest

from isambard_serve import points, sweep
from isambard_serve.errors import NotReadyError, ServeError
from isambard_serve.points import EngineGoneError
from isambard_serve.records import Endpoint, Event
from isambard_serve.run import RunDir, write_whole
from isambard_serve.site import Container
from tests.support.waiting import wait_until
from tests.unit.helpers import Stubs, good_bench, keep_row, pretend_site, small_plan, some_row, submitted, written_run

SRUN = """\
printf '%s\\n' "$*" >> "$RECORD/srun"; env > "$RECORD/environ"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
BENCH = """\
while [ "$1" != --num-prompts ]; do shift; done
sed "s/PROMPTS/$2/; s/TOKENS/$(($2 * 4))/" "$RECORD/result.json" > "${8}/bench.json"
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often."""
    monkeypatch.setattr(sweep, "TICK_S", 0.02)
    monkeypatch.setattr(points, "TICK_S", 0.02)


@pytest.fixture
def run(tmp_path: Path, stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run whose load generator and whose Slurm are stubs that keep their records beside it."""
    (tmp_path / "result.json").write_text(
        json.dumps({**good_bench(0), "completed": "C", "total_output_tokens": "T"})
        .replace('"C"', "PROMPTS").replace('"T"', "TOKENS"))
    stubs.add("srun", SRUN)
    stubs.add("squeue", 'echo "$SQUEUE"')
    stubs.add("sacct", "true")
    monkeypatch.setenv("RECORD", str(tmp_path))
    monkeypatch.setenv("SQUEUE", "")
    monkeypatch.setenv("SLURM_JOB_ID", "102")
    engine = Container(runtime="none", command=(str(stubs.add("vllm", BENCH)),))
    site = pretend_site(container=engine, unset=("DROPPED",), set={"FROM_SITE": "x"})
    run = written_run(small_plan(tmp_path / "runs", site=site))
    write_whole(run.jobs, msgspec.json.encode(submitted()))
    write_whole(run.key, "secret")
    return run


def ready(run: RunDir) -> None:
    """The engine says that it is ready."""
    run.record("serve", "ready", job_id="101")
    write_whole(run.endpoint, msgspec.json.encode(Endpoint(
        url="http://127.0.0.1:4711", model="small-model", node="n", job_id="101", key_file=str(run.key))))


def said(run: RunDir) -> list[Event]:
    return run.read_events(["sweep"])


def test_a_sweep_measures_all_points_and_counts_the_valid_ones(run: RunDir, tmp_path: Path) -> None:
    ready(run)
    assert sweep.sweep(str(run.path)) == 2
    assert [event.event for event in said(run)] == ["waiting", "measuring", "point", "point", "finished"]
    assert said(run)[0].job_id == "102"
    assert said(run)[-1].reason == "2 points measured, 2 valid"
    steps = (tmp_path / "srun").read_text().splitlines()
    assert len(steps) == 2
    assert all(step.startswith("--jobid=101 --overlap ") for step in steps)
    assert all("http://127.0.0.1:4711" in step for step in steps)


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
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(sweep.sweep(str(run.path))))
    thread.start()
    wait_until(lambda: said(run), 10, "the sweep to begin", interval_s=0.01)
    assert [event.event for event in said(run)] == ["waiting"]
    ready(run)
    thread.join(10)
    assert results == [2]


def test_an_engine_that_dies_before_it_is_ready_ends_the_sweep_which_is_no_cause_of_its_own(run: RunDir) -> None:
    run.record("serve", "failed", reason="out of memory")
    with pytest.raises(EngineGoneError, match="never became ready: out of memory"):
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


def test_a_sweep_of_which_no_point_left_a_result_has_failed(run: RunDir, stubs: Stubs) -> None:
    stubs.add("vllm", "echo no such model >&2; exit 1")
    ready(run)
    with pytest.raises(ServeError, match="no point left a result"):
        sweep.sweep(str(run.path))
    assert said(run)[-1].event == "failed"
    assert len(run.read_rows()) == 2
    assert "no such model" in (run.points / "c0001.r1" / "bench.log").read_text()


def test_one_bad_point_is_counted_as_not_valid(run: RunDir) -> None:
    keep_row(run, some_row(concurrency=1, valid=False, reasons=("none_failed",)))
    ready(run)
    assert sweep.sweep(str(run.path)) == 1
    assert said(run)[-1].reason == "2 points measured, 1 valid"


def test_a_sweep_whose_engine_goes_away_leaves_without_a_verdict(run: RunDir, stubs: Stubs) -> None:
    stubs.add("vllm", f"""echo '{{"time": 1, "writer": "serve", "event": "stopping"}}' >> {run.events}/serve.jsonl
                          exec sleep 60""")
    ready(run)
    with pytest.raises(EngineGoneError):
        sweep.sweep(str(run.path))
    assert [event.event for event in said(run)] == ["waiting", "measuring", "left"]
