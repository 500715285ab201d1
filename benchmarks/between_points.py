"""How long the engine waits for its load generator: the command for each point beside the client that stays.

Usage: python -m benchmarks.between_points [POINTS]

The recipe `tiny` on the real engine (vLLM's CPU build), measured by the loop that measures every run, once in each
way. A point's wait is its whole time, from the decision to measure it until its row is kept, less the benchmark's
own window.
"""

from __future__ import annotations

import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from isambard_serve.claim import Claim
from isambard_serve.client import Client
from isambard_serve.plan import Plan
from isambard_serve.points import Loop
from isambard_serve.run import RunDir, write_whole
from tests.engine import environment as engines
from tests.engine.serving import Engine, environment, serving, tiny_plan


def waits_s(engine: Engine, plan: Plan, *, stays: bool) -> list[float]:
    """The wait of each point after the first; a client that shall not stay has no such program."""
    run = RunDir(Path(plan.run_dir))
    run.create()
    write_whole(run.plan, msgspec.json.encode(plan))
    waits = []
    with Client(command=plan.client_command if stays else ["false"], script=run.client, fallback=plan.bench_command,
                env=environment(run.path) | {"OPENAI_API_KEY": engine.key}, metrics=f"{engine.url}/metrics",
                log=run.points / "client.log", note=lambda _: None) as client:
        loop = Loop(run, plan, Claim.take(run, "inside", None, over=0), writer="inside", client=client, node="here",
                    url=engine.url)
        for point in plan.points:
            began = time.monotonic()
            row = loop.measure(point)
            if row.duration_s is None or "completed" in row.reasons:
                raise SystemExit(f"{point.name} was not measured: {row.reasons}")
            waits.append(time.monotonic() - began - row.duration_s)
    return waits[1:]


def main() -> None:
    """Prints one line a way: median and longest wait."""
    points = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    venv = engines.ensure()
    with tempfile.TemporaryDirectory() as folder, serving(venv, Path(folder), secrets.token_hex()) as engine:
        print(f"seconds that the engine waits for its load generator at each of {points - 1} points")
        for stays in (False, True):
            plan = tiny_plan(venv, Path(folder), "bench.args.served-model-name=tiny",
                             f"bench.concurrency={[4 + at for at in range(points)]}")
            waits = waits_s(engine, plan, stays=stays)
            name = "a client that stays" if stays else "vllm bench serve"
            print(f"{name:<22} median {statistics.median(waits):6.2f}   longest {max(waits):6.2f}")


if __name__ == "__main__":
    main()
