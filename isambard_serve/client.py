"""The load generator: one process beside the engine that sends load after load, or a command for each.

``vllm bench serve`` costs about 8 s of imports each time, while the GPUs wait. So the benchmark stays in a process
of its own (:mod:`isambard_serve.inclient`), which is told of each load by a line on its input. Where this version
of the engine does not allow it, each load is a command again.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from isambard_serve import process, shipped
from isambard_serve.engine import parse_metrics
from isambard_serve.records import ClientFacts, Sample
from isambard_serve.run import write_whole

READY_S = 300.0
"""How long the process may take to import the benchmark: from a cold, shared file system it takes its time."""

STOP_S = 5.0
"""How long the process may take to break off a load, or to end when nobody needs it, before it is ended."""

COMMAND_GRACE_S = 10.0
"""How long a command may take to end when it is asked to."""


class Load(Protocol):
    """A load on its way to the engine."""

    facts: ClientFacts | None
    """How the load generator fared, once the load has ended by itself; None if nobody looked."""

    counters: tuple[Sample, Sample] | None
    """The engine's metrics right before and right after, once it has ended; None if nobody read them."""

    def ended(self, within_s: float) -> int | None:
        """The benchmark's exit code if it ends within ``within_s``, else None."""

    def stop(self) -> None:
        """Breaks it off, unless it has ended: when this returns, the connections of its requests are closed."""


class Client:
    """Sends loads to one engine, one after another.

    Args:
        command: starts the process that stays.
        script: where that process's program is put; ``command`` names it.
        fallback: the words before a load's own where each load has to be a command.
        env: the variables of either.
        metrics: the URL of the engine's metrics, as seen from where they run.
        log: what the process says between two loads is appended there.
        note: is told why there is no such process, if there cannot be one.
    """

    def __init__(self, *, command: Sequence[str], script: Path, fallback: Sequence[str], env: Mapping[str, str],
                 metrics: str, log: Path, note: Callable[[str], None]) -> None:
        self._command = command
        self._script = script
        self._fallback = fallback
        self._env = env
        self._metrics = metrics
        self._log = log
        self._note = note
        self._line: _Line | None = None
        self._unfit = False

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.hang_up()

    def settled(self, within_s: float) -> bool:
        """Whether it is known how loads are sent, waiting for that no longer than ``within_s``.

        The first call starts the process, which imports for a while.
        """
        if self._unfit or (self._line and self._line.ready):
            return True
        try:
            self._line = self._line or self._started()
            word = self._line.hear(within_s)
        except (OSError, EOFError) as error:
            self.give_up(f"it could not be started: {error}")
            return True
        if word is None:
            if self._line.age_s > READY_S:
                self.give_up(f"it was not ready within {READY_S:.0f} s")
            return self._unfit
        if "unfit" in word:
            self.give_up(str(word["unfit"]))
        else:
            self._line.ready = True
        return True

    def start_point(self, words: Sequence[str], log: Path) -> Load:
        """Starts a load, and waits until it is :meth:`settled` how. The one before must have ended.

        Args:
            words: what stands after ``vllm bench serve``.
            log: what the benchmark says is appended there.
        """
        while not self.settled(1.0):
            pass
        if self._line:
            return _Asked(self, self._line, {"words": [*words], "log": str(log), "metrics": self._metrics})
        return _Command(process.start([*self._fallback, *words], env=self._env, log=log))

    def give_up(self, why: str) -> None:
        """Has every load be a command from now on."""
        self._unfit = True
        self.hang_up()
        self._note(f"each load is a command of its own: {why}")

    def hang_up(self) -> None:
        """Ends the process, if there is one. The next load starts another."""
        line, self._line = self._line, None
        if line:
            line.hang_up()

    def _started(self) -> _Line:
        self._script.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(self._script, (shipped.folder("inclient") / "bench_client.py").read_bytes())
        return _Line(process.converse(self._command, env=self._env, log=self._log))


class _Line:
    """The two pipes to the process."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdin is not None  # noqa: S101 - it was started with pipes
        assert child.stdout is not None  # noqa: S101
        self._child = child
        self._to, self._from = child.stdin, child.stdout
        self._heard = b""
        self._began = time.monotonic()
        self.ready = False

    @property
    def age_s(self) -> float:
        """Seconds since it was opened."""
        return time.monotonic() - self._began

    def say(self, **message: Any) -> None:
        """Sends a message. Nothing happens if nobody listens any more: :meth:`hear` tells."""
        with contextlib.suppress(BrokenPipeError):
            self._to.write(json.dumps(message).encode() + b"\n")

    def hear(self, within_s: float) -> dict[str, Any] | None:
        """The next message, or None if none comes within ``within_s``.

        Raises:
            EOFError: the process has ended.
        """
        limit = time.monotonic() + within_s
        while True:
            line, end, rest = self._heard.partition(b"\n")
            if end:
                self._heard = rest
                with contextlib.suppress(ValueError):  # Slurm and containers say things of their own at times
                    message = json.loads(line)
                    if isinstance(message, dict):
                        return message
                continue
            if not select.select([self._from], [], [], max(0.0, limit - time.monotonic()))[0]:
                return None
            data = os.read(self._from.fileno(), 1 << 16)
            if not data:
                raise EOFError("it has ended: client.log may say why")
            self._heard += data

    def hang_up(self) -> int:
        """Ends the process and returns its exit code."""
        with contextlib.suppress(BrokenPipeError):
            self._to.close()
        process.ended(self._child, STOP_S)
        code = process.stop(self._child, STOP_S)
        self._from.close()
        return code


class _Asked:
    """A load that the process sends."""

    def __init__(self, client: Client, line: _Line, request: dict[str, Any]) -> None:
        self.facts: ClientFacts | None = None
        self.counters: tuple[Sample, Sample] | None = None
        self._client = client
        self._line = line
        self._over = False
        self._returncode: int | None = None
        line.say(**request)

    def ended(self, within_s: float) -> int | None:
        if self._over:
            return self._returncode
        try:
            answer = self._line.hear(within_s)
        except EOFError:
            self._over = True
            self._returncode = self._line.hang_up() or 1
            self._client.hang_up()
            return self._returncode
        if answer is not None:
            self._over = True
            self._returncode = answer["returncode"]
            self.facts = ClientFacts(cpu_share=answer["cpu_share"], loop_lag_p99_ms=answer["loop_lag_p99_ms"])
            if answer["before"] and answer["after"]:
                self.counters = _sample(answer["before"]), _sample(answer["after"])
            if self._returncode:
                self._client.give_up(f"a load ended with {self._returncode} there")
        return self._returncode

    def stop(self) -> None:
        if not self._over:
            self._line.say(stop=True)
            self.ended(STOP_S)
        if not self._over:
            self._over = True
            self._client.hang_up()


def _sample(told: Mapping[str, Any]) -> Sample:
    return parse_metrics(told["text"], now=told["time"], scrape_ms=told["scrape_ms"])


class _Command:
    """A load that is a command of its own."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.facts: ClientFacts | None = None
        self.counters: tuple[Sample, Sample] | None = None
        self._child = child

    def ended(self, within_s: float) -> int | None:
        return process.ended(self._child, within_s)

    def stop(self) -> None:
        process.stop(self._child, COMMAND_GRACE_S)
