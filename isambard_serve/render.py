"""Scripts from plans. Every value that enters a script is quoted for the shell; there is no way round it.

Templates print values bare (``{{ value }}``): the quoting happens as they are printed. Text for a comment
line goes through the ``comment`` filter, directives through ``directive``.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import jinja2

from isambard_serve import shipped
from isambard_serve.plan import Slot, Word
from isambard_serve.records import Record


class _Ready(str):
    """Text that is fit to stand in a script as it is."""


def quoted(value: object) -> _Ready:
    """``value`` as one word of a shell, whatever it holds; a slot becomes a quoted shell variable that must be set.

    A slot of many words becomes a quoted array, each of whose elements stays one word.
    """
    if isinstance(value, _Ready):
        return value
    if isinstance(value, Slot) and value.many:
        return _Ready(f'"${{{value.slot}[@]}}"')
    if isinstance(value, Slot):
        return _Ready((shlex.quote(value.before) if value.before else "") + f'"${{{value.slot}:?}}"')
    return _Ready(shlex.quote(str(value)))


def _comment(value: object) -> _Ready:
    return _Ready(" ".join(str(value).split()))


def _directive(item: tuple[str, str | bool]) -> _Ready:
    name, value = item
    return _Ready(f"--{name}" if value is True else f"--{name}={quoted(value)}")


def _command(words: Sequence[Word]) -> _Ready:
    """``words`` as a command: each flag on a line of its own, with its values."""
    lines: list[list[str]] = [[]]
    whole = False  # the line is a flag that has its value already
    for word in words:
        flag = word.many if isinstance(word, Slot) else word.startswith("--")
        if flag or whole:
            lines.append([])
        whole = flag and "=" in str(word)
        lines[-1].append(quoted(word))
    return _Ready(" \\\n      ".join(" ".join(line) for line in lines if line))


def _commented(words: Sequence[str]) -> _Ready:
    """``words`` as they would be typed, on one line of a comment."""
    return _comment(shlex.join(words))


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(  # noqa: S701 - shell, not HTML: finalize quotes every value for it
        loader=jinja2.FileSystemLoader(shipped.folder("templates")),
        undefined=jinja2.StrictUndefined,
        finalize=quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(comment=_comment, commented=_commented, directive=_directive, command=_command)
    return environment


def text(template: str, **values: Any) -> str:
    """The text of ``templates/<template>.j2``; the same values always give the same bytes."""
    return _environment().get_template(f"{template}.j2").render(**values)


def script(template: str, plan: Record, **values: Any) -> str:
    """The text of ``templates/<template>.j2`` for ``plan``; the same plan always gives the same bytes."""
    return text(template, plan=plan, **values)
