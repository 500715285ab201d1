"""YAML as people expect it: duplicate keys and YAML 1.1's surprises are errors, not values.

PyYAML reads ``4:00:00`` as 14400, ``no`` as False and ``010`` as 8, and keeps the last of two equal keys
without a word. Here each of these names its line and how to write what was meant.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

import msgspec
import yaml

from isambard_serve.errors import UsageError, nearest

T = TypeVar("T")

_TRAPS = (
    (re.compile(r"^(yes|no|on|off)$", re.IGNORECASE), "write true or false, or quote it if you mean the word"),
    (re.compile(r"^[-+]?[\d_]+(:[0-5]?\d)+(\.[\d_]*)?$"), "quote it: YAML reads it as a number in base 60"),
    (re.compile(r"^[-+]?0[\d_]+$"), "quote it, or drop the leading zero: YAML reads it as octal"),
    (re.compile(r"^[-+]?\.(inf|nan)$", re.IGNORECASE), "write a number, or quote it if you mean the word"),
    (re.compile(r"^\d{4}-\d\d?-\d\d?([Tt ].*)?$"), "quote it: YAML reads it as a date"),
)

_WORDS = {"array": "a list", "object": "a map of keys to values", "str": "text", "int": "a whole number",
          "float": "a number", "bool": "true or false", "null": "nothing"}
"""msgspec's names of types, in the words of people who write YAML."""

DEEPEST = 10
"""How many keys a path may have."""

MOST_NODES = 10_000
"""How many values a file may hold, its aliases written out."""

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _refuse(message: str, node: yaml.Node) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)


def _refuse_surprises(node: yaml.Node, above: tuple[yaml.Node, ...], checked: set[int]) -> None:
    """Raises ConstructorError where ``node`` or anything below it would not become what its text seems to say."""
    if node in above:
        _refuse("an alias puts this into itself", node)
    if id(node) in checked:
        return
    checked.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        # The C loader gives a plain scalar the style "", the Python one None.
        for pattern, hint in () if node.style else _TRAPS:
            if pattern.match(node.value):
                _refuse(f"{node.value!r} is ambiguous: {hint}", node)
        return
    if isinstance(node, yaml.MappingNode):
        _refuse_keys([key for key, _ in node.value])
    for part in node.value:
        for child in part if isinstance(part, tuple) else (part,):
            _refuse_surprises(child, (*above, node), checked)


def _refuse_keys(keys: list[yaml.Node]) -> None:
    seen: set[str] = set()
    for key in keys:
        if not isinstance(key, yaml.ScalarNode):
            _refuse("a key must be a word", key)
        if key.tag == "tag:yaml.org,2002:merge":
            # PyYAML 6.0.4 lets the wrong one of two equal keys win, by where Python put their text in memory.
            _refuse("'<<' is not supported: write the keys out, or use extends", key)
        if key.value in seen:
            _refuse(f"the key {key.value!r} stands twice in one map; keep one", key)
        seen.add(key.value)


def parse(text: str, where: str) -> Any:
    """The value that ``text`` holds; ``where`` names it in errors.

    Raises:
        UsageError: the text is not YAML, repeats a key, or holds a YAML 1.1 surprise.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _refuse_surprises(node, (), set())
            if _size(node, {}) > MOST_NODES:
                raise UsageError(f"holds more than {MOST_NODES} values", where=where)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise UsageError(error.problem or str(error), where=place) from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # PyYAML lets the errors of a value that does not fit its own tag (!!int "x") through as they are.
        raise UsageError(str(error) or type(error).__name__, where=where) from error


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values ``node`` stands for with its aliases written out: few lines can stand for billions."""
    if id(node) not in known:
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        children = [child for part in parts for child in (part if isinstance(part, tuple) else (part,))]
        known[id(node)] = 1 + sum(_size(child, known) for child in children)
    return known[id(node)]


def read(path: Path) -> dict[str, Any]:
    """The map in the file ``path``, empty if there is nothing but comments.

    Raises:
        UsageError: it cannot be read, or is not a map.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path)) from error
    value = parse(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError("must be a map of keys to values", where=str(path))
    return value


def dump(value: Any) -> str:
    """``value`` as YAML text, in the order of its keys, that :func:`parse` reads back unchanged."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper, except that text :func:`parse` would refuse or change is always quoted."""


def _quoted_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "'" if any(pattern.match(text) for pattern, _ in _TRAPS) else None
    if any(separator in text for separator in "\x85\u2028\u2029"):
        style = '"'  # in every other style these line ends would be folded like any other
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


def extended(path: Path, locate: Callable[[str, Path], Path], reader: Callable[[Path], dict[str, Any]] = read,
             seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The map in ``path`` laid over the one that its ``extends:`` names, and so on to the root.

    Args:
        locate: ``(name, the file that names it) -> Path`` of the file to extend.
        reader: gives the map in one file.

    Raises:
        UsageError: a file extends itself, directly or by way of others, or cannot be read.
    """
    path = path.resolve()
    if path in seen:
        chain = " → ".join(p.name for p in (*seen, path))
        raise UsageError(f"extends itself: {chain}", where=str(path), remedy="break the circle")
    value = reader(path)
    parent = value.pop("extends", None)
    if parent is None:
        return merge({}, value)
    if not isinstance(parent, str):
        raise UsageError("must be one name", where=f"{path}: extends")
    return merge(extended(locate(parent, path), locate, reader, (*seen, path)), value)


def assigned(value: Mapping[str, Any], assignments: tuple[str, ...]) -> dict[str, Any]:
    """``value`` with each ``key.path=YAML`` laid over it (``null`` removes the key)."""
    result = dict(value)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not all(path.split(".")) or len(path.split(".")) > DEEPEST:
            raise UsageError(f"{assignment[:80]!r} is not KEY.PATH=VALUE", where="--set")
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
        text = str(error).partition(" - at ")[0]
        path = _key_path(value, kind, error)
        unknown = re.search(r"unknown field `([^`]+)`", text)
        remedy = nearest(unknown[1], _field_names(kind)) if unknown else None
        if re.fullmatch(r"Expected `str`, got `(int|float|bool)`", text):
            remedy = "put it in quotes"
        raise UsageError(_plain(text), where=f"{where}: {path}" if path else where, remedy=remedy) from error


def _plain(text: str) -> str:
    """msgspec's complaint in plain words."""
    types = re.fullmatch(r"Expected `([^`]+)`, got `([^`]+)`", text)
    if types:
        wanted, got = (" or ".join(_WORDS.get(word, word) for word in part.split(" | ")) for part in types.groups())
        return f"must be {wanted}, got {got}"
    for jargon, word in (("Object contains unknown field", "has an unknown key"),
                         ("Object missing required field", "lacks the required key"),
                         ("Invalid enum value", "does not know"), ("Expected `", "must be `")):
        text = text.replace(jargon, word)
    return text


def _key_path(value: Any, kind: Any, error: msgspec.ValidationError) -> str:
    """Where in ``value`` the conversion failed, such as ``engine.env.NAME``; "" at its root.

    msgspec writes ``[...]`` for some key of a map: it is the one that fails also when it stands there alone.
    """
    steps: list[Any] = []
    path = re.search(r"`\$([^`]*)`$", str(error))
    for name, index in re.findall(r"\.(\w[^.\[]*)|\[(\d+|\.\.\.)\]", path[1] if path else ""):
        if index == "...":
            keys = [key for key, item in _at(value, steps).items()
                    if _complaint(_with(value, steps, {key: item}), kind) == str(error)]
            steps += keys[:1]
        else:
            steps.append(int(index) if index else name)
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


def _complaint(value: Any, kind: Any) -> str | None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return str(error)
    return None


def _at(value: Any, steps: list[Any]) -> Any:
    for step in steps:
        value = value[step]
    return value


def _with(value: Any, steps: list[Any], part: Any) -> Any:
    """A copy of ``value`` in which ``part`` stands at ``steps``."""
    if not steps:
        return part
    copied = copy.copy(value)
    copied[steps[0]] = _with(value[steps[0]], steps[1:], part)
    return copied


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
