"""Finding the knee: what to measure next, decided from what was seen so far and nothing else.

Cheap **scouts** look first: short windows of steady decode, read from the engine's metrics. One at the full length of
a sequence tells how many sequences the KV cache holds; doubled ones tell where more concurrency stops to pay. Only
then are **points** measured, as they are reported: prompts to the end. The first one goes where the scouts point;
others follow while they can still move the knee, the smallest concurrency within 2 % of the best valid throughput.

Everything is a pure function of the steps taken so far. Whoever goes on with a search, goes on where it stands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from isambard_serve.recipe import Recipe, seconds
from isambard_serve.records import Record

Saturation = Literal["kv", "waiting", "preemptions", "plateau", "max_num_seqs"]
"""Why more concurrency brings nothing: the KV cache is full, requests wait for room, running ones lose theirs, the
throughput has stopped to rise, or the engine runs no more at once."""

WORDS: Mapping[Saturation, str] = {
    "kv": "where the KV cache is full",
    "waiting": "where requests wait for room",
    "preemptions": "where running requests lose their room",
    "plateau": "where more concurrency brings next to nothing",
    "max_num_seqs": "where the engine runs no more at once (max-num-seqs)",
}

FULL = 0.95
"""KV cache use from which on it counts as full."""

GAIN = 0.03
"""Less than this for twice the concurrency is a plateau."""

NEAR = 0.02
"""How far the knee may lie below the best throughput."""

SPARE = 0.99
"""Share of the sequences that fit, to begin with: one too many costs more than one too few."""

CROWDED = 0.02
"""Share of a point's requests that were preempted, from which on fewer at once may give more."""

BRACKET = 7 / 6
"""How far apart the knee and a concurrency that falls short may be, as a ratio."""

POINTS = 5
"""Concurrencies that are measured at the most: each costs as much as all scouts together."""

START_PER_RANK = 8
"""Sequences per DP rank of the first scout: the smallest batch whose KV use can be read without a rounding error."""


class Space(Record, frozen=True):
    """What is searched.

    ``most``: sequences that the engine runs at once over all DP ranks (None: not known). ``budget_gpu_s``: GPU-seconds
    that the whole search may take. ``repeats``: how often the knee is measured in all.
    """

    isl: int
    osl: int
    start: int
    most: int | None
    gpus: int
    prompts_per_concurrency: int
    repeats: int
    budget_gpu_s: float


class Step(Record, frozen=True):
    """A scout or a point that was done; one line of ``search.jsonl``.

    ``output_tok_s`` is measured (point) or what a whole run would give by the window seen (scout). ``running`` is how
    many sequences ran at once at the most, ``waiting`` whether others waited all the while, ``kv_cache_usage`` the
    fullest. ``valid``: a point that passed its rules. ``gpu_s`` is what it took, in GPU-seconds.
    """

    kind: Literal["scout", "point"]
    concurrency: int
    repeat: int
    output_tok_s: float | None
    running: float
    waiting: bool
    kv_cache_usage: float | None
    preemptions: float | None
    valid: bool
    gpu_s: float


class Scout(Record, frozen=True):
    """To do next: a load of so many requests, ``concurrency`` at once, broken off once it was seen for long enough."""

    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int


class Measure(Record, frozen=True):
    """To do next: a point."""

    concurrency: int
    repeat: int


class Stop(Record, frozen=True):
    """Nothing more to do. ``saturation`` None: none was seen (``reason`` says why it ended all the same)."""

    knee: int | None
    saturation: Saturation | None
    reason: str


def space(recipe: Recipe, most_s: int) -> Space | None:
    """What is searched for the knee, in ``most_s`` seconds at the most; None if the recipe lists its points."""
    bench, args = recipe.bench, recipe.engine.args
    if bench.concurrency != "saturate":
        return None
    parallel, each = args.get("data-parallel-size", 1), args.get("max-num-seqs")
    parallel = parallel if isinstance(parallel, int) else 1
    start, most = START_PER_RANK * parallel, each * parallel if isinstance(each, int) else None
    return Space(
        isl=bench.isl, osl=bench.osl, start=min(start, most or start), most=most, gpus=recipe.resources.gpus,
        prompts_per_concurrency=bench.prompts_per_concurrency, repeats=bench.repeats,
        budget_gpu_s=float(max(1, min(seconds(bench.sweep_limit, recipe.name), most_s)) * recipe.resources.gpus))


def saturation(step: Step) -> Saturation | None:
    """What ``step`` shows to be exhausted, if anything."""
    if step.preemptions:
        return "preemptions"
    if step.kv_cache_usage is not None and step.kv_cache_usage >= FULL:
        return "kv"
    return "waiting" if step.waiting else None


def decide(space: Space, steps: Sequence[Step]) -> Scout | Measure | Stop:
    """What to do after ``steps``."""
    evidence = _Evidence(space, steps)
    if not evidence.points:
        scout = evidence.next_scout()
        if scout and evidence.spent < space.budget_gpu_s:
            return scout
    concurrency = evidence.next_point()
    cut_short = concurrency is not None and evidence.full
    if concurrency is None or cut_short:
        concurrency = evidence.knee
        done = sum(point.concurrency == concurrency for point in evidence.points)
        if concurrency is None:
            return evidence.end("no point was valid")
        if done >= space.repeats:
            return evidence.end(f"the budget of {POINTS} concurrencies is spent" if cut_short else "the knee is found")
        return Measure(concurrency=concurrency, repeat=done + 1)
    if not evidence.affordable(concurrency):
        return evidence.end(f"the budget has no room for a point at concurrency {concurrency}")
    return Measure(concurrency=concurrency, repeat=1)


class _Evidence:
    """What the steps so far say."""

    def __init__(self, space: Space, steps: Sequence[Step]) -> None:
        self._space = space
        self._steps = steps
        self._scouts = [step for step in steps if step.kind == "scout"]
        self._curve = sorted((scout.concurrency, scout.output_tok_s) for scout in self._scouts[1:]
                             # The first one had sequences of another length; who waits, runs at another concurrency.
                             if scout.output_tok_s and not scout.waiting)
        self.points = [step for step in steps if step.kind == "point"]
        self._measured = {step.concurrency: step for step in self.points if step.repeat == 1}
        self.valid = {concurrency: step.output_tok_s for concurrency, step in self._measured.items()
                      if step.valid and step.output_tok_s}

    @property
    def spent(self) -> float:
        """GPU-seconds so far."""
        return sum(step.gpu_s for step in self._steps)

    @property
    def full(self) -> bool:
        """Whether as many concurrencies were measured as may be."""
        return len(self._measured) >= POINTS

    @property
    def knee(self) -> int | None:
        """The smallest concurrency within 2 % of the best, of those measured."""
        wanted = (1 - NEAR) * max(self.valid.values(), default=0.0)
        return min((concurrency for concurrency, tok_s in self.valid.items() if tok_s >= wanted), default=None)

    @property
    def capacity(self) -> float:
        """Sequences of full length that run at once, as far as is known."""
        known = [self._at_once]
        if self._scouts and self._scouts[0].kv_cache_usage:
            known.append(SPARE * self._scouts[0].running / self._scouts[0].kv_cache_usage)
        return max(1.0, min(known))

    @property
    def _at_once(self) -> float:
        """Sequences that run at once, whatever their length, as far as is known."""
        return min([self._space.most or math.inf, *(scout.running for scout in self._scouts if scout.waiting)])

    @property
    def plateau(self) -> bool:
        """Whether some doubling brought next to nothing."""
        rates = dict(self._curve)
        return any(rates.get(2 * concurrency, math.inf) < tok_s * (1 + GAIN) for concurrency, tok_s in self._curve)

    def next_scout(self) -> Scout | None:
        """The next scout, or None if the scouts have told enough."""
        space = self._space
        if not self._scouts:
            # At full length: what a sequence takes of the KV cache just before it ends.
            last = max(1, space.osl // 32)
            return Scout(concurrency=space.start, requests=space.start * 20,
                         prompt_tokens=space.isl + space.osl - last, output_tokens=last)
        if self.plateau:
            concurrency = self._between()
        else:
            before = self._scouts[-1]
            concurrency = before.concurrency * 2
            # Of an engine that does not tell how fast it is, no doubling would be the last. (The first scout is short.)
            silent = len(self._scouts) > 1 and not before.output_tok_s
            if concurrency > self.capacity or saturation(before) or silent:
                return None
        return None if concurrency is None else Scout(
            concurrency=concurrency, requests=concurrency * 2, prompt_tokens=space.isl, output_tokens=space.osl)

    def _between(self) -> int | None:
        """Where on a plateau a scout still has to look: halfway from the best to its neighbours, once each."""
        best, _ = self._best_scout()
        known = [concurrency for concurrency, _ in self._curve]
        if best // 2 in known and not any(best // 2 < other < best for other in known):
            return best * 3 // 4
        return best * 3 // 2 if 2 * best in known and not any(best < other < 2 * best for other in known) else None

    def _best_scout(self) -> tuple[int, float]:
        return max(self._curve, key=lambda seen: seen[1], default=(0, 0.0))

    def next_point(self) -> int | None:
        """The next concurrency to measure, or None if no other can move the knee."""
        if not self._measured:
            if self.plateau:
                return self._crossing(self._curve, (1 - NEAR / 2) * self._ceiling())
            known = max((scout.concurrency for scout in self._scouts), default=self._space.start)
            return math.floor(self.capacity) if self.capacity < math.inf else known
        if not self.valid:
            return self._fewer(min(self._measured))
        best = max(self.valid, key=lambda concurrency: self.valid[concurrency])
        return self._better(best) or self._narrower(best)

    def _fewer(self, concurrency: int) -> int | None:
        """Where to look for a valid point below ``concurrency``, if too many sequences were what was wrong there."""
        step = self._measured[concurrency]
        crowded = (step.preemptions or 0.0) > CROWDED * concurrency * self._space.prompts_per_concurrency
        return concurrency * 7 // 8 or None if crowded else None

    def _better(self, best: int) -> int | None:
        """Where the best may still be: where a scout saw more, lower if many lost room, higher if some is left."""
        step = self._measured[best]
        promising, tok_s = self._best_scout()
        if self.plateau:
            return None
        if tok_s > (1 + NEAR) * self.valid[best] and promising not in self._measured:
            return promising
        if best == min(self._measured) and (fewer := self._fewer(best)):
            return fewer
        if best != max(self._measured) or saturation(step):
            return None
        room = min(2.0, 1 / step.kv_cache_usage) if step.kv_cache_usage else 2.0
        more = math.floor(min(best * room, self._at_once))
        return more if more > best * (1 + GAIN) else None

    def _narrower(self, best: int) -> int | None:
        """Where the knee may lie below ``best``, by the scouts' curve up to it; None if that is near enough."""
        lower = [(concurrency, tok_s) for concurrency, tok_s in self._curve if concurrency < best]
        if not lower or self.plateau or self.knee != best:
            return None  # on a plateau the scouts have placed it already
        guess = self._crossing([*lower, (best, self.valid[best])], (1 - NEAR) * self.valid[best])
        below = max((concurrency for concurrency in self._measured if concurrency < best), default=0)
        return guess if below * BRACKET < guess < best / BRACKET else None

    def _ceiling(self) -> float:
        """The best that the scouts' curve promises. Still rising at its end, it is given half of the last gain once
        more: where sequences share a fixed part of the step time, each doubling gains half of the one before.
        """
        best, tok_s = self._best_scout()
        before = dict(self._curve).get(best // 2)
        rising = best == self._curve[-1][0] and before is not None
        return tok_s + (max(0.0, tok_s - before) / 2 if rising and before is not None else 0.0)

    @staticmethod
    def _crossing(curve: Sequence[tuple[int, float]], wanted: float) -> int:
        """The smallest concurrency of ``curve`` that gives ``wanted`` (else its best), interpolated by powers."""
        wanted = min(wanted, max(tok_s for _, tok_s in curve))
        for (c0, t0), (c1, t1) in itertools.pairwise(curve):
            if t0 < wanted <= t1:
                share = math.log(wanted / t0) / math.log(t1 / t0)
                return math.ceil(c0 * math.pow(c1 / c0, share))
        return curve[0][0]

    def affordable(self, concurrency: int) -> bool:
        """Whether the budget lets a point follow, by the best throughput seen."""
        rate = max((step.output_tok_s or 0.0 for step in self._steps), default=0.0)
        tokens = concurrency * self._space.prompts_per_concurrency * self._space.osl
        return self.spent + (tokens / rate * self._space.gpus if rate else 0.0) <= self._space.budget_gpu_s

    def end(self, reason: str) -> Stop:
        """The end of the search, with what the largest concurrency was short of."""
        top = max(self.points, key=lambda point: point.concurrency, default=None)
        found = saturation(top) if top else None
        if found is None and any(scout.waiting for scout in self._scouts):
            found = "waiting"
        beyond = top is not None and top.valid and self.knee is not None and self.knee < top.concurrency
        if found is None and (self.plateau or beyond):
            found = "plateau"
        if found is None and top and self._space.most and top.concurrency >= self._space.most:
            found = "max_num_seqs"
        return Stop(knee=self.knee, saturation=found, reason=reason)
