"""A ladder on one node: all its rungs in one job, one after another.

One wait in the queue, and the same chips, power cap and cooling for each: a fairer ratio than that of three nodes.
Each rung stays a run of its own, whose serve script is the one that it would send alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from isambard_serve import render
from isambard_serve.directives import clock
from isambard_serve.errors import UsageError
from isambard_serve.plan import Plan
from isambard_serve.resend import RESENT
from isambard_serve.run import RunDir


def check(rungs: Sequence[Plan], placement: str | None = None) -> None:
    """Raises UsageError if ``rungs`` cannot share a job, or not with the ``placement`` that was asked for."""
    if placement == "dependent":
        raise UsageError("the rungs of one job measure from inside it", where="--placement", remedy="leave it out")
    if len(rungs) < 2:
        raise UsageError("one recipe has a node to itself anyway", where="--same-node", remedy="name two at least")
    gpus = {plan.recipe: plan.gpus for plan in rungs}
    if len(set(gpus.values())) > 1:
        asked = ", ".join(f"{recipe} {count}" for recipe, count in gpus.items())
        raise UsageError(f"the rungs ask for different numbers of GPUs ({asked}): a job has one, and what a smaller "
                         "rung leaves idle is paid for all the same", where="--same-node",
                         remedy="leave --same-node out: each rung gets a job of its size")


def directives(rungs: Sequence[Plan]) -> dict[str, str | bool]:
    """The job's directives: those that all rungs share, and the sum of their times."""
    first = rungs[0]
    return {**first.serve_directives, "time": clock(sum(plan.limits.time_s for plan in rungs)),
            "output": str(RunDir(Path(first.run_dir)).ladder_log)}


def script(rungs: Sequence[Plan]) -> str:
    """The job's sbatch script, which lies with the first rung."""
    return render.script("ladder.sbatch", rungs[0], rungs=rungs, directives=directives(rungs), resent=RESENT)


def over(run: RunDir) -> bool:
    """Whether the run has ended, or has been told to."""
    return any(event.event in ("done", "failed", "cancelled") for event in run.read_events())
