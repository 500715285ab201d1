"""The engine's log: what each version of vLLM writes where, in one table, and what a log says.

The log decides nothing about a run; it may verify or refute a row. A version that is not in the table is not read:
its lines may mean something else. The patterns are tested against recorded logs (0.26 and 0.32) and were compared
with the sources of all three.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from isambard_serve.records import Record

_VERSION = re.compile(r"Initializing a V1 LLM engine \(v([\w.+]+)\)")

_EVERY = {
    # Said by the first local rank only, once.
    "moe_backend": r"Using '?(\w+)'? (?:Mxfp4|MxFp8|NvFp4|Fp8|Int8|WNA16|W4A8|W4A8 Int8|Unquantized) MoE backend",
    "attention_backend": r"Using (?:AttentionBackendEnum\.)?(\w+) attention backend out of potential backends",
    "kv_cache_dtype": r"Using (?:DeepSeek's (\w+) KV cache format|(\w+) data type to store kv cache)",
    "weights_gib": r"Model loading took ([\d.]+) GiB memory and",
    "graphs_gib": r"Graph capturing finished in \d+ secs, took ([\d.]+) GiB",
    "init_s": r"init engine \(profile, create kv cache, warmup model\) took ([\d.]+) s",
    "kv_cache_tokens": r"KV cache size: ([\d,]+) tokens, Maximum concurrency for",
    "monitors": r"Kernel JIT monitor (activated)",
    # TileLang says so itself, on each rank; of the rest only vLLM's monitor speaks, once for each kernel, and for
    # the first rank only unless it is told to be verbose.
    "compiled": r"(?:(\w+ (?:kernel )?JIT compilation during inference: \S+)"
                r"|(TileLang begins to compile kernel \S+)|(Triton autotuning for function \S+)"
                r"|(Compiling a graph for compile range \S+))",
    "verbose": r"non-default args: \{.*'(jit_monitor_verbose)': True",
}

PATTERNS: Mapping[str, Mapping[str, str]] = {
    "0.26": _EVERY | {
        "weights_gib": r"Model loading took ([\d.]+) GiB (?:memory )?and",
        "kv_cache_tokens": r"GPU KV cache size: ([\d,]+) tokens",
    },
    "0.32": _EVERY,
    "0.33": _EVERY,
}
"""Minor version → what is looked for → pattern; the group that matched is what was found."""


class Log(Record, frozen=True):
    """What an engine's log says. ``known`` is whether its version's lines are; if not, nothing else is told.

    Attributes:
        moe_backend: the MoE backends named, by the first local rank alone; None: none was.
        attention_backend: the attention backends named.
        kv_cache_dtype: the KV cache's types named.
        kv_cache_tokens: the smallest KV cache of a DP rank: a bound, and for hybrid caches a bad one.
        weights_gib: the weights of the rank that has most.
        graphs_gib: the CUDA graphs of the rank that has most.
        init_s: how long the engine took to profile, make its cache and warm up.
        monitors: whether vLLM watches for kernels that are compiled while it serves.
        verbose: whether it names each one, on each rank, rather than each kernel's first.
        compiled: the kernels that were compiled since it watches, in order.
    """

    version: str | None = None
    known: bool = False
    moe_backend: tuple[str, ...] | None = None
    attention_backend: tuple[str, ...] | None = None
    kv_cache_dtype: tuple[str, ...] | None = None
    kv_cache_tokens: int | None = None
    weights_gib: float | None = None
    graphs_gib: float | None = None
    init_s: float | None = None
    monitors: bool = False
    verbose: bool = False
    compiled: tuple[str, ...] = ()


def read(lines: Sequence[str]) -> Log:
    """What the log ``lines`` say, from its beginning."""
    version = next((match[1] for line in lines if (match := _VERSION.search(line))), None)
    patterns = _patterns(version)
    found: dict[str, list[str]] = {}
    for line in lines if patterns else ():
        for what, pattern in () if _is_access(line) else patterns.items():
            match = pattern.search(line)
            if match and (what != "compiled" or "monitors" in found):  # before that it warms up
                found.setdefault(what, []).append(_group(match))
    return _log(version, found)


def _group(match: re.Match[str]) -> str:
    """The group that matched."""
    return next(group for group in match.groups() if group)


def _log(version: str | None, found: Mapping[str, list[str]]) -> Log:
    def names(what: str) -> tuple[str, ...] | None:
        return tuple(sorted({name.lower() for name in found[what]})) if what in found else None

    def numbers(what: str) -> list[float]:
        return [float(number.replace(",", "")) for number in found.get(what, ())]

    attention = names("attention_backend")
    return Log(
        version=version,
        known=bool(_patterns(version)),
        moe_backend=names("moe_backend"),
        attention_backend=tuple(name.upper() for name in attention) if attention else None,
        kv_cache_dtype=names("kv_cache_dtype"),
        kv_cache_tokens=int(min(numbers("kv_cache_tokens"))) if "kv_cache_tokens" in found else None,
        weights_gib=max(numbers("weights_gib"), default=None),
        graphs_gib=max(numbers("graphs_gib"), default=None),
        init_s=max(numbers("init_s"), default=None),
        monitors="monitors" in found,
        verbose="verbose" in found,
        compiled=tuple(found.get("compiled", ())),
    )


def compilations(lines: Iterable[str], version: str | None) -> list[str] | None:
    """The kernels that ``lines`` of a log of ``version`` say were compiled; None if that version is not known."""
    pattern = _patterns(version).get("compiled")
    if pattern is None:
        return None
    return [_group(match) for line in lines if not _is_access(line) and (match := pattern.search(line))]


def _patterns(version: str | None) -> dict[str, re.Pattern[str]]:
    minor = ".".join((version or "").split(".")[:2])
    return {what: re.compile(pattern) for what, pattern in PATTERNS.get(minor, {}).items()}


def _is_access(line: str) -> bool:
    """Whether ``line`` tells of a request: most do."""
    return "INFO:     " in line and " HTTP/1." in line


def part(path: Path, begin: int = 0, end: int | None = None) -> list[str]:
    """The lines of the log ``path`` from byte ``begin`` to ``end`` (None: its end); none if there is no log."""
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            content = file.read() if end is None else file.read(max(0, end - begin))
    except FileNotFoundError:
        return []
    return content.decode(errors="replace").splitlines()
