"""YAML as people expect it: duplicate keys and YAML 1.1's surprises are errors, not values.

PyYAML reads ``4:00:00`` as 14400, ``no`` as False and ``010`` as 8, and keeps the last of two equal keys
without a word. Here each of these names its line and how to write what was meant.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
import yaml

from isambard_serve.errors import UsageError, nearest

T = TypeVar("T")

_TRAPS = (
    (re.compile(r"^(yes|no|on|off)$", re.IGNORECASE), "write true or false, or quote it if you mean the word"),
    (re.compile(r"^[-+]?\d+(:[0-5]?\d)+(\.\d*)?$"), "quote it: YAML reads it as a number in base 60"),
    (re.compile(r"^[-+]?0[0-7_]+$"), "quote it, or drop the leading zero: YAML reads it as octal"),
    (re.compile(r"^\d{4}-\d\d?-\d\d?([Tt ].*)?$"), "quote it: YAML reads it as a date"),
)


class _StrictLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader that refuses duplicate keys and YAML 1.1's surprises."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice in one map; keep one", key.start_mark
                )
            seen.add(key.value)
        result: dict[Any, Any] = super().construct_mapping(node, deep)
        return result


def _refuse_traps(root: yaml.Node) -> None:
    stack = [root]
    while stack:
        current = stack.pop()
        if isinstance(current, yaml.ScalarNode):
            if current.style is None:
                for pattern, hint in _TRAPS:
                    if pattern.match(current.value):
                        message = f"{current.value!r} is ambiguous: {hint}"
                        raise yaml.constructor.ConstructorError(None, None, message, current.start_mark)
        elif isinstance(current, yaml.SequenceNode):
            stack.extend(current.value)
        elif isinstance(current, yaml.MappingNode):
            stack.extend(part for pair in current.value for part in pair)


def parse(text: str, where: str) -> Any:
    """The value that ``text`` holds; ``where`` names it in errors.

    Raises:
        UsageError: the text is not YAML, repeats a key, or holds a YAML 1.1 surprise.
    """
    loader = _StrictLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_traps(node)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise UsageError(error.problem or str(error), where=place) from error
    except yaml.YAMLError as error:
        raise UsageError(str(error), where=where) from error
    finally:
        loader.dispose()


def read(path: Path) -> dict[str, Any]:
    """The map in the file ``path``. Raises UsageError when it cannot be read or is not a map."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path)) from error
    value = parse(text, str(path))
    if not isinstance(value, dict):
        raise UsageError("must be a map of keys to values", where=str(path))
    return value


def dump(value: Any) -> str:
    """``value`` as YAML text, in the order of its keys, that :func:`parse` reads back unchanged."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper, except that a word :func:`parse` would refuse is always quoted."""


def _quoted_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "'" if any(pattern.match(text) for pattern, _ in _TRAPS) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted_text)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` changed by ``over``: maps merge key by key, ``None`` removes a key, anything else replaces."""
    result = {key: copy.deepcopy(value) for key, value in base.items()}
    for key, value in over.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            inherited = result.get(key)
            result[key] = merge(inherited if isinstance(inherited, Mapping) else {}, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def extended(path: Path, locate: Callable[[str, Path], Path], seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The map in ``path`` laid over the one that its ``extends:`` names, and so on to the root.

    Args:
        locate: ``(name, folder of the file that names it) -> Path`` of the file to extend.

    Raises:
        UsageError: a file extends itself, directly or by way of others, or cannot be read.
    """
    path = path.resolve()
    if path in seen:
        chain = " → ".join(p.name for p in (*seen, path))
        raise UsageError(f"extends itself: {chain}", where=str(path), remedy="break the circle")
    value = read(path)
    parent = value.pop("extends", None)
    if parent is None:
        return merge({}, value)
    if not isinstance(parent, str):
        raise UsageError("must be one name", where=f"{path}: extends")
    return merge(extended(locate(parent, path.parent), locate, (*seen, path)), value)


def assigned(value: Mapping[str, Any], assignments: tuple[str, ...]) -> dict[str, Any]:
    """``value`` with each ``key.path=YAML`` laid over it (``null`` removes the key)."""
    result = dict(value)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not all(path.split(".")):
            raise UsageError(f"{assignment!r} is not KEY.PATH=VALUE", where="--set")
        leaf: Any = parse(text, f"--set {path}")
        for key in reversed(path.split(".")):
            leaf = {key: leaf}
        result = merge(result, leaf)
    return result


def convert(value: Any, kind: type[T], where: str) -> T:
    """``value`` as a ``kind`` (a msgspec struct).

    Raises:
        UsageError: a key is unknown (with the nearest known one), missing, or of the wrong type.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        text, _, at = message.partition(" - at `")
        place = f"{where}: {at.rstrip('`').removeprefix('$.')}" if at.strip("`$") else where
        unknown = re.search(r"unknown field `([^`]+)`", text)
        remedy = nearest(unknown[1], _field_names(kind)) if unknown else None
        raise UsageError(text.replace("Object contains", "has an").replace("field", "key"), where=place,
                         remedy=remedy) from error


def _field_names(kind: Any) -> set[str]:
    """Every key that a struct, or a struct inside it, knows."""
    names: set[str] = set()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            names.add(field.encode_name)
        for hint in get_type_hints(kind).values():
            names |= _field_names(hint)
    for part in get_args(kind):
        names |= _field_names(part)
    return names
