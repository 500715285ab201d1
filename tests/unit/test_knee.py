"""The search carried out: every step is kept at once, none is done twice, and a cut costs one step at the most."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from isambard_serve import knee, points, scout
from isambard_serve.claim import Claim, SupersededError, newest
from isambard_serve.client import Client
from isambard_serve.errors import ServeError
from isambard_serve.outcome import Found
from isambard_serve.plan import Plan
from isambard_serve.points import EngineGoneError, Loop
from isambard_serve.records import ClientFacts, Sample
from isambard_serve.run import RunDir, append_line, write_whole
from isambard_serve.search import Step
from tests.unit.helpers import good_bench, small_plan, written_run

HOLDS = 20
"""Sequences of full length that the pretended engine's KV cache holds."""


class Load:
    """A load that is over at once."""

    facts: ClientFacts | None = None
    counters: tuple[Sample, Sample] | None = None

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ended(self, within_s: float) -> int | None:
        """At once."""
        return 0

    def stop(self) -> None:
        """The engine lets go."""
        self._engine.idle()


class Engine(Client):
    """An engine of a known curve in the place of the client: each load leaves the samples of a second's work."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.loads: list[tuple[int, int]] = []
        self.dies_after = 10**9
        self.blind = False
        self.compiles: set[int] = set()
        self._prompt = self._generated = self._preempted = self._last = 0.0

    def settled(self, within_s: float) -> bool:
        """Always."""
        return True

    def start_point(self, words: Sequence[str], log: Path) -> Load:
        """Does the whole load at once; its samples are of the moment after, and lie in no other load's window."""
        time.sleep(max(0.0, self._last - time.time()))
        value = {words[at]: words[at + 1] for at in range(len(words) - 1) if words[at].startswith("--")}
        concurrency, prompts = int(value["--max-concurrency"]), int(value["--num-prompts"])
        # A flag given twice counts as it was given last.
        isl = int([words[at + 1] for at, word in enumerate(words) if word == "--random-input-len"][-1])
        osl = int([words[at + 1] for at, word in enumerate(words) if word == "--random-output-len"][-1])
        self.loads.append((concurrency, prompts))
        if len(self.loads) > self.dies_after:
            self.run.record("serve", "failed", reason="it died")
        elif not self.blind:
            running = min(concurrency, HOLDS)
            tokens = prompts * osl / 7 if "--result-dir" in words else 100.0 * running
            self._work(running, concurrency, prompts * isl, tokens, isl + osl)
        if "--result-dir" in words:
            folder = Path(words[words.index("--result-dir") + 1])
            result = good_bench(prompts, osl, output_throughput=100.0 * min(concurrency, HOLDS),
                                queue_times=[], latencies=[])
            (folder / "bench.json").write_text(json.dumps(result))
        return Load(self)

    def _work(self, running: int, concurrency: int, prompt_tokens: int, tokens: float, length: int) -> None:
        self.idle()
        began = self._soon()
        if concurrency in self.compiles:  # the first time, and for most of that time it stands still
            self.compiles.remove(concurrency)
            with self.run.engine_log.open("a") as log:
                log.write("WARNING [jit_monitor.py:132] TileLang JIT compilation during inference: mhc_pre_tilelang\n")
            tokens /= 100
        self._prompt += prompt_tokens
        self._preempted += max(0, concurrency - HOLDS)
        for part in range(8):
            self._generated += tokens if part else 0.0
            self._tell(began + part * 1e-4, running, concurrency - running,
                       min(1.0, running / HOLDS * length / 128))

    def idle(self) -> None:
        """A sample of an engine that does nothing, as it will be taken in a moment."""
        self._tell(self._soon(), 0, 0, 0.0)

    def _soon(self) -> float:
        """A moment that is to come, behind all samples so far."""
        return max(time.time() + 0.01, self._last + 1e-4)

    def _tell(self, now: float, running: int, waiting: int, kv: float) -> None:
        self._last = now
        append_line(self.run.samples, Sample(
            time=now, scrape_ms=1.0, running=float(running), waiting=float(waiting), kv_cache_usage=kv,
            preemptions_total=self._preempted, prompt_tokens_total=self._prompt,
            generation_tokens_total=self._generated))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often."""
    for module in (points, knee):
        monkeypatch.setattr(module, "TICK_S", 0.01)
    monkeypatch.setattr(points, "DRAIN_S", 1.0)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return small_plan(tmp_path, {"bench": {"isl": 64, "osl": 64, "concurrency": "saturate", "min_window": "0s"}})


@pytest.fixture
def run(plan: Plan) -> RunDir:
    return written_run(plan)


@pytest.fixture
def engine(run: RunDir) -> Engine:
    return Engine(run)


def found(run: RunDir, plan: Plan, engine: Engine) -> Found:
    """What somebody who claims the points now finds."""
    assert plan.search is not None
    claim = Claim.take(run, "sweep", "102", over=newest(run))
    loop = Loop(run, plan, claim, writer="sweep", client=engine, node="nid001", url="http://127.0.0.1:4711")
    return knee.find(loop, plan.search)


def test_the_knee_is_found_and_all_that_led_there_is_kept(run: RunDir, plan: Plan, engine: Engine) -> None:
    result = found(run, plan, engine)
    assert result.saturation in ("kv", "preemptions", "waiting")
    assert result.knee in (HOLDS - 1, HOLDS)
    assert result.text.startswith(f"knee at concurrency {result.knee}, where ")
    assert msgspec.json.decode(run.knee.read_bytes(), type=Found) == result
    steps = knee.kept(run)
    assert [step.kind for step in steps].count("scout") == result.scouts >= 2
    assert [row.concurrency for row in run.read_rows()] == [step.concurrency for step in steps if step.kind == "point"]
    assert result.gpu_s == pytest.approx(sum(step.gpu_s for step in steps), abs=0.05)


def test_a_scout_while_which_the_engine_compiled_is_done_again(run: RunDir, plan: Plan, engine: Engine) -> None:
    run.engine_log.write_text(f"INFO [core.py:116] Initializing a V1 LLM engine (v{plan.engine_version}) with config\n"
                              "INFO [jit_monitor.py:79] Kernel JIT monitor activated; mode=warn.\n")
    engine.compiles = {16}
    result = found(run, plan, engine)
    assert engine.compiles == set()
    (scouted,) = [step for step in knee.kept(run) if (step.kind, step.concurrency) == ("scout", 16)]
    assert scouted.output_tok_s
    assert scouted.output_tok_s > 100
    assert [concurrency for concurrency, _ in engine.loads][:3] == [8, 16, 16]
    assert result.knee in (HOLDS - 1, HOLDS)


@pytest.mark.parametrize("loads", [2, 3, 4, 5, 6])
def test_whoever_goes_on_repeats_nothing_that_was_kept(run: RunDir, plan: Plan, engine: Engine, loads: int) -> None:
    engine.dies_after = loads
    try:
        found(run, plan, engine)
    except EngineGoneError:
        (run.events / "serve.jsonl").unlink()
    before = [(step.kind, step.concurrency) for step in knee.kept(run)]
    engine.dies_after = 10**9
    found(run, plan, engine)
    after = [(step.kind, step.concurrency) for step in knee.kept(run)]
    assert set(before) <= set(after)
    assert len(set(after)) == len(after)


def test_a_point_counts_by_its_row_also_if_its_step_was_not_kept(run: RunDir, plan: Plan, engine: Engine) -> None:
    found(run, plan, engine)
    rows = run.read_rows()
    for path in run.search.glob("*.jsonl"):
        path.unlink()
    assert [step.concurrency for step in knee.kept(run)] == [row.concurrency for row in rows]
    append_line(run.search / "0001.jsonl", Step(
        kind="point", concurrency=7, repeat=1, output_tok_s=1.0, running=7.0, waiting=False, kv_cache_usage=None,
        preemptions=None, valid=True, gpu_s=1.0))
    assert 7 not in [step.concurrency for step in knee.kept(run)]


def test_an_engine_that_runs_nothing_ends_the_search_with_where_to_look(run: RunDir, plan: Plan, engine: Engine
                                                                         ) -> None:
    engine.blind = True
    with pytest.raises(ServeError, match="ran nothing of a scout at concurrency") as raised:
        found(run, plan, engine)
    assert raised.value.remedy is not None
    assert "scouts.log" in raised.value.remedy


def test_who_is_superseded_leaves_before_the_next_step(run: RunDir, plan: Plan, engine: Engine) -> None:
    assert plan.search is not None
    claim = Claim.take(run, "sweep", "102", over=newest(run))
    loop = Loop(run, plan, claim, writer="sweep", client=engine, node="nid001", url="http://127.0.0.1:4711")
    write_whole(run.claims / "0002.json", '{"holder": "inside", "job_id": null, "time": 1}')
    with pytest.raises(SupersededError):
        knee.find(loop, plan.search)
    assert not run.knee.exists()


def test_a_search_without_a_knee_says_why() -> None:
    nothing = Found(knee=None, saturation=None, reason="no point was valid", scouts=2, points=1, gpu_s=1.0)
    assert nothing.text == "no knee: no point was valid"
    spent = msgspec.structs.replace(nothing, knee=5, reason="the budget is spent")
    assert spent.text == "knee at concurrency 5 (the budget is spent)"


def test_a_load_that_is_broken_off_must_leave_the_engine(run: RunDir, plan: Plan, engine: Engine,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "DRAIN_S", 0.05)
    monkeypatch.setattr(Engine, "idle", lambda self: None)
    with pytest.raises(EngineGoneError, match="which was broken off"):
        found(run, plan, engine)
    assert scout.active([]) == []
