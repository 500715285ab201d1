"""What a row is judged by: the benchmark's result, and what was seen of engine, client and GPUs meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from isambard_serve import enginelog
from isambard_serve.audit import Audit
from isambard_serve.enginelog import Log
from isambard_serve.errors import ServeError
from isambard_serve.plan import Point
from isambard_serve.recipe import Expect
from isambard_serve.records import ClientFacts, EngineFacts, GpuSample, Outputs, Record, Sample
from isambard_serve.run import RunDir, T, read_lines, read_record

CLIENT = "client.json"


class Evidence(Record, frozen=True):
    """What was seen beside the benchmark's own result. None, or nothing: nobody looked, or it could not be seen.

    Attributes:
        facts: what the engine's processes say of themselves.
        log: what the engine's log says up to the end of the point.
        compiled: the kernels that the log says were compiled in the window.
        looks: the looks at the engine's GPUs in the window.
        client: how the load generator fared.
        audit: whether the engine's processes are where they belong.
        outputs: what the engine answered to fixed prompts.
    """

    facts: tuple[EngineFacts, ...] = ()
    log: Log = Log()
    compiled: tuple[str, ...] | None = None
    looks: tuple[GpuSample, ...] = ()
    client: ClientFacts | None = None
    audit: Audit | None = None
    outputs: Outputs | None = None


class Measured(Record, frozen=True):
    """What a row is judged by.

    ``bench`` is the benchmark's own JSON (None: it left none), ``returncode`` how its command ended (None: it had
    to be ended), ``window`` the engine's samples from before the first request to after the last. ``ranks`` is how
    many workers the engine should have, ``version`` which vLLM it should be (None: a simulated one, which has none),
    ``variables`` what the recipe and the site set for it, ``random_weights`` whether its model has no others.
    """

    bench: dict[str, Any] | None
    returncode: int | None
    point: Point
    isl: int
    osl: int
    min_window_s: float
    window: Sequence[Sample] = ()
    expect: Expect = Expect()
    ranks: int = 1
    version: str | None = None
    variables: dict[str, str] = {}
    random_weights: bool = False
    evidence: Evidence = Evidence()

    def number(self, key: str) -> float | None:
        """The number that the benchmark calls ``key``; None if it gave none."""
        return _number((self.bench or {}).get(key))

    def numbers(self, key: str) -> list[float]:
        """The list that the benchmark calls ``key``; empty if it gave none, or not of numbers alone."""
        value = (self.bench or {}).get(key)
        found = [_number(item) for item in value] if isinstance(value, list) else []
        numbers = [item for item in found if item is not None]
        return numbers if len(numbers) == len(found) else []


def _number(value: object) -> float | None:
    """``value`` as a number; None if it is none, or too large for one."""
    with contextlib.suppress(OverflowError):
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    return None


Outcome = Literal["verified", "refuted", "unknown", "not_applicable"]


class Verdict(Record, frozen=True):
    """What a rule says of a row, and why. ``not_applicable``: the rule means nothing here."""

    outcome: Outcome
    why: str = ""


def verdict(holds: bool | None, why: str) -> Verdict:
    """``verified`` if the rule ``holds``, ``refuted`` if it does not, ``unknown`` if that cannot be told (None)."""
    return Verdict("unknown" if holds is None else "verified" if holds else "refuted", why)


class Observer:
    """Gathers the evidence of one point, or scout; made before its first request."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._log_begin = run.engine_log.stat().st_size if run.engine_log.exists() else 0

    def gathered(self, folder: Path, window: Sequence[Sample]) -> Evidence:
        """What was seen from then to now.

        Args:
            folder: the point's own.
            window: the engine's samples, which say when it began and ended.
        """
        run = self._run
        looks = [look for look in read_lines(run.gpus, GpuSample)
                 if window and window[0].time <= look.time <= window[-1].time]
        log = enginelog.read(enginelog.part(run.engine_log))
        return Evidence(
            facts=tuple(run.read_facts()),
            log=log,
            compiled=self._compiled(log.version),
            looks=tuple(looks),
            client=_read(folder / CLIENT, ClientFacts),
            audit=_read(run.binding, Audit),
            outputs=_read(run.outputs, Outputs),
        )

    def compiled(self) -> tuple[str, ...] | None:
        """The kernels that the engine's log says were compiled from then to now; None: that version's is not known."""
        return self._compiled(enginelog.read(enginelog.part(self._run.engine_log)).version)

    def _compiled(self, version: str | None) -> tuple[str, ...] | None:
        found = enginelog.compilations(enginelog.part(self._run.engine_log, self._log_begin), version)
        return None if found is None else tuple(found)


def _read(path: Path, kind: type[T]) -> T | None:
    """The record in ``path``; None if there is none that can be understood."""
    with contextlib.suppress(FileNotFoundError, ServeError):
        return read_record(path, kind)
    return None
