"""The engine's flags: which names a version of ``vllm serve`` knows, and how a recipe's ``args`` become argv.

The lists in ``engine_flags/VERSION.txt`` were read off each version's own argument parser.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from isambard_serve import shipped
from isambard_serve.errors import UsageError, nearest

OWNED = frozenset({"host", "port", "uds", "api-key", "config", "model", "served-model-name", "headless"})
"""Flags that the toolkit sets itself: only the node knows them, or they would hide what a recipe says."""

SECRET = frozenset({"api-key", "hf-token"})
"""Flags whose value is a secret. Without a value ``--hf-token`` has the engine read the token's file."""

BENCH_OWNED = frozenset({
    "backend", "base-url", "endpoint", "host", "port", "model", "dataset-name", "num-prompts", "max-concurrency",
    "request-rate", "random-input-len", "random-output-len", "input-len", "output-len", "ignore-eos", "seed",
    "save-result", "result-dir", "result-filename", "metadata", "percentile-metrics", "metric-percentiles",
    "append-result", "profile", "random-prefix-len", "random-range-ratio", "num-warmups", "ramp-up-strategy",
    "ramp-up-start-rps", "ramp-up-end-rps",
})
"""Flags of ``vllm bench serve`` that the toolkit sets itself, or that would change what a row means."""


def gives_secret(word: str) -> bool:
    """Whether ``word`` is a flag for a secret, written in any way that the engine's parser takes for it."""
    name = word.partition("=")[0].removeprefix("--").replace("_", "-")
    return word.startswith("--") and bool(name) and any(flag.startswith(name) for flag in SECRET)


def known(version: str) -> frozenset[str] | None:
    """The flags of ``vllm serve`` at ``version``, without dashes; None for a version without a list."""
    path = shipped.folder("engine_flags") / f"{version}.txt"
    if not path.is_file():
        return None
    return frozenset(path.read_text(encoding="utf-8").split())


def versions() -> list[str]:
    """The engine versions whose flags are known."""
    return sorted(path.stem for path in shipped.folder("engine_flags").glob("*.txt"))


def check(args: Mapping[str, Any], version: str, where: str) -> str | None:
    """A warning when the version has no list, None when every flag is known.

    Raises:
        UsageError: a flag is unknown to that version, or set by the toolkit itself.
    """
    for name in args:
        if name in OWNED:
            raise UsageError(f"--{name} is set by isambard-serve itself", where=f"{where}: engine.args.{name}",
                             remedy="take it out of the recipe")
    names = known(version)
    if names is None:
        return f"no list of flags for engine {version} (known: {', '.join(versions())}): engine.args not checked"
    for name, value in args.items():
        spelt = f"no-{name}" if value is False else name
        if spelt not in names:
            raise UsageError(
                f"vllm serve {version} has no flag --{spelt}", where=f"{where}: engine.args.{name}",
                remedy=nearest(spelt, names) or "if it is right all the same, put it into engine.extra_args",
            )
    return None


def argv(args: Mapping[str, Any]) -> list[str]:
    """``args`` as command-line words, in their order.

    true is a bare flag, false is ``--no-x``, a list gives one word each, a map is compact JSON.
    """
    words: list[str] = []
    for name, value in args.items():
        if value is True:
            words.append(f"--{name}")
        elif value is False:
            words.append(f"--no-{name}")
        elif isinstance(value, Mapping):
            words += [f"--{name}", json.dumps(value, separators=(",", ":"))]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            words += [f"--{name}", *(str(item) for item in value)]
        else:
            words += [f"--{name}", str(value)]
    return words
