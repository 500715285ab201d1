"""What the simulated engine answers where it is not measured: words that depend on the prompt and on its kernels."""

from __future__ import annotations

from binascii import crc32

_VOCABULARY = 50_000
_PARTS = 3
"""Of so many prompts one is answered otherwise from some token on by other kernels: they round in another way."""


def tokens(prompt: object, count: int, backend: str) -> list[int]:
    """The tokens of the answer to ``prompt`` by an engine with this MoE backend."""
    seed = crc32(repr(prompt).encode())
    parts_at = seed // _PARTS % 32 if seed % _PARTS == 0 else count
    return [crc32(f"{seed} {index} {backend if index >= parts_at else ''}".encode()) % _VOCABULARY
            for index in range(count)]


def answer(prompt: object, count: int, backend: str, fault: str) -> tuple[str, list[int]]:
    """Text and tokens of an answer; ``fault`` is how it shall be broken, if at all."""
    made = [0] * count if fault else tokens(prompt, count, backend)
    word = {"empty": "", "repeated": " !", "garbage": "\N{REPLACEMENT CHARACTER}"}.get(fault)
    return "".join(f" w{token}" for token in made) if word is None else word * count, made
