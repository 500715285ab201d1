"""Faults that the simulated engine plants on demand: ``serve --sim-fault NAME[=VALUE]``, as often as wanted.

A *point* is one run of ``bench serve``, counted from 1; its middle is when half of its requests have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isambard_serve.errors import UsageError


@dataclass(frozen=True)
class Faults:
    """What shall go wrong; by default nothing does. The names are those of :data:`KNOWN`."""

    die_at_start: int | None = None
    die_in_point: tuple[int, int] | None = None
    hang: int | None = None
    slow_start: float = 0.0
    fail_requests: float = 0.0
    short_output: float = 1.0
    warm_prefix_cache: float = 0.0
    wrong_moe_backend: str | None = None
    slow_client: float = 1.0
    compile_in_window: float = 0.0
    preempt: int = 0
    odd_rank: int | None = None
    lost_variable: str = ""
    no_facts: bool = False
    throttle: int | None = None
    busy_client: bool = False
    hidden_queue: float = 0.0
    broken_output: str = ""


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError(text)
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def _positive(text: str) -> int:
    value = _count(text)
    if value == 0:
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _kind(text: str) -> str:
    if text not in ("empty", "repeated", "garbage"):
        raise ValueError(text)
    return text


def _point_and_code(text: str) -> tuple[int, int]:
    point, _, code = text.partition(":")
    return _positive(point), int(code or "1")


@dataclass(frozen=True)
class Known:
    """One fault: how its value is written, which value it has if none is given (None: one must be), what it does."""

    value: str
    default: str | None
    does: str
    read: Callable[[str], Any]


KNOWN = {
    "die-at-start": Known("CODE", "1", "dies while it loads, with exit code CODE (-9: by that signal)", int),
    "die-in-point": Known("N[:CODE]", None, "dies in the middle of point N, with exit code CODE (1; -9: by that "
                          "signal)", _point_and_code),
    "hang": Known("N", "0", "/health says 200, and from point N on (0: from the start) no request is answered", _count),
    "slow-start": Known("SECONDS", None, "loads for so many real seconds", _seconds),
    "fail-requests": Known("SHARE", None, "answers this share of each point's requests with HTTP 500", _share),
    "short-output": Known("SHARE", "0.5", "stops after this share of the tokens asked for", _share),
    "warm-prefix-cache": Known("SHARE", "0.5", "finds this share of every prompt in the prefix cache", _share),
    "wrong-moe-backend": Known("NAME", "", "runs this MoE backend (marlin instead of humming, else humming) "
                               "whatever --moe-backend says", str),
    "odd-rank": Known("RANK", "1", "has this rank alone run another MoE backend, which no log line tells", _count),
    "lost-variable": Known("NAME", "VLLM_HUMMING_INPUT_QUANT_CONFIG", "keeps this variable from the workers", str),
    "no-facts": Known("", "", "writes no facts, as without the plugin", lambda _: True),
    "throttle": Known("RANK", "0", "has this rank's GPU lower its clock for heat", _count),
    "busy-client": Known("", "", "the client spends all of a core on something else (at a time scale of 1)",
                         lambda _: True),
    "hidden-queue": Known("SECONDS", "0.5", "holds each request for so long before the engine counts it (at a time "
                          "scale of 1)", _seconds),
    "broken-output": Known("KIND", "repeated", "answers the fixed prompts with nothing (empty), one token "
                           "(repeated) or no text (garbage)", _kind),
    "slow-client": Known("SHARE", "0.5", "the client reaches this share of the concurrency", _share),
    "compile-in-window": Known("SECONDS", "5", "compiles a kernel in the middle of each point, for so many virtual "
                               "seconds", _seconds),
    "preempt": Known("STEPS", "16", "preempts the newest sequence of each rank after every so many steps", _positive),
}
"""Name → fault. The one table behind the parser and the help."""


def parse(texts: Sequence[str]) -> Faults:
    """The faults in ``NAME[=VALUE]`` texts.

    Raises:
        UsageError: an unknown name, or a value that cannot be used.
    """
    faults = Faults()
    for text in texts:
        name, _, value = text.partition("=")
        known = KNOWN.get(name)
        if known is None:
            raise UsageError(f"there is no fault {name!r}", where="--sim-fault", remedy=f"known: {', '.join(KNOWN)}")
        given = value or known.default
        try:
            if given is None:
                raise ValueError(given)
            faults = replace(faults, **{name.replace("-", "_"): known.read(given)})
        except ValueError:
            raise UsageError(f"{text!r} cannot be used", where="--sim-fault",
                             remedy=f"write {name}={known.value}: {known.does}") from None
    return faults


def help_text() -> str:
    """All faults, one a line."""
    def spelt(name: str, known: Known) -> str:
        if not known.value:
            return name
        return f"{name}={known.value}" if known.default is None else f"{name}[={known.value}]"
    return "".join(f"  {spelt(name, known):<30} {known.does}\n" for name, known in KNOWN.items())
