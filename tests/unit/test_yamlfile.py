"""YAML: what looks like one thing and would be read as another is an error that says where, and what to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from isambard_serve import yamlfile
from isambard_serve.errors import UsageError
from isambard_serve.records import Record

Write = Callable[[str, str], Path]


class Inner(Record, frozen=True):
    """A map inside a map."""

    version: str
    numbers: tuple[int, ...] = ()
    variables: dict[str, str] = {}


class Outer(Record, frozen=True, rename="kebab"):
    """A whole document."""

    engine: Inner
    job_name: str = ""
    kind: Literal["a", "b"] = "a"


@pytest.mark.parametrize(("value", "remedy"), [
    ("4:00:00", "base 60"), ("1:30", "base 60"), ("190:20:30.15", "base 60"), ("1_0:30", "base 60"),
    ("no", "true or false"), ("No", "true or false"), ("on", "true or false"), ("OFF", "true or false"),
    ("yes", "true or false"),
    ("010", "leading zero"), ("-07", "leading zero"), ("0099", "leading zero"), ("08", "leading zero"),
    (".inf", "a number"), ("-.INF", "a number"), ("+.Inf", "a number"), (".nan", "a number"), (".NaN", "a number"),
    ("2026-11-29", "as a date"), ("2026-11-29 18:12:58", "as a date"), ("2026-11-29T18:12:58Z", "as a date"),
])
def test_a_value_that_yaml_would_read_as_something_else_is_refused_with_its_place_and_a_remedy(
        write: Write, value: str, remedy: str) -> None:
    path = write("f.yaml", f"first: 1\ndeep:\n  list:\n  - x\n  - {value}\n")
    with pytest.raises(UsageError) as caught:
        yamlfile.read(path)
    assert caught.value.where == f"{path}:5:5"
    assert remedy in str(caught.value)


@pytest.mark.parametrize("value", ["4:00:00", "no", "010", "2026-11-29", ".inf", ".nan"])
def test_the_same_value_in_quotes_is_a_word(value: str) -> None:
    assert yamlfile.parse(f"a: '{value}'\nb: \"{value}\"", "x") == {"a": value, "b": value}


@pytest.mark.parametrize(("text", "value"), [
    ("0", 0), ("-1", -1), ("0.92", 0.92), ("128000", 128000), ("true", True), ("0.33.0", "0.33.0"),
    ("http://x:8000", "http://x:8000"), ("4h", "4h"), ("y", "y"), ("1:99", "1:99"), ("~", None),
])
def test_a_plain_value_is_what_it_looks_like(text: str, value: object) -> None:
    assert yamlfile.parse(f"a: {text}", "x") == {"a": value}


def test_a_trap_is_refused_as_a_key_too() -> None:
    with pytest.raises(UsageError, match="x:1:1: 'on' is ambiguous"):
        yamlfile.parse("on: true", "x")


@pytest.mark.parametrize(("text", "place"), [
    ("a: 1\nb: 2\na: 3", "3:1"),
    ("a: 1\n\"a\": 3", "2:1"),
    ("a:\n  b: 1\n  b: 2", "3:3"),
    ("- {x: 1, x: 1}", "1:10"),
])
def test_a_key_that_stands_twice_in_one_map_is_refused(write: Write, text: str, place: str) -> None:
    with pytest.raises(UsageError) as caught:
        yamlfile.parse(text, "f.yaml")
    assert caught.value.where == f"f.yaml:{place}"
    assert "stands twice" in caught.value.what
    assert "keep one" in caught.value.what


def test_anchors_may_be_used_but_merge_keys_may_not() -> None:
    assert yamlfile.parse("a: &a {x: 1}\nb: *a\n'<<': y", "f") == {"a": {"x": 1}, "b": {"x": 1}, "<<": "y"}
    with pytest.raises(UsageError, match=r"f:2:5: '<<' is not supported: .* use extends"):
        yamlfile.parse("a: &a {x: 1}\nb: {<<: *a, x: 2}", "f")


def test_a_value_that_holds_itself_is_refused_and_never_walked_for_ever() -> None:
    with pytest.raises(UsageError, match="f:1:4: an alias puts this into itself"):
        yamlfile.parse("a: &a [1, {b: *a}]", "f")


def aliases(levels: int) -> str:
    """A map whose last value stands for nine to the power of ``levels`` words."""
    lines = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, levels + 1)]
    return "\n".join(["l0: &l0 x", *lines])


def test_an_alias_of_aliases_is_looked_at_once() -> None:
    assert len(yamlfile.parse(aliases(3), "f")) == 4
    # One look at each alias of these would never end.
    with pytest.raises(UsageError, match="f: holds more than 10000 values"):
        yamlfile.parse(aliases(24), "f")


@pytest.mark.parametrize("text", [
    '!!int "x"', '!!int ""', '!!float "x"', '!!bool "x"', '!!timestamp "x"', '!!timestamp "2026-99-99"',
    '!!binary "é"', "!!int [1]", "!!map x", "!!seq x", "!!nonsense x"])
def test_a_value_that_does_not_fit_its_own_tag_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        yamlfile.parse(f"a: {text}", "f")
    assert str(caught.value.where).startswith("f")
    assert caught.value.what


@pytest.mark.parametrize("text", ["[" * 3000 + "]" * 3000, "{a: " * 3000 + "}" * 3000])
def test_a_value_too_deep_to_be_walked_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        yamlfile.parse(f"a: {text}", "f")


@pytest.mark.parametrize(("text", "where"), [
    ("a: 'x", "f:1:6"), ("a: b: c", "f:1:5"), ("\ta: 1", "f:1:1"), ("? [a]\n: b", "f:1:3"), ("a: !!set x", "f:1:4"),
    ("a: !!python/object/apply:os.system [x]", "f:1:4"), ("a: \x00", "f"),
])
def test_text_that_is_not_plain_yaml_is_refused_with_its_place(text: str, where: str) -> None:
    with pytest.raises(UsageError) as caught:
        yamlfile.parse(text, "f")
    assert caught.value.where == where


@pytest.mark.parametrize(("content", "message"), [(b"- 1", "must be a map"), (b"\xff", "cannot be read")])
def test_a_file_must_be_a_map_in_utf8(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"f.yaml: {message}"):
        yamlfile.read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.yaml: cannot be read"):
        yamlfile.read(tmp_path / "none.yaml")


def test_a_file_of_comments_alone_is_an_empty_map(write: Write) -> None:
    assert yamlfile.read(write("f.yaml", "# site: mine\n")) == {}


AWKWARD = [
    "", " ", "no", "On", "4:00:00", "1_0:30", "010", "08", "2026-11-29", "null", "~", "true", "1", "1.5", "1e5", ".inf",
    "=", "<<", "- x", "x: y", "#x", "a #b", "'", '"', "'\"'", "\\n", "two\nlines", "ends with a newline\n", "no\n",
    "\ttab", " leading", "trailing ", "&a", "*a", "!x", "%x", "@x", "`x`", "{x}", "[x]", "x, y", "|", ">", "?",
    "$(touch x)", "${HOME}", "naïve – 測試 🙂", "\x85next\u2028line", "\x07bell", "a" * 300, "word " * 60, "a\r\nb",
    "---", "...", '{"dtype":"float8e4m3","input_scale_group_size":128}', "\ufeffbom",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_whatever_is_dumped_is_parsed_back_unchanged(text: str) -> None:
    value = {"value": text, "list": [text, [text]], "deep": {"map": {text: text}}}
    assert yamlfile.parse(yamlfile.dump(value), "dumped") == value


@pytest.mark.parametrize("number", [0, -1, 10**20, 0.95, 1e-07, 1e300, True, None])
def test_numbers_are_dumped_as_numbers(number: object) -> None:
    parsed = yamlfile.parse(yamlfile.dump({"a": number}), "dumped")["a"]
    assert (parsed, type(parsed)) == (number, type(number))


@pytest.mark.parametrize(("base", "over", "merged"), [
    ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
    ({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}, {"a": {"x": 1, "y": 3}}),
    ({"a": {"x": 1, "y": 2}}, {"a": {"y": None}}, {"a": {"x": 1}}),
    ({"a": 1}, {"a": None, "b": None}, {}),
    ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
    ({"a": [1]}, {"a": {"x": 1, "y": None}}, {"a": {"x": 1}}),
    ({"a": {"x": 1}}, {"a": [1]}, {"a": [1]}),
    ({}, {"a": {"x": None}}, {"a": {}}),
])
def test_maps_merge_lists_replace_and_null_removes(base: Any, over: Any, merged: Any) -> None:
    assert yamlfile.merge(base, over) == merged


def test_merging_leaves_both_sides_as_they_were() -> None:
    base, over = {"a": {"x": [1]}}, {"a": {"y": [2]}}
    merged = yamlfile.merge(base, over)
    merged["a"]["x"].append(3)
    merged["a"]["y"].append(3)
    assert (base, over) == ({"a": {"x": [1]}}, {"a": {"y": [2]}})


def beside(name: str, named_by: Path) -> Path:
    return named_by.parent / f"{name}.yaml"


def test_a_file_is_laid_over_what_it_extends_down_to_the_root(write: Write) -> None:
    write("root.yaml", "a: 1\nb: {x: 1, y: 1}\nc: [1]")
    write("middle.yaml", "extends: root\nb: {x: 2}\nc: [2, 2]")
    leaf = write("leaf.yaml", "extends: middle\na: null\nb: {z: 3}")
    assert yamlfile.extended(leaf, beside) == {"b": {"x": 2, "y": 1, "z": 3}, "c": [2, 2]}


def test_files_that_extend_each_other_are_an_error_that_shows_the_circle(write: Write) -> None:
    write("b.yaml", "extends: c")
    write("c.yaml", "extends: a")
    with pytest.raises(UsageError, match=r"extends itself: a\.yaml → b\.yaml → c\.yaml → a\.yaml"):
        yamlfile.extended(write("a.yaml", "extends: b"), beside)


def test_a_file_extends_one_other(write: Write) -> None:
    with pytest.raises(UsageError, match=r"a\.yaml: extends: must be one name"):
        yamlfile.extended(write("a.yaml", "extends: [b, c]"), beside)


@pytest.mark.parametrize(("assignment", "result"), [
    ("engine.args.max-num-seqs=512", {"engine": {"args": {"max-num-seqs": 512, "numa-bind": True}}}),
    ("engine.args.numa-bind=null", {"engine": {"args": {}}}),
    ("bench.concurrency=[1, 2]", {"engine": {"args": {"numa-bind": True}}, "bench": {"concurrency": [1, 2]}}),
    ("note=a=b", {"engine": {"args": {"numa-bind": True}}, "note": "a=b"}),
])
def test_an_assignment_lays_one_value_over_a_map(assignment: str, result: Any) -> None:
    base = {"engine": {"args": {"numa-bind": True}}}
    assert yamlfile.assigned(base, (assignment,)) == result
    assert base == {"engine": {"args": {"numa-bind": True}}}


@pytest.mark.parametrize("assignment", ["", "model", "=x", "a..b=1", ".a=1", "a.=1",
                                        ".".join("a" * 5000) + "=1"])
def test_an_assignment_without_a_key_path_and_a_value_is_refused(assignment: str) -> None:
    with pytest.raises(UsageError, match=r"--set: .* is not KEY\.PATH=VALUE"):
        yamlfile.assigned({}, (assignment,))


@pytest.mark.parametrize("value", ["]", "4:00:00", "{a: 1, a: 2}"])
def test_an_assigned_value_meets_the_same_strict_yaml(value: str) -> None:
    with pytest.raises(UsageError, match=r"--set resources\.time:1:"):
        yamlfile.assigned({}, (f"resources.time={value}",))


@pytest.mark.parametrize(("value", "place", "what", "remedy"), [
    ({"engin": {}}, "f.yaml", "has an unknown key `engin`", "did you mean 'engine'?"),
    ({"engine": {"versoin": "1"}}, "f.yaml: engine", "has an unknown key `versoin`", "did you mean 'version'?"),
    ({"engine": {"version": "1"}, "job_name": "x"}, "f.yaml", "has an unknown key `job_name`",
     "did you mean 'job-name'?"),
    ({"engine": {"version": "1", "qqq": 1}}, "f.yaml: engine", "has an unknown key `qqq`", None),
    ({}, "f.yaml", "lacks the required key `engine`", None),
    ({"engine": {}}, "f.yaml: engine", "lacks the required key `version`", None),
    ({"engine": 5}, "f.yaml: engine", "must be a map of keys to values, got a whole number", None),
    ({"engine": [{}]}, "f.yaml: engine", "must be a map of keys to values, got a list", None),
    ({"engine": {"version": None}}, "f.yaml: engine.version", "must be text, got nothing", None),
    ({"engine": {"version": 0.33}}, "f.yaml: engine.version", "must be text, got a number", "put it in quotes"),
    ({"engine": {"version": True}}, "f.yaml: engine.version", "must be text, got true or false", "put it in quotes"),
    ({"engine": {"version": "1", "numbers": 5}}, "f.yaml: engine.numbers", "must be a list, got a whole number", None),
    ({"engine": {"version": "1", "numbers": {}}}, "f.yaml: engine.numbers",
     "must be a list, got a map of keys to values", None),
    ({"engine": {"version": "1", "numbers": [1, "x"]}}, "f.yaml: engine.numbers[1]",
     "must be a whole number, got text", None),
    ({"engine": {"version": "1"}, "kind": "c"}, "f.yaml: kind", "does not know 'c'", None),
    ({"engine": {"version": "1", "variables": {"A": "1", "B": 2, "C.D": "3"}}}, "f.yaml: engine.variables.B",
     "must be text, got a whole number", "put it in quotes"),
    ({"engine": {"version": "1", "variables": {"A": "1", 2: "2"}}}, "f.yaml: engine.variables",
     "must be text, got a whole number", "put it in quotes"),
])
def test_a_value_of_the_wrong_shape_names_its_place_and_the_nearest_known_key(
        value: Any, place: str, what: str, remedy: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        yamlfile.convert(value, Outer, "f.yaml")
    assert caught.value.where == place
    assert caught.value.what == what
    assert caught.value.remedy == remedy
