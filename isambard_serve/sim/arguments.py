"""Command lines as vLLM takes them: ``--x v``, ``--x=v``, bare ``--x``, ``--no-x``; any flag is taken."""

from __future__ import annotations

from collections.abc import Sequence

from isambard_serve.errors import UsageError

_SHORT = {"-tp": "tensor-parallel-size", "-dp": "data-parallel-size", "-asc": "api-server-count"}


class Arguments:
    """The words of a command line, by flag. Underscores in a flag's name are dashes; the last of equal flags wins."""

    def __init__(self, words: Sequence[str]) -> None:
        self.positional: list[str] = []
        self.flags: dict[str, list[str]] = {}
        self._every: dict[str, list[str]] = {}
        values = self.positional
        for word in words:
            if word.startswith("--") or (word.startswith("-") and word[1:2].isalpha()):
                name, equals, value = word.partition("=")
                name = _SHORT.get(name, name.lstrip("-").replace("_", "-"))
                values = self.flags[name] = [value] if equals else []
                if equals:
                    self._every.setdefault(name, []).append(value)
                current = name
            else:
                values.append(word)
                if values is not self.positional:
                    self._every.setdefault(current, []).append(word)

    def text(self, name: str, default: str = "") -> str:
        """The (first) value of ``--name``."""
        values = self.flags.get(name)
        return values[0] if values else default

    def every(self, name: str) -> list[str]:
        """All values of all ``--name``."""
        return self._every.get(name, [])

    def on(self, name: str, default: bool = False) -> bool:
        """Whether ``--name`` rather than ``--no-name`` is given."""
        if f"no-{name}" in self.flags:
            return False
        return name in self.flags or default

    def whole(self, name: str, default: int) -> int:
        """The value of ``--name`` as a whole number.

        Raises:
            UsageError: it is none.
        """
        return int(self.number(name, default))

    def number(self, name: str, default: float) -> float:
        """The value of ``--name`` as a number.

        Raises:
            UsageError: it is none.
        """
        text = self.text(name)
        try:
            return float(text) if text else default
        except ValueError:
            raise UsageError(f"{text!r} is not a number", where=f"--{name}") from None
