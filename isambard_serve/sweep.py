"""The sweep: waits until the engine is ready, claims the points, measures them all, and says so.

As a job of its own it is run by submitit (:func:`sweep`). Inside the serve job the watcher starts it
(``python -m isambard_serve.sweep RUN_DIR OVER``), from the beginning or to take over from a sweep that is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from isambard_serve import asked, knee, points, recording, slurm
from isambard_serve.claim import Claim, SupersededError, newest
from isambard_serve.client import Client
from isambard_serve.engine import EngineClient
from isambard_serve.errors import NotReadyError, ServeError
from isambard_serve.local import Local
from isambard_serve.plan import Plan, filled
from isambard_serve.records import Endpoint, Writer
from isambard_serve.run import RunDir, read_record

TICK_S = 1.0
START_GRACE_S = 60.0
"""How much longer than the serve job's own watcher the sweep waits, and how seldom it asks Slurm at the most."""


def sweep(run_dir: str) -> None:
    """Measures all points of the run in ``run_dir``, in a job of its own. submitit calls this.

    Raises:
        ServeError: the engine never became ready, went away, or no point left a result.
    """
    run, plan = _opened(run_dir)
    run.record("sweep", "waiting", job_id=os.environ.get("SLURM_JOB_ID"))
    try:
        endpoint = _ready(run, plan)
        if newest(run):
            raise SupersededError("somebody else measures", where=f"run {run.run_id}")
        claim = Claim.take(run, "sweep", os.environ.get("SLURM_JOB_ID"), over=0)
    except SupersededError as error:
        run.record("sweep", "left", reason=error.what)
        return
    except Exception as error:
        _give_up(run, plan, "sweep", error)
        raise
    _measure(run, plan, claim, "sweep", filled(plan.step_argv, serve_job=endpoint.job_id or ""), endpoint)


def inside(run_dir: str, over: int) -> None:
    """Measures what is left of the run's points, as a part of the serve job, taking over from claim ``over``.

    Raises:
        ServeError: the engine went away, or no point left a result.
    """
    run, plan = _opened(run_dir)
    endpoint = read_record(run.endpoint, Endpoint)
    try:
        claim = Claim.take(run, "inside", os.environ.get("SLURM_JOB_ID"), over=over)
        if over:
            points.clear(run, EngineClient(endpoint.url, run.key.read_text()))
    except SupersededError as error:
        # The predecessor was not gone after all.
        run.record("inside", "left", reason=error.what)
        return
    except Exception as error:
        _give_up(run, plan, "inside", error)
        raise
    _measure(run, plan, claim, "inside", [], endpoint)


def _measure(run: RunDir, plan: Plan, claim: Claim, writer: Writer, step: Sequence[str], endpoint: Endpoint) -> None:
    client = Client(command=[*step, *plan.client_command], script=run.client, metrics=f"{endpoint.url}/metrics",
                    fallback=[*step, *plan.bench_command], env=_generator_environment(run, plan),
                    log=run.points / "client.log", note=lambda why: run.record(writer, "note", reason=why))
    loop = points.Loop(run, plan, claim, writer=writer, client=client, node=endpoint.node,
                       url=endpoint.url)
    try:
        with claim.beating(), client:
            run.record(writer, "measuring", job_id=os.environ.get("SLURM_JOB_ID"))
            said = _work(loop, EngineClient(endpoint.url, run.key.read_text()))
            claim.check()
    except SupersededError as error:
        run.record(writer, "left", reason=error.what)
    except Exception as error:
        _give_up(run, plan, writer, error)
        raise
    else:
        # A server for people goes on.
        run.record(writer, "ready" if plan.for_people else "finished", reason=said)


def _work(loop: points.Loop, engine: EngineClient) -> str:
    """Does what the plan wants, and says what came of it."""
    if loop.plan.profile:
        return recording.take(loop, engine, loop.plan.profile)
    found = knee.find(loop, loop.plan.search) if loop.plan.search else None
    if not found:
        loop.measure_all([*loop.plan.points, *asked.read(loop.run)])
    rows = loop.run.read_rows()
    if found and not rows:
        raise ServeError(f"no point was measured: after {found.scouts} scouts {found.reason}",
                         where="bench.sweep_limit",
                         remedy="allow more time; compiled kernels are kept where the site has a kernels_dir")
    if all(row.output_tok_s is None for row in rows):
        raise ServeError(f"no point left a result; the logs say why: {loop.run.points}/*/bench.log")
    counted = f"{len(rows)} point{'s' if len(rows) > 1 else ''} measured, {sum(row.valid for row in rows)} valid"
    return f"{found.text}; {counted}" if found else counted


def _opened(run_dir: str) -> tuple[RunDir, Plan]:
    run = RunDir(Path(run_dir))
    return run, read_record(run.plan, Plan)


def _give_up(run: RunDir, plan: Plan, writer: Writer, error: Exception) -> None:
    if plan.for_people:
        # The server was not there to be measured: what fails ends the sweep alone.
        run.record(writer, "ready", reason=f"the sweep: {error}")
    elif isinstance(error, points.EngineGoneError) and (writer == "sweep" or points.serve_end(run)):
        # The serve job, or Slurm, says why; this is only its consequence.
        run.record(writer, "left", reason=error.what)
    else:
        run.record(writer, "failed", reason=f"the sweep: {error}")


def _ready(run: RunDir, plan: Plan) -> Endpoint:
    """The engine's endpoint once it is ready. Its dependency alone proves nothing: a cancelled job satisfies it."""
    began = time.monotonic()
    asked: float | None = None
    while True:
        # Also when it was ready once: a late sweep finds an engine that has gone since.
        gone = points.serve_end(run)
        if gone:
            raise points.EngineGoneError(f"the engine is not there any more: {gone}", where=f"run {run.run_id}")
        if run.endpoint.exists():
            return read_record(run.endpoint, Endpoint)
        now = time.monotonic()
        if now - began > plan.limits.load_s + START_GRACE_S:
            raise NotReadyError(f"the engine was not ready within {plan.limits.load_s} s (load_limit)",
                                where=f"run {run.run_id}")
        if asked is None or now - asked > max(plan.poll_interval_s, START_GRACE_S):
            asked = now
            _check_serve_job(run, plan)
        time.sleep(TICK_S)


def _check_serve_job(run: RunDir, plan: Plan) -> None:
    """Raises EngineGoneError if the serve job has ended."""
    serve_job = run.job_ids().get("serve", "")
    jobs = Local() if plan.scheduler == "local" else slurm.Slurm(slurm.stripped(os.environ))
    answer = jobs.states([serve_job]).get(serve_job)
    if answer and answer.ended:
        raise points.EngineGoneError(f"the serve job ended before the engine was ready: {answer.state}",
                                     where=f"run {run.run_id}")


def _generator_environment(run: RunDir, plan: Plan) -> dict[str, str]:
    """What the load generator gets: this job's variables without Slurm's, the engine's, and the key."""
    env = {name: value for name, value in slurm.stripped(os.environ).items() if name not in plan.unset}
    return env | plan.environment | {"OPENAI_API_KEY": run.key.read_text()}


def main() -> None:
    """``python -m isambard_serve.sweep RUN_DIR OVER``."""
    # Asked to end, it ends its load generator too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    inside(sys.argv[1], int(sys.argv[2]))


if __name__ == "__main__":
    main()
