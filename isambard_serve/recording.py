"""Records some steps of steady decode with the engine's profiler.

The profiler slows the engine, and writing its traces stops it for a while: nothing that is seen of the engine
meanwhile is a measurement, and no row is made of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from isambard_serve import bench, scout
from isambard_serve.client import Load
from isambard_serve.engine import EngineClient, EngineUnreachableError
from isambard_serve.errors import ServeError
from isambard_serve.points import Loop
from isambard_serve.profiler import Profile
from isambard_serve.records import Sample
from isambard_serve.search import Scout

TICK_S = 0.1

LEAST_PROMPTS = 512
"""Requests of a load: with few at once, twice as many as run would be over before the profiler has started."""

STEPS_S = 120.0
"""How long the steps may take, the writing of the traces included, before the profiler is stopped by hand."""


def take(loop: Loop, engine: EngineClient, wanted: Profile) -> str:
    """Brings the engine to steady decode, has its profiler record, and says what came of it.

    Raises:
        EngineGoneError: the engine went away.
        SupersededError: somebody else measures now.
        ServeError: decode never was steady, or the profiler did not record.
    """
    run, plan, what = loop.run, loop.plan, f"a profile at concurrency {wanted.concurrency}"
    loop.warm_up(wanted.concurrency)
    run.profile.mkdir(mode=0o700, exist_ok=True)
    log = run.profile / "load.log"
    load_of = Scout(concurrency=wanted.concurrency, requests=max(LEAST_PROMPTS, 2 * wanted.concurrency),
                    prompt_tokens=plan.isl, output_tokens=plan.osl)
    words = bench.load(plan, url=loop.url, prompts=load_of.requests, concurrency=wanted.concurrency,
                       seed=bench.ATTEMPT_SEEDS * loop.claim.number - 3)  # the warm-up has those before
    with loop.sent(words, log, what) as load:
        watch = _Watch(loop, engine, load, what)
        if not watch.until(lambda samples: scout.steady(scout.active(samples), load_of) is not None,
                           plan.limits.point_s):
            raise ServeError(f"{what}: decode was not steady before the load ended, nor within {plan.limits.point_s} s "
                             "(point_limit)", where=f"run {run.run_id}",
                             remedy=f"the load generator's words are in {log}")
        try:
            engine.start_profile()
            whole = watch.until(lambda samples: _steps(samples) >= wanted.steps, STEPS_S)
            engine.stop_profile()
        except EngineUnreachableError as error:
            raise ServeError(f"{what}: the engine's profiler did not record: {error}",
                             where=f"run {run.run_id}") from error
    traces = [path.name for path in run.profile.iterdir() if path.name.endswith((".json", ".json.gz"))]
    if not traces:
        raise ServeError(f"{what}: the engine wrote no trace", where=str(run.profile))
    steps = f"{wanted.steps} steps" if whole else f"fewer than {wanted.steps} steps"
    return f"{steps} at concurrency {wanted.concurrency} recorded: {len(traces)} traces"


class _Watch:
    """Looks at the engine while a load is on its way."""

    def __init__(self, loop: Loop, engine: EngineClient, load: Load, what: str) -> None:
        self._loop = loop
        self._engine = engine
        self._load = load
        self._what = what

    def until(self, seen: Callable[[list[Sample]], bool], limit_s: float) -> bool:
        """Whether the samples from now on show what is waited for, before the load ends or the time is up."""
        samples: list[Sample] = []
        limit = time.monotonic() + limit_s
        while not seen(samples):
            if self._load.ended(TICK_S) is not None or time.monotonic() > limit:
                return False
            self._loop.check(self._what)
            with contextlib.suppress(EngineUnreachableError):  # it may be writing its traces
                samples.append(self._engine.sample())
        return True


def _steps(samples: list[Sample]) -> float:
    """How many steps the engine took while ``samples`` were taken: a step is a token for each running sequence."""
    if not samples:
        return 0.0
    tokens = (samples[-1].generation_tokens_total or 0.0) - (samples[0].generation_tokens_total or 0.0)
    return tokens / max(1.0, samples[0].running or 0.0)
