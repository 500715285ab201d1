"""What the engine answers to twenty fixed prompts, greedily: is it broken, and where do two engines part?

Quick kernels that compute the wrong thing are as quick as right ones. The answers are asked for once a run, all in
one request, so that every DP rank has some of them.
"""

from __future__ import annotations

import itertools
import time
import unicodedata
from collections.abc import Sequence

from isambard_serve.engine import EngineClient
from isambard_serve.records import Answer, Outputs, Record

MAX_TOKENS = 32

PROMPTS = (
    "The capital of France is",
    "Water boils at sea level at a temperature of",
    "The three states of matter are",
    "In 1859 Charles Darwin published",
    "The chemical symbol for gold is",
    "Isambard Kingdom Brunel is best known for",
    "Q: How many legs does a spider have?\nA:",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, age FROM people WHERE",
    "Translate to German: The weather is beautiful today.\nGerman:",
    "Translate to French: Where is the railway station?\nFrench:",
    "12 + 30 =",
    "The first ten prime numbers are",
    "Once upon a time, in a village by the sea, there lived",
    "Dear Sir or Madam,\n\nI am writing to",
    "The main difference between a virus and a bacterium is",
    "To make an omelette, first",
    "List of countries in Europe:\n1.",
    "A GPU differs from a CPU in that",
)

BROKEN = 3
"""So many broken answers of twenty are no chance: a broken rank of four or eight gives two to five of them."""

SHORT = 8
"""An answer of fewer tokens may be the same one repeated."""


def ask(client: EngineClient, model: str) -> Outputs:
    """Asks all prompts.

    Raises:
        EngineUnreachableError: no answer, or none that can be understood.
    """
    began = time.time()
    answers = client.answers(model, PROMPTS, max_tokens=MAX_TOKENS)
    return Outputs(time=began, took_s=time.time() - began, max_tokens=MAX_TOKENS, prompts=PROMPTS,
                   answers=tuple(answers))


def broken(outputs: Outputs) -> list[str]:
    """What is objectively wrong with the answers, a line for each that is: nothing else is judged."""
    findings = [f"{prompt!r} has no answer" for prompt in outputs.prompts[len(outputs.answers):]]
    for prompt, answer in zip(outputs.prompts, outputs.answers, strict=False):
        wrong = _wrong(answer)
        if wrong:
            findings.append(f"the answer to {prompt!r} is {wrong}")
    return findings


def _wrong(answer: Answer) -> str | None:
    if not answer.text.strip():
        return "empty"
    unprintable = sum(character == "\N{REPLACEMENT CHARACTER}" or (
        unicodedata.category(character) in ("Cc", "Cn", "Co", "Cs") and not character.isspace())
        for character in answer.text)
    if 2 * unprintable > len(answer.text):
        return "no text"
    parts = _parts(answer)
    if len(parts) >= SHORT and len(set(parts)) == 1:
        return f"{len(parts)} times the same token"
    return None


def _parts(answer: Answer) -> Sequence[object]:
    """The answer's tokens, or its words if the engine did not give its tokens."""
    return answer.text.split() if answer.tokens is None else answer.tokens


class Parting(Record, frozen=True):
    """Where two answers to ``prompt`` part: ``agree`` of ``length`` tokens are the same, from the first on."""

    prompt: str
    agree: int
    length: int
    first: str
    second: str

    @property
    def parted(self) -> bool:
        """Whether they do."""
        return self.agree < self.length


def partings(first: Outputs, second: Outputs) -> list[Parting]:
    """How two engines' answers compare, for each prompt that both were asked."""
    answers = dict(zip(second.prompts, second.answers, strict=False))
    found = []
    for prompt, one in zip(first.prompts, first.answers, strict=False):
        other = answers.get(prompt)
        if other is not None:
            tokens = one.tokens is not None and other.tokens is not None
            parts = [_parts(each) if tokens else each.text.split() for each in (one, other)]
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*parts, strict=False))
            found.append(Parting(prompt=prompt, agree=sum(1 for _ in same), length=max(map(len, parts)),
                                 first=one.text, second=other.text))
    return found
