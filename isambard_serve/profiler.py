"""What the engine's profiler is told, where a run records instead of measuring."""

from __future__ import annotations

from isambard_serve import flags
from isambard_serve.recipe import Recipe
from isambard_serve.records import Record


class Profile(Record, frozen=True):
    """What is recorded: ``steps`` steps of steady decode at ``concurrency``."""

    concurrency: int
    steps: int


def profile(recipe: Recipe) -> Profile | None:
    """What ``recipe`` wants recorded; None if it wants points measured."""
    at = recipe.bench.profile_at
    return Profile(concurrency=at, steps=recipe.bench.profile_steps) if at else None


def words(wanted: Profile | None, folder: str) -> list[str]:
    """The flags that give the engine a profiler which writes into ``folder``; none without anything ``wanted``.

    The engine ends a recording by itself after so many steps. Python's stacks and the API server's own trace are
    left out: they are large, and say nothing of the GPU.
    """
    if wanted is None:
        return []
    return flags.argv({"profiler-config": {
        "profiler": "torch", "torch_profiler_dir": folder, "torch_profiler_with_stack": False,
        "ignore_frontend": True, "max_iterations": wanted.steps}})
