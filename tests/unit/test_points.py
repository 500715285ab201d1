"""The loop over the points: each is kept at once, none outlives its limit, and nothing is measured on a dead engine."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isambard_serve import bench, points, process
from isambard_serve.claim import Claim, SupersededError, newest
from isambard_serve.client import Client
from isambard_serve.errors import ServeError
from isambard_serve.plan import Plan, Point
from isambard_serve.points import EngineGoneError, Loop
from isambard_serve.records import ClientFacts, Row, Sample, Writer
from isambard_serve.run import RunDir, append_line, read_lines
from tests.unit.fake_engine import FakeEngine
from tests.unit.helpers import answering, good_bench, keep_row, small_plan, some_row, some_sample, written_run

SUPERSEDE = """echo '{{"holder": "inside", "job_id": null, "time": 1}}' > {run.claims}/0002.json"""


class Script:
    """A load that a shell script stands for."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.child = child
        self.facts: ClientFacts | None = None
        self.counters: tuple[Sample, Sample] | None = None

    def ended(self, within_s: float) -> int | None:
        """How it ended, if it has."""
        return process.ended(self.child, within_s)

    def stop(self) -> None:
        """End it."""
        process.stop(self.child, 1.0)


class Bench(Client):
    """Starts a shell script in the place of each load, which finds its result's folder as ``$1``."""

    def __init__(self, script: str, **told: Any) -> None:
        self.script = script
        self.told = told
        self.commands: list[list[str]] = []
        self.logs: list[Path] = []
        self.children: list[subprocess.Popen[bytes]] = []

    def settled(self, within_s: float) -> bool:
        """Always, at once."""
        return True

    def start_point(self, words: Sequence[str], log: Path) -> Script:
        """Start it."""
        self.commands.append([*words])
        self.logs.append(log)
        folder = words[words.index("--result-dir") + 1] if "--result-dir" in words else ""
        with open(log, "ab") as output:
            self.children.append(subprocess.Popen(["bash", "-c", self.script, "bench", folder], stdout=output,
                                                  process_group=0))
        script = Script(self.children[-1])
        for name, value in self.told.items():
            setattr(script, name, value)
        return script


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and give little grace."""
    monkeypatch.setattr(points, "TICK_S", 0.02)
    monkeypatch.setattr(points, "PROOF_S", 0.0)
    monkeypatch.setattr(points, "OUTLIVED_S", 0.0)
    monkeypatch.setattr(points, "DRAIN_S", 0.1)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return small_plan(tmp_path)


@pytest.fixture
def run(plan: Plan) -> RunDir:
    return written_run(plan)


@pytest.fixture
def living(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The run's engine outlives all that goes wrong."""
    monkeypatch.setattr(points, "PROOF_S", 60.0)
    with answering(run):
        yield


@pytest.fixture
def good(tmp_path: Path) -> Iterator[Bench]:
    """Leaves a good result for the point with concurrency 1 (two prompts)."""
    result = tmp_path / "result.json"
    result.write_text(json.dumps(good_bench(2)))
    bench = Bench(f'echo said; cp {result} "$1/bench.json"')
    yield bench
    assert all(child.poll() is not None for child in bench.children)


def loop(run: RunDir, plan: Plan, bench: Bench) -> Loop:
    """The loop of a sweep that has just claimed the points."""
    return Loop(run, plan, Claim.take(run, "sweep", "102", over=newest(run)), writer="sweep", client=bench,
                node="nid001", url="http://127.0.0.1:4711")


def measured(run: RunDir, plan: Plan, bench: Bench, at: int = 0) -> Row:
    return loop(run, plan, bench).measure(plan.points[at])


def test_a_measured_point_is_kept_with_its_log_its_result_and_its_row(run: RunDir, plan: Plan, good: Bench) -> None:
    row = measured(run, plan, good)
    assert row.valid
    assert run.read_rows() == [row]
    folder = run.points / "c0001.r1"
    assert (folder / "bench.log").read_text() == "said\n"
    assert sorted(path.name for path in folder.iterdir()) == ["bench.json", "bench.log", "row.json"]


@pytest.mark.usefixtures("living")
def test_what_the_client_tells_is_kept_beside_the_result_and_bounds_the_window(
        run: RunDir, plan: Plan, good: Bench) -> None:
    now = time.time()
    before, after = (some_sample(time=now + at, prefix_cache_queries_total=at, preemptions_total=at) for at in (0, 10))
    for at in (-1, 5, 11):
        append_line(run.samples, some_sample(time=now + at, kv_cache_usage=0.3 if at == 5 else 0.9))
    good.told = {"facts": ClientFacts(cpu_share=0.4, loop_lag_p99_ms=2.5), "counters": (before, after)}
    row = measured(run, plan, good)
    assert (row.kv_cache_usage_max, row.preemptions) == (0.3, 10)
    folder = run.points / "c0001.r1"
    assert json.loads((folder / "client.json").read_text()) == {"cpu_share": 0.4, "loop_lag_p99_ms": 2.5}
    assert read_lines(folder / "counters.jsonl", Sample) == [before, after]


def swept(tmp_path: Path, bench: Bench, over: dict[str, Any]) -> RunDir:
    """A run with a warm-up that was measured to its end."""
    plan = small_plan(tmp_path, {"bench": {"warmup": 3, **over}})
    run = written_run(plan)
    with answering(run):
        loop(run, plan, bench).measure_all(plan.points)
    return run


def test_the_engine_is_warmed_up_with_long_prompts_and_with_the_largest_concurrency_before_the_first_point(
        tmp_path: Path, good: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "PROOF_S", 60.0)
    swept(tmp_path, good, {"concurrency": [1, 200], "isl": 500})
    flags = [dict(pairwise(command)) for command in good.commands]
    assert [(flag["--num-prompts"], flag["--max-concurrency"], flag["--random-output-len"]) for flag in flags] == [
        ("16", "16", "3"), ("200", "200", "3"), ("2", "1", "4"), ("400", "200", "4")]
    assert [flag["--random-input-len"] for flag in flags] == ["500", "64", "500", "500"]
    assert ["--save-result" in command for command in good.commands] == [False, False, True, True]
    assert len(set(seeds(good))) == 4
    assert [log.name for log in good.logs] == ["warmup.log"] * 2 + ["bench.log"] * 2


def test_a_run_with_nothing_left_to_measure_is_not_warmed_up(run: RunDir, plan: Plan, good: Bench) -> None:
    for concurrency in (1, 2):
        keep_row(run, some_row(concurrency=concurrency))
    loop(run, msgspec.structs.replace(plan, warmup_osl=3), good).measure_all(plan.points)
    assert good.commands == []


def test_a_warm_up_that_fails_is_no_reason_not_to_measure(tmp_path: Path, good: Bench) -> None:
    good.script = f'[ -n "$1" ] || exit 1; {good.script}'
    assert [row.valid for row in swept(tmp_path, good, {"concurrency": [1]}).read_rows()] == [True]


@pytest.mark.parametrize("settled", [False, True])
def test_an_engine_that_goes_away_while_the_client_gets_ready_is_not_waited_for_and_gets_no_load(
        run: RunDir, plan: Plan, settled: bool) -> None:
    class Slow(Bench):
        def settled(self, within_s: float) -> bool:
            run.record("serve", "failed", reason="the engine died")
            return settled

    slow = Slow("true")
    with pytest.raises(EngineGoneError, match="the engine died"):
        measured(run, plan, slow)
    assert slow.commands == []


@pytest.mark.usefixtures("living")
def test_only_samples_from_its_own_time_count_for_a_point(run: RunDir, plan: Plan, good: Bench) -> None:
    append_line(run.samples, some_sample(time=time.time() - 60, kv_cache_usage=0.9))
    append_line(run.samples, some_sample(time=time.time() + 60, kv_cache_usage=0.5, preemptions_total=2))
    append_line(run.samples, some_sample(time=time.time() + 61, kv_cache_usage=0.4, preemptions_total=5))
    row = measured(run, plan, good)
    assert (row.kv_cache_usage_max, row.preemptions) == (0.5, 3)


@pytest.mark.usefixtures("living")
def test_a_benchmark_that_fails_leaves_a_row_that_says_so(run: RunDir, plan: Plan) -> None:
    row = measured(run, plan, Bench("exit 3"))
    assert (row.valid, row.reasons) == (False, ("bench_ended",))
    assert run.read_rows() == [row]


def test_a_point_that_takes_longer_than_its_limit_is_ended_and_invalid(
        tmp_path: Path, good: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "PROOF_S", 60.0)
    plan = small_plan(tmp_path, {"bench": {"point_limit": "0s"}})
    run = written_run(plan)
    endless = Bench(f"{good.script}; sleep 60")
    began = time.monotonic()
    with answering(run):
        row = measured(run, plan, endless)
    assert time.monotonic() - began < 5
    assert (row.valid, "bench_ended" in row.reasons) == (False, True)
    assert endless.children[0].poll() is not None


@pytest.mark.parametrize(("event", "reason", "told"), [
    ("failed", "the engine died", "the engine died"), ("stopping", None, "stopping"), ("done", None, "done")])
def test_an_engine_that_goes_away_leaves_no_row_and_no_load_generator(
        run: RunDir, plan: Plan, event: str, reason: str | None, told: str) -> None:
    run.record("serve", "ready")
    line = json.dumps({"time": 1, "writer": "serve", "event": event, "reason": reason})
    endless = Bench(f"echo '{line}' >> {run.events}/serve.jsonl; sleep 60")
    with pytest.raises(EngineGoneError, match=f"while c0001.r1 was measured: {told}"):
        measured(run, plan, endless)
    assert endless.children[0].poll() is not None
    assert run.read_rows() == []
    assert (run.points / "c0001.r1" / "bench.log").exists()


@pytest.mark.usefixtures("living")
def test_all_points_are_measured_in_order_and_each_is_told(run: RunDir, plan: Plan, good: Bench) -> None:
    loop(run, plan, good).measure_all(plan.points)
    assert [row.concurrency for row in run.read_rows()] == [1, 2]
    assert [(event.event, event.point) for event in run.read_events(["sweep"])] == [
        ("point", "c0001.r1"), ("point", "c0002.r1")]


@pytest.mark.usefixtures("living")
def test_points_that_were_kept_before_are_not_measured_again(run: RunDir, plan: Plan, good: Bench) -> None:
    kept = some_row(concurrency=1, output_tok_s=1.0)
    keep_row(run, kept)
    loop(run, plan, good).measure_all(plan.points)
    assert len(good.commands) == 1
    assert [row.concurrency for row in run.read_rows()] == [1, 2]
    assert run.read_rows()[0] == kept


def test_points_that_were_kept_stay_when_the_engine_goes_away_later(run: RunDir, plan: Plan, good: Bench) -> None:
    dying = Bench(f"""{good.script}
        [[ $1 == */c0002.r1 ]] && echo '{{"time": 1, "writer": "serve", "event": "failed"}}' >> {run.events}/serve.jsonl
        true""")
    with pytest.raises(EngineGoneError):
        loop(run, plan, dying).measure_all(plan.points)
    assert [row.concurrency for row in run.read_rows()] == [1]


@pytest.mark.usefixtures("living")
def test_what_a_predecessor_left_of_a_point_is_not_this_measurement(run: RunDir, plan: Plan) -> None:
    folder = run.points / "c0001.r1"
    folder.mkdir()
    (folder / "bench.json").write_text(json.dumps(good_bench(2)))
    row = measured(run, plan, Bench("exit 0"))
    assert (row.valid, row.output_tok_s) == (False, None)


def test_a_superseded_claimant_stops_its_load_generator_and_keeps_nothing(run: RunDir, plan: Plan) -> None:
    endless = Bench(f"{SUPERSEDE.format(run=run)}; sleep 60")
    with pytest.raises(SupersededError):
        loop(run, plan, endless).measure_all(plan.points)
    assert endless.children[0].poll() is not None
    assert run.read_rows() == []


def test_a_claimant_that_is_superseded_while_its_load_generator_ends_keeps_nothing(
        run: RunDir, plan: Plan, good: Bench) -> None:
    late = Bench(f"{good.script}; {SUPERSEDE.format(run=run)}")
    with pytest.raises(SupersededError, match="has taken over"):
        measured(run, plan, late)
    assert run.read_rows() == []
    assert run.read_events(["sweep"]) == []


def test_a_claimant_that_is_superseded_just_before_it_would_write_keeps_nothing(
        run: RunDir, plan: Plan, good: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(*_: object, **__: object) -> Row:
        Claim.take(run, "inside", "101", over=1)
        return some_row()

    monkeypatch.setattr("isambard_serve.bench.row", judged)
    with pytest.raises(SupersededError, match="has taken over"):
        measured(run, plan, good)
    assert run.read_rows() == []
    assert run.read_events(["sweep"]) == []


def test_a_claimant_that_was_superseded_begins_no_other_point(run: RunDir, plan: Plan, good: Bench) -> None:
    measuring = loop(run, plan, good)
    Claim.take(run, "inside", "101", over=1)
    with pytest.raises(SupersededError):
        measuring.measure_all(plan.points)
    assert good.commands == []


def test_a_valid_point_needs_no_proof_that_its_engine_lives(
        run: RunDir, plan: Plan, good: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "PROOF_S", 60.0)
    began = time.monotonic()
    assert measured(run, plan, good).valid
    assert time.monotonic() - began < 30


def test_nor_does_one_that_is_not_valid_although_every_request_was_answered(
        tmp_path: Path, good: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "PROOF_S", 60.0)
    plan = small_plan(tmp_path, {"bench": {"min_window": "10h"}})
    began = time.monotonic()
    assert "window" in measured(written_run(plan), plan, good).reasons
    assert time.monotonic() - began < 30


def test_a_point_that_somebody_else_has_kept_stays_theirs(run: RunDir, plan: Plan, good: Bench) -> None:
    measuring = loop(run, plan, good)
    kept = some_row(concurrency=1, output_tok_s=1.0)
    keep_row(run, kept)
    with pytest.raises(SupersededError, match=r"somebody else has kept c0001\.r1"):
        measuring.measure(plan.points[0])
    assert run.read_rows() == [kept]


def test_a_point_that_went_wrong_because_the_engine_died_leaves_no_row(
        run: RunDir, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "PROOF_S", 10.0)
    line = run.path / "line"
    line.write_text('{"time": 1, "writer": "serve", "event": "failed", "reason": "the engine died"}\n')
    begun = run.path / "begun"
    later = f"""setsid sh -c 'touch {begun}; sleep 0.2; cat {line} >> {run.events}/serve.jsonl' &
                until [ -e {begun} ]; do sleep 0.01; done; exit 1"""
    with pytest.raises(EngineGoneError, match=r"c0001\.r1.*: the engine died"):
        measured(run, plan, Bench(later))
    assert run.read_rows() == []


def test_samples_of_an_engine_whose_death_is_not_yet_told_are_no_proof_that_it_lives(
        run: RunDir, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    # One hung in the dying engine, and the next one followed at once; the watcher tells only then.
    monkeypatch.setattr(points, "PROOF_S", 60.0)
    monkeypatch.setattr(points, "OUTLIVED_S", 60.0)
    result = run.path / "result.json"
    result.write_text(json.dumps(good_bench(2) | {"completed": 0, "failed": 2}))
    looks: list[int] = []

    def looked(*given: Any) -> Any:
        looks.append(0)
        if len(looks) in (3, 4, 5):
            append_line(run.samples, some_sample())
        if len(looks) == 8:
            run.record("serve", "failed", reason="the engine died")
        return read_lines(*given)

    monkeypatch.setattr(points, "read_lines", looked)
    with pytest.raises(EngineGoneError, match=r"c0001\.r1.*: the engine died"):
        measured(run, plan, Bench(f'cp {result} "$1/bench.json"'))
    assert run.read_rows() == []


def test_a_point_that_went_wrong_on_an_engine_that_still_answers_is_kept(
        run: RunDir, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "PROOF_S", 60.0)
    began = time.monotonic()
    with answering(run):
        row = measured(run, plan, Bench("exit 1"))
    assert time.monotonic() - began < 30
    assert run.read_rows() == [row]


def test_a_predecessors_load_generators_are_ended_and_no_others(
        run: RunDir, tmp_path: Path, child: Callable[..., subprocess.Popen[bytes]]) -> None:
    script = ("bash", "-c", "sleep 60; true", "bench", "serve", "--result-dir")
    left = child(*script, f"{run.points}/c0001.r1")
    staying = child("bash", "-c", "sleep 60; true", str(run.client), "vllm.benchmarks.serve")
    others = child(*script, f"{tmp_path}/another-run/points/c0001.r1")
    with FakeEngine() as engine:
        points.clear(run, engine.client())
    assert left.wait(10) != 0
    assert staying.wait(10) != 0
    assert others.poll() is None


@pytest.mark.parametrize("metrics", ["vllm:num_requests_running 3\n", "vllm:num_requests_waiting 1\n"])
def test_an_engine_that_does_not_let_go_of_earlier_requests_is_given_up(run: RunDir, metrics: str) -> None:
    with FakeEngine(metrics=metrics) as engine, pytest.raises(ServeError, match="still works on earlier"):
        points.clear(run, engine.client())


def test_a_serve_job_that_has_said_nothing_of_its_end_goes_on(run: RunDir) -> None:
    assert points.serve_end(run) is None
    run.record("serve", "ready")
    run.record("serve", "note", reason="healthy, but no completion yet")
    assert points.serve_end(run) is None


def seeds(bench: Bench) -> list[int]:
    """The seeds of the load generators that were started."""
    return [int(command[command.index("--seed") + 1]) for command in bench.commands]


def test_each_attempt_at_a_point_and_each_claimants_has_a_seed_of_its_own(
        run: RunDir, plan: Plan, good: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []
    words = bench.words

    def watched(plan: Plan, point: Point, *, url: str, folder: Path, attempt: int = 0) -> list[str]:
        attempts.append(attempt)
        return words(plan, point, url=url, folder=folder, attempt=attempt)

    monkeypatch.setattr("isambard_serve.bench.words", watched)
    monkeypatch.setattr(points, "PROOF_S", 60.0)
    empty = Bench("exit 3")
    with answering(run):
        measured(run, plan, empty)
        (run.points / "c0001.r1" / "row.json").unlink()
        measured(run, plan, good)  # whoever takes over
    assert attempts == [0, 1, 2, points.ATTEMPTS]
    assert len({*seeds(empty), *seeds(good)}) == 4


@pytest.mark.parametrize(("writer", "event"), [
    ("serve", "failed"), ("serve", "stopping"), ("serve", "done"), ("cancel", "cancelled")])
def test_no_load_generator_is_started_on_an_engine_that_has_gone(
        run: RunDir, plan: Plan, good: Bench, writer: Writer, event: str) -> None:
    run.record(writer, event)
    with pytest.raises(EngineGoneError, match=rf"c0001\.r1.*: {event}"):
        measured(run, plan, good)
    assert good.commands == []
    assert run.read_rows() == []


@pytest.mark.usefixtures("living")
def test_a_load_generator_that_left_no_result_is_tried_again_and_the_first_result_is_kept(
        run: RunDir, plan: Plan, good: Bench) -> None:
    good.script = f"""[ -e {run.path}/tried ] || {{ touch {run.path}/tried; exit 1; }}; {good.script}"""
    row = measured(run, plan, good)
    assert (row.valid, len(good.commands)) == (True, 2)
    assert run.read_rows() == [row]
    assert [event.reason for event in run.read_events(["sweep"])] == [None]


@pytest.mark.usefixtures("living")
def test_a_load_generator_that_never_leaves_a_result_is_given_up_after_its_attempts(run: RunDir, plan: Plan) -> None:
    empty = Bench("exit 3")
    measured(run, plan, empty)
    assert len(empty.commands) == points.ATTEMPTS
    (event,) = run.read_events(["sweep"])
    assert str(event.reason).startswith("the load generator ended with 3: ")


@pytest.mark.usefixtures("living")
def test_a_result_is_not_tried_for_again_however_bad_it_is(run: RunDir, plan: Plan, good: Bench) -> None:
    good.script += "; exit 3"
    assert not measured(run, plan, good).valid
    assert len(good.commands) == 1


def test_a_load_generator_that_hit_its_limit_is_not_tried_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "PROOF_S", 60.0)
    plan = small_plan(tmp_path, {"bench": {"point_limit": "0s"}})
    run = written_run(plan)
    endless = Bench("sleep 60")
    with answering(run):
        assert measured(run, plan, endless).reasons == ("bench_ended",)
    assert len(endless.commands) == 1


@pytest.mark.parametrize("samples", [0, 1])
def test_a_point_that_went_wrong_without_a_sign_that_its_engine_lives_leaves_no_row(
        run: RunDir, plan: Plan, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "PROOF_S", 0.1)
    append_line(run.samples, some_sample())
    append_line(run.samples, some_sample())
    looks: list[int] = []

    def looked(*given: Any) -> Any:
        looks.append(0)
        if len(looks) == 2 and samples:  # after the point's own; what is there at the proof's first look is none
            append_line(run.samples, some_sample())
        return read_lines(*given)

    monkeypatch.setattr(points, "read_lines", looked)
    empty = Bench("exit 1")
    with pytest.raises(EngineGoneError, match=r"no sign of life after c0001\.r1 went wrong"):
        measured(run, plan, empty)
    assert len(looks) > 2
    assert len(empty.commands) == 1
    assert run.read_rows() == []
    assert run.read_events(["sweep"]) == []
