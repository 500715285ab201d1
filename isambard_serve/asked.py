"""What is asked of a server that lives: points to measure beside those that its run was planned with.

Whoever asks appends lines to ``asked.jsonl``; the watcher sees them and has them measured from inside the serve job.
"""

from __future__ import annotations

from collections.abc import Iterable

from isambard_serve import plan
from isambard_serve.plan import Point
from isambard_serve.run import RunDir, append_line, read_lines


def read(run: RunDir) -> list[Point]:
    """The points that were asked for so far, each once, in their order."""
    return [*dict.fromkeys(read_lines(run.asked, Point))]


def add(run: RunDir, concurrencies: Iterable[int], prompts_per_concurrency: int) -> list[Point]:
    """Asks for a point at each of ``concurrencies``: a further repeat where there is one already."""
    repeats: dict[int, int] = {}
    known = [(row.concurrency, row.repeat) for row in run.read_rows()]
    for concurrency, repeat in (*known, *((point.concurrency, point.repeat) for point in read(run))):
        repeats[concurrency] = max(repeats.get(concurrency, 0), repeat)
    points = []
    for concurrency in concurrencies:
        repeats[concurrency] = repeats.get(concurrency, 0) + 1
        points.append(plan.point(concurrency, repeats[concurrency], prompts_per_concurrency))
        append_line(run.asked, points[-1])
    return points
