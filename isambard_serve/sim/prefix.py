"""The prefix cache of one DP rank: which prompts it has seen, the least recent forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class PrefixCache:
    """Remembers whole prompts; parts that prompts share are not looked for.

    Args:
        capacity: tokens that it may hold in all: those of the KV cache, whose freed blocks it consists of.
        block_size: tokens of a block. Only whole blocks are found, and never a prompt's last token.
    """

    def __init__(self, capacity: int, block_size: int) -> None:
        self._capacity = capacity
        self._block_size = block_size
        self._tokens: OrderedDict[Hashable, int] = OrderedDict()
        self._held = 0

    def found(self, key: Hashable) -> int:
        """Tokens of the prompt ``key`` that need no computing."""
        tokens = self._tokens.get(key)
        if tokens is None:
            return 0
        self._tokens.move_to_end(key)
        return (tokens - 1) // self._block_size * self._block_size

    def add(self, key: Hashable, tokens: int) -> None:
        """Remembers the prompt ``key``."""
        self._held += tokens - self._tokens.pop(key, 0)
        self._tokens[key] = tokens
        while self._held > self._capacity:
            self._held -= self._tokens.popitem(last=False)[1]
