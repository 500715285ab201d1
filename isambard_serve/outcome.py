"""What a search for the knee came to, as the run keeps it: read without the machinery of searching."""

from __future__ import annotations

import contextlib

from isambard_serve.errors import ServeError
from isambard_serve.records import Record
from isambard_serve.run import RunDir, read_record
from isambard_serve.search import WORDS, Saturation


class Found(Record, frozen=True):
    """``sweep.json``: what the search found. ``gpu_s``: GPU-seconds that it took, those of a lost run left out.

    ``engine_kv_cache_tokens`` is what the engine's log says of its KV cache (the smallest of its ranks; None: nothing
    that is known). It is kept for the record; the search does not believe it.
    """

    knee: int | None
    saturation: Saturation | None
    reason: str
    scouts: int
    points: int
    gpu_s: float
    engine_kv_cache_tokens: int | None = None
    schema: str = "isambard-serve/sweep/1"

    @property
    def text(self) -> str:
        """The knee and why it lies there, in words."""
        if self.knee is None:
            return f"no knee: {self.reason}"
        why = f", {WORDS[self.saturation]}" if self.saturation else ""
        return f"knee at concurrency {self.knee}{why}" + (f" ({self.reason})" if "budget" in self.reason else "")


def read(run: RunDir) -> Found | None:
    """What a search that has ended found in ``run``; None if there was none, or it goes on."""
    with contextlib.suppress(FileNotFoundError, ServeError):
        return read_record(run.knee, Found)
    return None
