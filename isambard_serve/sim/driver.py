"""The core in real time: its clock follows the wall's, ``time_scale`` times as fast, and threads may use it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Hashable, Sequence
from functools import partial

from isambard_serve.sim import fitted, metrics
from isambard_serve.sim.load import ClosedLoop, Load, Outcome, Pace
from isambard_serve.sim.log import Log
from isambard_serve.sim.scheduler import Engine, Request
from isambard_serve.sim.settings import Settings

_CHUNK_STEPS = 200
"""Steps that are worked out before others get the lock: some milliseconds."""
_TICK_S = 0.01
"""At other scales than 1, how often the core catches up with the clock, in real seconds."""
_MOMENT_S = 0.0005
_IDLE_S = 0.5
_THROUGHPUT_LINE_S = 10.0
_THROUGHPUT_LINE_REAL_S = 0.5
"""Least time between two throughput lines, virtual (vLLM's default) and real."""


class Driver:
    """Runs one engine. ``die`` ends the process with an exit code, or by a signal if it is negative."""

    def __init__(self, settings: Settings, log: Log, die: Callable[[int], None]) -> None:
        self.settings = settings
        self._log = log
        self._die = die
        self._changed = threading.Condition()
        self._engine = Engine(settings.limits, partial(fitted.step_time_s, settings.shape))
        self._began = time.monotonic()
        self._stopped = False
        self._point = 0
        self._point_prompts = 0
        self._point_ended = 0
        self._refusable = 0
        self._reported = (0.0, 0, 0)

    @property
    def virtual_s(self) -> float:
        """Virtual seconds since the start."""
        return (time.monotonic() - self._began) * self.settings.time_scale

    def run(self) -> None:
        """Keeps the engine's clock up with the wall's until :meth:`stop`."""
        with self._changed:
            while not self._stopped:
                self._catch_up()
                self._report()
                self._changed.notify_all()
                self._changed.wait(self._pause_s())

    def stop(self) -> None:
        """Ends :meth:`run`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def metrics(self) -> str:
        """The text of ``/metrics``, as of now."""
        with self._changed:
            self._catch_up()
            return metrics.text(self.settings, self._engine, self.virtual_s)

    def in_flight(self) -> int:
        """Requests that are running or waiting."""
        with self._changed:
            return self._engine.in_flight

    def begin_point(self, prompts: int) -> int:
        """Notes that a point of so many requests begins, and returns its number, from 1."""
        with self._changed:
            self._point += 1
            self._point_prompts = prompts
            self._point_ended = 0
            return self._point

    def refuses(self) -> bool:
        """Whether the request that comes now is one of those that shall fail."""
        if self._point == 0:
            return False
        share = self.settings.faults.fail_requests
        with self._changed:
            self._refusable += 1
            refused = int(self._refusable * share) > int((self._refusable - 1) * share)
            if refused:
                self._one_ended()
            return refused

    def answer(self, prompt_tokens: int, output_tokens: int, key: Hashable) -> Generator[int]:
        """Has one request answered: gives the number of new tokens whenever there are some.

        Closing the iterator early takes the request out of the engine.
        """
        given, reason = self.given(output_tokens)
        request = Request(prompt_tokens=prompt_tokens, output_tokens=given, key=key, end_reason=reason,
                          on_end=lambda _: self._one_ended())
        with self._changed:
            self._catch_up()
            self._engine.submit(request)
            self._changed.notify_all()
        told = 0
        try:
            while told < given:
                with self._changed:
                    while (made := self._engine.tokens_of(request)) == told:
                        self._changed.wait()
                yield made - told
                told = made
        finally:
            with self._changed:
                self._engine.abort(request)

    def load(self, load: Load) -> Generator[Sequence[Outcome] | Pace]:
        """Puts ``load`` on the engine: gives outcomes as they come (at times none), and at last the pace.

        Closing the iterator early cancels the load.
        """
        fresh: list[Outcome] = []

        def keep(outcome: Outcome) -> None:
            fresh.append(outcome)
            if outcome.error is None:
                self._one_ended()

        with self._changed:
            self._catch_up()
            loop = ClosedLoop(load, self._engine, output_tokens=self.given(load.output_tokens)[0], fails=self.refuses,
                              on_outcome=keep)
            self._changed.notify_all()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: fresh or loop.done, _IDLE_S)
                    outcomes, fresh[:] = tuple(fresh), ()
                    done = loop.done
                yield outcomes
                if done:
                    yield loop.pace
                    return
        finally:
            with self._changed:
                loop.cancel()

    def given(self, wanted: int) -> tuple[int, str]:
        """How many of ``wanted`` tokens are given, and why no more."""
        given = max(1, int(wanted * self.settings.faults.short_output))
        return given, "length" if given == wanted else "stop"

    def _hangs(self) -> bool:
        hang = self.settings.faults.hang
        return hang is not None and self._point >= hang

    def _catch_up(self) -> None:
        if not self._hangs():
            self._engine.advance(self.virtual_s, _CHUNK_STEPS)

    def _pause_s(self) -> float:
        """Real seconds until something happens; while the core lags behind, only a moment for other threads."""
        next_s = self._engine.next_event_s
        if next_s is None or self._hangs():
            return _IDLE_S
        wait_s = (next_s - self.virtual_s) / self.settings.time_scale
        lags = self.settings.time_scale == 1 or wait_s < -2 * _TICK_S
        return min(max(wait_s, _MOMENT_S if lags else _TICK_S), _IDLE_S)

    def _one_ended(self) -> None:
        """Counts an ended request of the point, and lets happen what shall happen in its middle."""
        self._point_ended += 1
        if self._point == 0 or self._point_ended != max(1, self._point_prompts // 2):
            return
        faults = self.settings.faults
        if faults.compile_in_window:
            self._log.compiled()
            self._engine.stall_s += faults.compile_in_window
        if faults.die_in_point and faults.die_in_point[0] == self._point:
            self._log.died(f"told to die in point {self._point}")
            self._die(faults.die_in_point[1])

    def _report(self) -> None:
        """Writes the periodic line when it is time for it, while there is something to do."""
        since, prompt, generated = self._reported
        now = self._engine.now
        least_s = max(_THROUGHPUT_LINE_S, _THROUGHPUT_LINE_REAL_S * self.settings.time_scale)
        if not self.settings.log_throughput or now - since < least_s:
            return
        (rank,) = self._engine.ranks
        statistics = rank.statistics
        self._reported = (now, statistics.prompt_tokens, statistics.generation_tokens)
        if rank.running or statistics.generation_tokens != generated:
            self._log.throughput(
                prompt_tok_s=(statistics.prompt_tokens - prompt) / (now - since),
                generation_tok_s=(statistics.generation_tokens - generated) / (now - since),
                running=len(rank.running), waiting=len(rank.waiting), kv_usage=rank.kv_usage,
                hit_rate=statistics.prefix_hits / statistics.prefix_queries if statistics.prefix_queries else 0.0)
