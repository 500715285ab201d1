"""How one recipe differs from another, in the words that a person would type."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import msgspec

from isambard_serve import flags, recipe, yamlfile
from isambard_serve.records import Record


class Change(Record, frozen=True):
    """One key that differs; ``before`` or ``after`` is None where a recipe does not have it.

    ``engine``: it is a flag or variable of the engine, or passed to it unchecked.
    """

    key: str
    before: Any
    after: Any
    engine: bool

    def lines(self) -> list[str]:
        """The change as removed and added lines."""
        return [f"{sign} {self._text(value)}" for sign, value in (("-", self.before), ("+", self.after))
                if value is not None]

    def _text(self, value: Any) -> str:
        if self.key.startswith("engine.args."):
            return shlex.join(flags.argv({self.key.removeprefix("engine.args."): value}))
        if self.key.startswith("engine.env."):
            return f"{self.key.removeprefix('engine.env.')}={shlex.quote(value)}"
        return f"{self.key}: {json.dumps(value, ensure_ascii=False)}"


def between(first: str, second: str) -> list[Change]:
    """What changes from the recipe ``first`` to ``second``, in the order in which the second's own file has it."""
    before, after = (_flat(msgspec.to_builtins(recipe.load(name)[0])) for name in (first, second))
    own = _flat(yamlfile.read(recipe.locate(second)))
    order = [*own, *after, *before]
    keys = dict.fromkeys(key for key in order if key in before or key in after)
    return [
        Change(key=key, before=before.get(key), after=after.get(key), engine=key.startswith("engine."))
        for key in keys
        if key != "name" and before.get(key) != after.get(key)
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as ``a.b.c``; the engine's flags are leaves, whatever they hold."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        path = f"{prefix}{key}"
        if isinstance(inner, Mapping) and prefix != "engine.args.":
            flat |= _flat(inner, f"{path}.")
        else:
            flat[path] = inner
    return flat
