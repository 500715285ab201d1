"""Finds the steps in what a GPU did: by the program's marks, by its CUDA graphs, or by what comes back.

A step begins with its first kernel and ends where the next step begins, so that the idle time between the two is
its own. That is on the GPU: the program runs ahead of it, and the program's clock tells little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]

FEWEST = 3
"""How often something must come back to be a repetition."""
EVEN = 0.9
TOLERANCE = 0.1
"""What share of the distances between its repetitions must be even, and by how much an even one may differ."""

Found = Literal["marks", "graphs", "repetition", "nothing"]


@dataclass(frozen=True)
class Steps:
    """Steps as runs of kernels in the order of their start: step i is ``first[i]`` up to, but not, ``first[i + 1]``.

    ``by`` tells how they were found. By ``nothing``: all that was recorded counts as one step.
    """

    first: Ints
    by: Found


def find(*, name: Ints, stream: Ints, correlation: Ints, launched: Floats, marks: Floats) -> Steps:
    """The steps of one GPU.

    Args:
        name: a number for each kernel's name, in the order of the kernels' start; the others are of the same kernels.
        correlation: equal for kernels of one launch.
        launched: when the program launched the kernel, NaN where that was not recorded.
        marks: when the steps that the program marked began and ended, of shape (steps, 2), ascending; may be empty.
    """
    import numpy as np

    streams, sizes = np.unique(stream, return_counts=True)
    # The busiest stream: what the others do for the next step, copies above all, may begin within this one.
    main = np.flatnonzero(stream == streams[sizes.argmax()])
    first = _marked(launched, main, marks) if len(marks) else np.array([], np.int64)
    if len(first):
        return Steps(first, "marks")
    by: Found = "graphs"
    first = main[_graphs(correlation[main])]
    if not len(first):
        by, first = "repetition", main[_rounds(name[main])]
    if not len(first):
        return Steps(np.array([0, len(name)]), "nothing")
    if first[0] <= TOLERANCE * (first[-1] - first[0]) / (len(first) - 1):
        first[0] = 0  # what little stands before it prepares the first step
    return Steps(np.append(first, len(name)), by)


def _marked(launched: Floats, main: Ints, marks: Floats) -> Ints:
    """Where the marked steps begin, and the last one's end; empty if nothing was launched in them."""
    import numpy as np

    inside = np.flatnonzero((launched >= marks[0, 0]) & (launched < marks[-1, 1]))
    if not len(inside):
        return inside
    # On one stream kernels start as they were launched; one whose launch is not known goes with the one before it.
    known = np.maximum.accumulate(np.where(np.isnan(launched[main]), -np.inf, launched[main]))
    begins = np.searchsorted(known, marks[:, 0])
    first = np.unique(main[begins[begins < len(main)]])[1:]
    edges: Ints = np.concatenate([inside[:1], first[first <= inside[-1]], inside[-1:] + 1])
    return edges


def _graphs(correlation: Ints) -> Ints:
    """Where the steps begin that are launched as CUDA graphs, one graph or several in a fixed order; empty if none."""
    import numpy as np

    begins = np.concatenate([[0], np.flatnonzero(np.diff(correlation)) + 1])
    sizes = np.diff(np.append(begins, len(correlation)))
    graphs = (sizes > 1) & (correlation[begins] >= 0)
    begins, sizes = begins[graphs], sizes[graphs]
    # Graphs of other batch sizes differ by a few kernels: of one kind are those that are about as large.
    rounds: Ints = begins[_rounds(np.round(10 * sizes / max(sizes, default=1)).astype(np.int64))]
    return rounds


def _rounds(words: Ints) -> Ints:
    """Where each round of ``words`` begins, if they are one sequence again and again; else empty.

    A word that comes once a round stands at even distances. So do those of every layer, but for where a new round
    begins: hence the rarest word that does is taken, and of several the first.
    """
    import numpy as np

    _, number = np.unique(words, return_inverse=True)
    order = np.argsort(number, kind="stable")
    places = np.split(order, np.flatnonzero(np.diff(number[order])) + 1)
    for place in sorted(places, key=lambda place: (len(place), *place[:1])):
        if len(place) >= FEWEST:
            distances = np.diff(place)
            usual = np.median(distances)
            even = np.abs(distances - usual) <= TOLERANCE * usual
            if even.mean() >= EVEN and usual * len(place) >= len(words) / 2:
                return place
    return np.array([], np.int64)
