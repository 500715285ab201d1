"""The sweep's job, run by submitit: waits until the engine is ready, measures all points, and says so."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from isambard_serve import points, slurm
from isambard_serve.errors import NotReadyError, ServeError
from isambard_serve.plan import Plan
from isambard_serve.records import Endpoint
from isambard_serve.run import RunDir

TICK_S = 1.0
START_GRACE_S = 60.0
"""How much longer than the serve job's own watcher the sweep waits, and how seldom it asks Slurm at the most."""


def sweep(run_dir: str) -> int:
    """Measures all points of the run in ``run_dir``; returns how many rows are valid. submitit calls this.

    Raises:
        ServeError: the engine never became ready, went away, or no point left a result.
    """
    run = RunDir(Path(run_dir))
    plan = msgspec.json.decode(run.plan.read_bytes(), type=Plan)
    run.record("sweep", "waiting", job_id=os.environ.get("SLURM_JOB_ID"))
    try:
        endpoint = _ready(run, plan)
        run.record("sweep", "measuring")
        port = endpoint.url.rpartition(":")[2]
        points.measure_all(run, plan, serve_job=endpoint.job_id or "", port=port, env=_step_environment(run, plan))
        rows = run.read_rows()
        valid = sum(row.valid for row in rows)
        if all(row.output_tok_s is None for row in rows):
            raise ServeError(f"no point left a result; the first says why: {run.points}/*/bench.log")
    except points.EngineGoneError as error:
        # The serve job has said why; this is only its consequence.
        run.record("sweep", "left", reason=error.what)
        raise
    except Exception as error:
        run.record("sweep", "failed", reason=f"the sweep: {error}")
        raise
    run.record("sweep", "finished", reason=f"{len(rows)} points measured, {valid} valid")
    return valid


def _ready(run: RunDir, plan: Plan) -> Endpoint:
    """The engine's endpoint once it is ready. Its dependency alone proves nothing: a cancelled job satisfies it."""
    began = time.monotonic()
    serve_job = run.job_ids().get("serve", "")
    asked: float | None = None
    while not run.endpoint.exists():
        gone = points.serve_end(run)
        if gone:
            raise points.EngineGoneError(f"the engine never became ready: {gone}", where=f"run {run.run_id}")
        now = time.monotonic()
        if now - began > plan.limits.load_s + START_GRACE_S:
            raise NotReadyError(f"the engine was not ready within {plan.limits.load_s} s (load_limit)",
                                where=f"run {run.run_id}")
        if asked is None or now - asked > max(plan.poll_interval_s, START_GRACE_S):
            asked = now
            answer = slurm.Slurm(slurm.stripped(os.environ)).states([serve_job]).get(serve_job)
            if answer and answer.ended:
                raise points.EngineGoneError(f"the serve job ended before the engine was ready: {answer.state}",
                                             where=f"run {run.run_id}")
        time.sleep(TICK_S)
    return msgspec.json.decode(run.endpoint.read_bytes(), type=Endpoint)


def _step_environment(run: RunDir, plan: Plan) -> dict[str, str]:
    """What the load generator's step gets: this job's variables without Slurm's, the engine's, and the key."""
    env = {name: value for name, value in slurm.stripped(os.environ).items() if name not in plan.unset}
    return env | plan.environment | {"OPENAI_API_KEY": run.key.read_text()}
