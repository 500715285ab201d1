"""The loop over the points: each is kept at once, none outlives its limit, and nothing is measured on a dead engine."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from isambard_serve import points
from isambard_serve.plan import Plan
from isambard_serve.points import EngineGoneError
from isambard_serve.records import Row
from isambard_serve.run import RunDir, append_line
from tests.unit.helpers import good_bench, keep_row, small_plan, some_row, some_sample, written_run


class Bench:
    """Starts a shell script in the place of the load generator, which finds its result's folder as ``$1``."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.commands: list[list[str]] = []
        self.environments: list[Mapping[str, str]] = []
        self.children: list[subprocess.Popen[bytes]] = []

    def __call__(self, argv: list[str], *, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start it, as :func:`isambard_serve.process.start` would."""
        self.commands.append(argv)
        self.environments.append(env)
        folder = argv[argv.index("--result-dir") + 1]
        with open(log, "ab") as output:
            self.children.append(subprocess.Popen(["bash", "-c", self.script, "bench", folder], stdout=output,
                                                  process_group=0))
        return self.children[-1]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and give little grace."""
    monkeypatch.setattr(points, "TICK_S", 0.02)
    monkeypatch.setattr(points, "STOP_GRACE_S", 1.0)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return small_plan(tmp_path)


@pytest.fixture
def run(plan: Plan) -> RunDir:
    return written_run(plan)


@pytest.fixture
def good(tmp_path: Path) -> Iterator[Bench]:
    """Leaves a good result for the point with concurrency 1 (two prompts)."""
    result = tmp_path / "result.json"
    result.write_text(json.dumps(good_bench(2)))
    bench = Bench(f'echo said; cp {result} "$1/bench.json"')
    yield bench
    assert all(child.poll() is not None for child in bench.children)


def measured(run: RunDir, plan: Plan, bench: Bench, at: int = 0) -> Row:
    return points.measure(run, plan, plan.points[at], serve_job="101", port="4711", env={"A": "1"}, start=bench)


def test_a_measured_point_is_kept_with_its_log_its_result_and_its_row(run: RunDir, plan: Plan, good: Bench) -> None:
    row = measured(run, plan, good)
    assert row.valid
    assert run.read_rows() == [row]
    folder = run.points / "c0001.r1"
    assert (folder / "bench.log").read_text() == "said\n"
    assert sorted(path.name for path in folder.iterdir()) == ["bench.json", "bench.log", "row.json"]


def test_the_load_generator_is_a_step_inside_the_serve_job_with_the_given_variables(
        run: RunDir, plan: Plan, good: Bench) -> None:
    measured(run, plan, good)
    ((*command,),) = good.commands
    assert command[:3] == ["srun", "--jobid=101", "--overlap"]
    assert "http://127.0.0.1:4711" in command
    assert good.environments == [{"A": "1"}]


def test_only_samples_from_its_own_time_count_for_a_point(run: RunDir, plan: Plan, good: Bench) -> None:
    append_line(run.samples, some_sample(time=time.time() - 60, kv_cache_usage=0.9))
    append_line(run.samples, some_sample(time=time.time() + 60, kv_cache_usage=0.5, preemptions_total=2))
    append_line(run.samples, some_sample(time=time.time() + 61, kv_cache_usage=0.4, preemptions_total=5))
    row = measured(run, plan, good)
    assert (row.kv_cache_usage_max, row.preemptions) == (0.5, 3)


def test_a_benchmark_that_fails_leaves_a_row_that_says_so(run: RunDir, plan: Plan) -> None:
    row = measured(run, plan, Bench("exit 3"))
    assert (row.valid, row.reasons) == (False, ("bench_ended",))
    assert run.read_rows() == [row]


def test_a_point_that_takes_longer_than_its_limit_is_ended_and_invalid(tmp_path: Path, good: Bench) -> None:
    plan = small_plan(tmp_path, {"bench": {"point_limit": "0s"}})
    run = written_run(plan)
    endless = Bench(f"{good.script}; sleep 60")
    began = time.monotonic()
    row = measured(run, plan, endless)
    assert time.monotonic() - began < 5
    assert (row.valid, "bench_ended" in row.reasons) == (False, True)
    assert endless.children[0].poll() is not None


@pytest.mark.parametrize(("event", "reason", "told"), [
    ("failed", "the engine died", "the engine died"), ("stopping", None, "stopping"), ("done", None, "done")])
def test_an_engine_that_goes_away_leaves_no_row_and_no_load_generator(
        run: RunDir, plan: Plan, event: str, reason: str | None, told: str) -> None:
    run.record("serve", "ready")
    run.record("serve", event, reason=reason)
    endless = Bench("sleep 60")
    with pytest.raises(EngineGoneError, match=f"while c0001.r1 was measured: {told}"):
        measured(run, plan, endless)
    assert endless.children[0].poll() is not None
    assert run.read_rows() == []
    assert (run.points / "c0001.r1" / "bench.log").exists()


def test_all_points_are_measured_in_order_and_each_is_told(run: RunDir, plan: Plan, good: Bench) -> None:
    rows = points.measure_all(run, plan, serve_job="101", port="1", env={}, start=good)
    assert [row.concurrency for row in rows] == [1, 2]
    assert [(event.event, event.point) for event in run.read_events(["sweep"])] == [
        ("point", "c0001.r1"), ("point", "c0002.r1")]


def test_points_that_were_kept_before_are_not_measured_again(run: RunDir, plan: Plan, good: Bench) -> None:
    kept = some_row(concurrency=1, output_tok_s=1.0)
    keep_row(run, kept)
    rows = points.measure_all(run, plan, serve_job="101", port="1", env={}, start=good)
    assert [row.concurrency for row in rows] == [2]
    assert run.read_rows() == [kept, *rows]


def test_points_that_were_kept_stay_when_the_engine_goes_away_later(run: RunDir, plan: Plan, good: Bench) -> None:
    dying = Bench(f"""{good.script}
        [[ $1 == */c0002.r1 ]] && echo '{{"time": 1, "writer": "serve", "event": "failed"}}' >> {run.events}/serve.jsonl
        true""")
    with pytest.raises(EngineGoneError):
        points.measure_all(run, plan, serve_job="101", port="1", env={}, start=dying)
    assert [row.concurrency for row in run.read_rows()] == [1]


def test_a_serve_job_that_has_said_nothing_of_its_end_goes_on(run: RunDir) -> None:
    assert points.serve_end(run) is None
    run.record("serve", "ready")
    run.record("serve", "note", reason="healthy, but no completion yet")
    assert points.serve_end(run) is None
