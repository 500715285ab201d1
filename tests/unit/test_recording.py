"""A profile: the engine is recorded at steady decode, and nothing is measured meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from isambard_serve import profiler, recipe, recording, sweep
from isambard_serve.claim import Claim, SupersededError
from isambard_serve.client import Client
from isambard_serve.engine import EngineClient, EngineUnreachableError
from isambard_serve.errors import ServeError, UsageError
from isambard_serve.plan import Plan
from isambard_serve.points import EngineGoneError, Loop
from isambard_serve.records import ClientFacts, Sample
from isambard_serve.run import RunDir
from tests.unit.helpers import SMALL, pretend_site, small_plan, written_run

PROFILED = {"bench": {"isl": 64, "osl": 64, "profile_at": 8, "profile_steps": 5, "warmup": 0}}


class Load:
    """A load that goes on until it is stopped, or for so many looks."""

    facts: ClientFacts | None = None
    counters: tuple[Sample, Sample] | None = None

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.stopped = False

    def ended(self, within_s: float) -> int | None:
        """Whether its looks are over."""
        self.looks -= 1
        return 0 if self.looks < 0 else None

    def stop(self) -> None:
        """It is broken off."""
        self.stopped = True


class Sender(Client):
    """In the place of the load generator."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.load = Load(10**6)

    def settled(self, within_s: float) -> bool:
        """Always."""
        return True

    def start_point(self, words: Sequence[str], log: Path) -> Load:
        """Starts the one load."""
        self.words = list(words)
        return self.load


class Engine(EngineClient):
    """In the place of the engine: prompts for two looks, then a step of its eight sequences at each look."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.looks = 0
        self.told: list[tuple[str, int]] = []
        self.writes = 1
        self.refuses = False
        self.blind = 0

    def sample(self, timeout_s: float = 5.0) -> Sample:
        """One more step."""
        self.looks += 1
        if self.blind:
            self.blind -= 1
            raise EngineUnreachableError("/metrics: timed out")
        return Sample(time=float(self.looks), scrape_ms=1.0, running=8.0, waiting=0.0,
                      prompt_tokens_total=64.0 * min(self.looks, 2), generation_tokens_total=8.0 * self.looks)

    def start_profile(self, timeout_s: float = 120.0) -> None:
        """Noted."""
        if self.refuses:
            raise EngineUnreachableError("/start_profile: HTTP Error 404: Not Found")
        self.told.append(("start", self.looks))
        self.blind = 2

    def stop_profile(self, timeout_s: float = 600.0) -> None:
        """Noted, and the traces written."""
        self.told.append(("stop", self.looks))
        for rank in range(self.writes):
            (self.run.profile / f"rank{rank}.1.pt.trace.json.gz").touch()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often."""
    monkeypatch.setattr(recording, "TICK_S", 0.0)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return small_plan(tmp_path, PROFILED)


@pytest.fixture
def run(plan: Plan) -> RunDir:
    return written_run(plan)


@pytest.fixture
def engine(run: RunDir) -> Engine:
    return Engine(run)


@pytest.fixture
def sender() -> Sender:
    return Sender()


@pytest.fixture
def loop(run: RunDir, plan: Plan, sender: Sender) -> Loop:
    return Loop(run, plan, Claim.take(run, "inside", None, over=0), writer="inside", client=sender, node="n",
                url="http://127.0.0.1:1")


def taken(loop: Loop, engine: Engine) -> str:
    assert loop.plan.profile
    return recording.take(loop, engine, loop.plan.profile)


def test_the_profiler_records_so_many_steps_once_decode_is_steady_and_the_load_ends_with_it(
        loop: Loop, engine: Engine, sender: Sender, run: RunDir) -> None:
    engine.writes = 2
    assert taken(loop, engine) == "5 steps at concurrency 8 recorded: 2 traces"
    (start, began), (stop, ended) = engine.told
    assert (start, stop) == ("start", "stop")
    assert began == 6  # the prompts end at the second look; four steps without any are steady
    assert ended - began == 2 + 1 + 5  # twice it did not answer; a first look, and five steps more
    assert sender.load.stopped
    assert dict(zip(sender.words, sender.words[1:], strict=False))["--max-concurrency"] == "8"
    assert dict(zip(sender.words, sender.words[1:], strict=False))["--num-prompts"] == "512"
    assert run.read_rows() == []
    assert not list(run.points.iterdir())


def test_a_load_that_ends_too_soon_is_no_profile(loop: Loop, engine: Engine, sender: Sender) -> None:
    sender.load.looks = 4
    with pytest.raises(ServeError, match=r"decode was not steady before the load ended, nor within \d+ s"):
        taken(loop, engine)
    assert engine.told == []


def test_a_profiler_that_does_not_know_when_to_stop_is_stopped(
        loop: Loop, engine: Engine, sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "STEPS_S", 0.0)
    assert taken(loop, engine) == "fewer than 5 steps at concurrency 8 recorded: 1 traces"
    assert [word for word, _ in engine.told] == ["start", "stop"]


@pytest.mark.parametrize(("trouble", "complaint"), [
    ({"refuses": True}, "the engine's profiler did not record: /start_profile: HTTP Error 404"),
    ({"writes": 0}, "the engine wrote no trace"),
])
def test_an_engine_without_a_profiler_or_a_trace_is_an_error(
        trouble: dict[str, Any], complaint: str, loop: Loop, engine: Engine, sender: Sender) -> None:
    for name, value in trouble.items():
        setattr(engine, name, value)
    with pytest.raises(ServeError, match=complaint):
        taken(loop, engine)
    assert sender.load.stopped


def test_a_profile_leaves_when_the_engine_goes_or_somebody_else_measures(
        loop: Loop, engine: Engine, run: RunDir) -> None:
    Claim.take(run, "inside", None, over=1)
    with pytest.raises(SupersededError):
        taken(loop, engine)
    run.record("serve", "failed", reason="it died")
    with pytest.raises(EngineGoneError):
        taken(loop, engine)


def test_what_came_of_a_profile_is_the_runs_end_without_a_row(
        loop: Loop, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweep._work(loop, engine) == "5 steps at concurrency 8 recorded: 1 traces"


def test_a_plan_with_a_profile_has_no_points_and_tells_the_engine_where_to_write(tmp_path: Path) -> None:
    plan = small_plan(tmp_path, PROFILED, site=pretend_site(placement="dependent"))
    assert (plan.points, plan.search, plan.placement) == ((), None, "inside")
    assert plan.profile == profiler.Profile(concurrency=8, steps=5)
    words = list(plan.engine_argv)
    told = json.loads(str(words[words.index("--profiler-config") + 1]))
    assert told == {"profiler": "torch", "torch_profiler_dir": f"{plan.run_dir}/profile", "max_iterations": 5,
                    "torch_profiler_with_stack": False, "ignore_frontend": True}
    plain = small_plan(tmp_path)
    assert plain.profile is None
    assert "--profiler-config" not in plain.engine_argv


def test_a_recipe_that_configures_the_profiler_itself_cannot_be_profiled(write: Callable[[str, str], Path]) -> None:
    path = str(write("mine.yaml", SMALL))
    own = "engine.args.profiler-config={profiler: cuda}"
    recipe.load(path, (own,))
    with pytest.raises(UsageError, match="--profiler-config is set by isambard-serve itself"):
        recipe.load(path, (own, "bench.profile_at=8"))
