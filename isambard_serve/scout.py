"""What the samples of a scout tell: from when on it is steady, for how long to look, and what a whole run would give.

A scout's load looks like a point's, but is broken off as soon as a short window of steady decode was seen. How fast
prompts are computed is read from the time before the window, so that the two together foretell a whole run.
"""

from __future__ import annotations

from collections.abc import Sequence

from isambard_serve.records import Sample
from isambard_serve.search import Scout, Space, Step

STEADY_STEPS = 4
"""Steps without a prompt being finished, from which on decode is steady."""

WINDOW_STEPS = 32
WINDOW_SAMPLES = 3
"""How long to look: as many steps and samples at least. One step's time varies by some percent; their mean does not."""

GENERATIONS = 1.5
"""Sequences that ended and were followed by others, per running one: prompts then never pause, and that is steady."""


def active(samples: Sequence[Sample]) -> list[Sample]:
    """The samples from just before the load reached the engine to just after it left."""
    busy = [index for index, sample in enumerate(samples) if sample.running or sample.waiting]
    return list(samples[max(0, busy[0] - 1) : busy[-1] + 2]) if busy else []


def steady(samples: Sequence[Sample], scout: Scout) -> int | None:
    """The index of the first sample at which decode is steady; None if it never is."""
    if not samples:
        return None
    first, quiet = samples[0], 0
    for index, sample in enumerate(samples):
        if sample.prompt_tokens_total != samples[quiet].prompt_tokens_total:
            quiet = index
        running = sample.running or 0.0
        generated = (sample.generation_tokens_total or 0.0)
        since = generated - (samples[quiet].generation_tokens_total or 0.0)
        ever = generated - (first.generation_tokens_total or 0.0)
        if quiet and running and (since >= STEADY_STEPS * running or
                                  ever >= GENERATIONS * scout.output_tokens * running):
            return index
    return None


def enough(samples: Sequence[Sample], scout: Scout) -> bool:
    """Whether the window is long enough."""
    begin = steady(samples, scout)
    if begin is None or len(samples) - begin <= WINDOW_SAMPLES:
        return False
    running = max(sample.running or 0.0 for sample in samples[begin:])
    return _increase(samples[begin:], "generation_tokens_total") >= WINDOW_STEPS * running


def throughput(samples: Sequence[Sample], scout: Scout, space: Space) -> float | None:
    """Output tokens a second of a whole run at the scout's concurrency, by its :func:`active` samples.

    Between two samples lie G output and P prompt tokens: they take G·d + P·p seconds. The window gives d, seconds an
    output token, what lies before it p, seconds a prompt token. A whole run takes d + p·ISL/OSL seconds for each
    output token.
    """
    if len(samples) < 2:
        return None
    begin = steady(samples, scout)
    if begin is None or begin == len(samples) - 1:
        taken = _time(samples[-1]) - _time(samples[0])
        return _increase(samples, "generation_tokens_total") / taken if taken > 0 else None
    before, window = samples[: begin + 1], samples[begin:]
    before_s, window_s = _time(before[-1]) - _time(before[0]), _time(window[-1]) - _time(window[0])
    g1, p1 = _increase(before, "generation_tokens_total"), _increase(before, "prompt_tokens_total")
    g2, p2 = _increase(window, "generation_tokens_total"), _increase(window, "prompt_tokens_total")
    both = g2 * p1 - g1 * p2
    if not g2 or window_s <= 0:
        return None
    prompt_s = max(0.0, (g2 * before_s - g1 * window_s) / both) if both > 0 else 0.0
    output_s = max(0.0, window_s - p2 * prompt_s) / g2
    whole_s = output_s + prompt_s * space.isl / space.osl
    return 1 / whole_s if whole_s else None


def step(samples: Sequence[Sample], scout: Scout, space: Space, gpu_s: float) -> Step | None:
    """What the scout found; None if the engine ran nothing of it.

    Args:
        samples: all that were taken while it went on.
        gpu_s: GPU-seconds that it took.
    """
    busy = active(samples)
    if not busy:
        return None
    begin = steady(busy, scout)
    window = busy[begin if begin is not None else 0 :]
    running, waiting, kv, _ = seen(window)
    return Step(kind="scout", concurrency=scout.concurrency, repeat=1, output_tok_s=throughput(busy, scout, space),
                running=running, waiting=waiting, kv_cache_usage=kv, preemptions=seen(busy)[3], valid=True, gpu_s=gpu_s)


def seen(window: Sequence[Sample]) -> tuple[float, bool, float | None, float | None]:
    """What samples show: most sequences that ran at once, whether others waited while so many ran, fullest KV cache,
    preemptions. Where requests come and go in waves, some wait for a moment between two: nine samples of ten must.
    """
    running = max((sample.running or 0.0 for sample in window), default=0.0)
    level = [sample for sample in window if (sample.running or 0.0) >= 0.9 * running]
    waiting = len(level) >= WINDOW_SAMPLES and sum(bool(sample.waiting) for sample in level) >= 0.9 * len(level)
    kv = max((sample.kv_cache_usage for sample in window if sample.kv_cache_usage is not None), default=None)
    counts = [sample.preemptions_total for sample in window if sample.preemptions_total is not None]
    return running, waiting, kv, counts[-1] - counts[0] if counts else None


def elapsed_s(samples: Sequence[Sample], wall_s: float) -> float:
    """Seconds that passed for the engine: ``wall_s``, or by its own clock if its time is not ours."""
    if len(samples) > 1 and samples[0].engine_time_s is not None:
        return _time(samples[-1]) - _time(samples[0])
    return wall_s


def _time(sample: Sample) -> float:
    return sample.time if sample.engine_time_s is None else sample.engine_time_s


def _increase(samples: Sequence[Sample], counter: str) -> float:
    first, last = getattr(samples[0], counter), getattr(samples[-1], counter)
    return float(last - first) if first is not None and last is not None else 0.0
