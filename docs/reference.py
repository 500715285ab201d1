"""Writes docs/reference.md from the code: commands, recipe and site keys, the run directory, reason codes.

python docs/reference.py          # writes it
python docs/reference.py --check  # exits 1 if it is stale
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
import msgspec

from isambard_serve import cli, image, recipe, records, run, site, validity

TARGET = Path(__file__).with_name("reference.md")


def commands() -> str:
    """Every command's help, as it is shown."""
    return "\n".join(_helps(cli.main, click.Context(cli.main, info_name="isambard-serve",
                                                    **cli.main.context_settings), ""))


def _helps(group: click.Group, context: click.Context, prefix: str) -> list[str]:
    parts = []
    for name, command in sorted(group.commands.items()):
        child = click.Context(command, info_name=name, parent=context, max_content_width=100, terminal_width=100)
        parts.append(f"### {prefix}{name}\n\n```\n{command.get_help(child)}\n```\n")
        if isinstance(command, click.Group):
            parts += _helps(command, child, f"{prefix}{name} ")
    return parts


def keys(kind: type[msgspec.Struct], prefix: str = "") -> str:
    """A struct's keys with type and default, and its docstring; then those of the structs inside it."""
    hints = get_type_hints(kind)
    fields = msgspec.structs.fields(kind)
    title = prefix.rstrip(".") or kind.__name__.lower()
    lines = [f"### {title}\n", f"{inspect.getdoc(kind)}\n", "| key | type | default |", "|---|---|---|"]
    inner = []
    for field in fields:
        hint, name = hints[field.name], f"{prefix}{field.encode_name}"
        lines.append(f"| `{name}` | {_type(hint)} | {_default(field)} |")
        if _is_struct(hint):
            inner.append(keys(hint, f"{name}."))
    return "\n".join(["\n".join(lines) + "\n", *inner])


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and not get_args(hint) and issubclass(hint, msgspec.Struct)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return ""
    made = field.default_factory() if callable(field.default_factory) else field.default
    return f"`{msgspec.json.encode(made).decode()}`" if not isinstance(made, msgspec.Struct) else ""


def _type(hint: Any) -> str:
    if isinstance(hint, type) and not get_args(hint):
        return "see below" if _is_struct(hint) else hint.__name__
    text = str(hint)
    for old, new in (("typing.", ""), ("Annotated[int, msgspec.Meta(ge=1)]", "int ≥ 1"), (", ...]", "]"),
                     ("tuple[", "list["), ("Annotated[list[int ≥ 1], msgspec.Meta(min_length=1)]",
                                           "list[int ≥ 1], not empty"), (" | ", " or "),
                     ("isambard_serve.records.", "")):
        text = text.replace(old, new)
    return text


def directory() -> str:
    """The run directory's files."""
    lines = [f"| `{name}` | {what} |" for name, what in run.FILES.items()]
    return "\n".join(["| file | what it is |", "|---|---|", *lines])


def reasons() -> str:
    """The rules of validity, by their codes."""
    lines = ["| code | the row is refuted unless |", "|---|---|"]
    for code, rule in validity.RULES.items():
        text = " ".join((inspect.getdoc(rule) or "").split())
        lines.append(f"| `{code}` | {text.partition(': ')[2]} |")
    return "\n".join(lines)


def document() -> str:
    """The whole reference."""
    return f"""# Reference

Made from the code by `make docs`; a test fails when it is stale.

## Commands

{commands()}
## Recipe keys

Lengths of time are written `90s`, `15m`, `4h` or `"4:00:00"`. `extends: NAME` lays a recipe over another one.

{keys(recipe.Recipe)}
## Site keys

{keys(site.Site)}
## Image keys

{keys(image.Image)}
## The run directory

{directory()}

## Reason codes

A row is `valid` unless a rule refutes it (`reasons`). A rule that cannot be judged is `unknown`, never true.

{reasons()}

## Names in JSON and CSV

{keys(records.Run)}
{keys(records.Row)}
{keys(records.Trace)}
{keys(records.RankTrace)}
{keys(records.Bucket)}
{keys(records.UnmatchedKernel)}"""


def main() -> int:
    """Writes the reference, or with ``--check`` says whether it is stale."""
    text = document()
    if "--check" in sys.argv:
        return 0 if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text else 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
