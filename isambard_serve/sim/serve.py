"""``serve``: the simulated engine's life, from its command line to the signal that ends it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence

from isambard_serve.sim import facts
from isambard_serve.sim import settings as parsing
from isambard_serve.sim.log import Log
from isambard_serve.sim.server import SimServer

_ENDS = frozenset({signal.SIGTERM, signal.SIGINT})


def serve(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Serves until SIGTERM or SIGINT and returns the exit code: 0, as vLLM's own is then.

    Args:
        words: the command line after ``serve``.

    Raises:
        UsageError: the command line cannot be used.
    """
    settings = parsing.parse(words, environment)
    # Blocked and waited for: no handler can run at a bad moment. Threads inherit this.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    log = Log()
    log.begin(settings)
    began = time.monotonic()
    if settings.faults.slow_start and signal.sigtimedwait(_ENDS, settings.faults.slow_start):
        return _ended(log)
    if settings.faults.die_at_start is not None:
        log.died("told to die at start")
        die(settings.faults.die_at_start)
    if settings.kv_tokens < settings.max_model_len:
        log.died(f"ValueError: to serve one request of {settings.max_model_len} tokens, more KV cache is needed than "
                 f"the {settings.kv_tokens} tokens there is room for. Try increasing `gpu_memory_utilization` or "
                 "decreasing `max_model_len`.")
        return 1
    log.loaded(settings, time.monotonic() - began)
    try:
        server = SimServer(settings, log, die)
    except OSError as error:
        log.died(f"{settings.host}:{settings.port}: {error}")
        return 1
    facts.write(settings)
    log.listening(server.url)
    server.start()
    signal.sigwait(_ENDS)
    return _ended(log)


def _ended(log: Log) -> int:
    log.line("[shutdown] API server: shutdown triggered", "launcher.py:254")
    log.plain("INFO:     Application shutdown complete.")
    return 0


def die(code: int) -> None:
    """Ends the process at once with exit code ``code``, or by signal ``-code``."""
    if code < 0:
        # To this very thread: the main one may be waiting for the signal.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        signal.raise_signal(-code)
    os._exit(code)
