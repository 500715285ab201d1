"""Carries the search for the knee out: does what :mod:`isambard_serve.search` decides, and keeps each step at once."""

from __future__ import annotations

import time

import msgspec

from isambard_serve import bench, enginelog, plan, scout, search
from isambard_serve.errors import ServeError
from isambard_serve.evidence import Observer
from isambard_serve.outcome import Found
from isambard_serve.points import Loop
from isambard_serve.records import Sample
from isambard_serve.run import RunDir, append_line, point_name, read_lines, write_whole
from isambard_serve.search import Measure, Scout, Space, Step, Stop

TICK_S = 0.5
SCOUT_S = 600.0
"""How long a scout may take: a large model computes the prompts of thousands of requests in some minutes."""

ATTEMPTS = 3
"""How often a scout is tried of which the engine ran nothing, or while which it compiled kernels."""


def find(loop: Loop, space: Space) -> Found:
    """Searches for the knee, or goes on where a search in this run stands.

    Raises:
        EngineGoneError: the engine went away; what was kept so far stays.
        SupersededError: somebody else measures now.
        ServeError: the engine ran nothing of a scout.
    """
    run = loop.run
    # A scout meets its own shapes as it goes; the point that follows it may be larger than any.
    warm = 0
    while not isinstance(action := search.decide(space, steps := kept(run)), Stop):
        loop.claim.check()
        if isinstance(action, Measure) or not warm:
            if action.concurrency > warm:
                loop.warm_up(action.concurrency)
            warm = max(warm, action.concurrency)
        step = _measured(loop, space, action) if isinstance(action, Measure) else _scouted(loop, space, action)
        append_line(run.search / f"{loop.claim.number:04d}.jsonl", step)
    kinds = [step.kind for step in steps]
    found = Found(knee=action.knee, saturation=action.saturation, reason=action.reason, scouts=kinds.count("scout"),
                  points=kinds.count("point"), gpu_s=round(sum(step.gpu_s for step in steps), 1),
                  engine_kv_cache_tokens=enginelog.read(enginelog.part(run.engine_log)).kv_cache_tokens)
    loop.claim.check()
    write_whole(run.knee, msgspec.json.format(msgspec.json.encode(found), indent=2))
    return found


def kept(run: RunDir) -> list[Step]:
    """The steps that were kept, in their order: a point counts by its row, whatever became of its step."""
    steps = [step for path in sorted(run.search.glob("*.jsonl")) for step in read_lines(path, Step)]
    told = {point_name(step.concurrency, step.repeat): step for step in steps if step.kind == "point"}
    points = []
    for row in run.read_rows():
        known = told.get(point_name(row.concurrency, row.repeat))
        points.append(Step(
            kind="point", concurrency=row.concurrency, repeat=row.repeat, output_tok_s=row.output_tok_s,
            running=known.running if known else 0.0, waiting=known.waiting if known else False,
            kv_cache_usage=row.kv_cache_usage_max, preemptions=row.preemptions, valid=row.valid,
            gpu_s=known.gpu_s if known else 0.0))
    return [step for step in steps if step.kind == "scout"] + points


def _measured(loop: Loop, space: Space, action: Measure) -> Step:
    began, clock = time.time(), time.monotonic()
    row = loop.measure(plan.point(action.concurrency, action.repeat, space.prompts_per_concurrency))
    samples = _since(loop.run, began)
    running, waiting, kv, preemptions = scout.seen(scout.active(samples))
    return Step(kind="point", concurrency=row.concurrency, repeat=row.repeat, output_tok_s=row.output_tok_s,
                running=running, waiting=waiting, kv_cache_usage=kv, preemptions=preemptions, valid=row.valid,
                gpu_s=space.gpus * scout.elapsed_s(samples, time.monotonic() - clock))


def _scouted(loop: Loop, space: Space, action: Scout) -> Step:
    what = f"a scout at concurrency {action.concurrency}"
    log = loop.run.points / "scouts.log"
    seen, taken_s = None, 0.0
    for attempt in range(ATTEMPTS):
        words = bench.load(
            loop.plan, url=loop.url, prompts=action.requests, concurrency=action.concurrency,
            # No prompt of a scout comes back, in a point least of all.
            seed=bench.ATTEMPT_SEEDS * (loop.claim.number * ATTEMPTS + attempt) + 500 * action.concurrency,
            isl=action.prompt_tokens, osl=action.output_tokens)
        observer, began, clock = Observer(loop.run), time.time(), time.monotonic()
        with loop.sent(words, log, what) as load:
            while load.ended(TICK_S) is None and time.monotonic() - clock < SCOUT_S:
                loop.check(what)
                if scout.enough(scout.active(_since(loop.run, began)), action):
                    break
        loop.drain(what)
        samples = _since(loop.run, began)
        if load.counters:
            samples = sorted([*samples, *load.counters], key=lambda sample: sample.time)
        taken_s += scout.elapsed_s(samples, time.monotonic() - clock)
        seen = scout.step(samples, action, space, space.gpus * taken_s) or seen
        # An engine that compiles stands still, for minutes where nothing is cached: that would look like a plateau.
        if seen and not observer.compiled():
            break
    if seen:
        return seen
    raise ServeError(f"the engine ran nothing of {what}", where=f"run {loop.run.run_id}",
                     remedy=f"the load generator's words are in {log}")


def _since(run: RunDir, began: float) -> list[Sample]:
    """The samples from the last one before ``began``."""
    samples = read_lines(run.samples, Sample)
    first = next((index for index, sample in enumerate(samples) if sample.time >= began), len(samples))
    return samples[max(0, first - 1) :]
