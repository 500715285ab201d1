"""On the node, beside the engine: starts it, says when it is ready, samples it, and decides when it ends.

The watcher holds the serve job. It ends the engine, and with it the job, as soon as the sweep has finished or
given up, the engine dies, nobody asks for anything, Slurm asks, or the job's time is nearly up. If the sweep does
not come, or its heartbeat stops, the rest is measured from inside this job: GPUs never wait for a load generator.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from isambard_serve import asked, audit, gpus, inengine, kernelcache, nodelocal, outputs, process, slurm
from isambard_serve.audit import Audit
from isambard_serve.claim import Vigil, newest
from isambard_serve.engine import EngineClient, EngineUnreachableError
from isambard_serve.errors import HostError, ServeError
from isambard_serve.plan import Plan
from isambard_serve.prepare import NodeFacts
from isambard_serve.recipe import END_MARGIN_S
from isambard_serve.records import Endpoint, Sample
from isambard_serve.run import RunDir, append_line, read_record, write_whole

TICK_S = 0.5
SAMPLE_S = 1.0
SIMULATED_SAMPLE_S = 0.1
"""A simulated second is much shorter than a real one."""
STOP_GRACE_S = 20.0


@dataclass(frozen=True)
class End:
    """Why the watcher stops: the event to record (``stopping`` leaves the verdict to others) and its reason."""

    event: str
    reason: str

    @property
    def exit_code(self) -> int:
        """The job's exit code."""
        return 0 if self.event == "done" else 1


class Activity:
    """How long the engine has gone without a request, by the counters in its samples."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._seen: tuple[float | None, ...] = ()

    def note(self, sample: Sample, now: float) -> None:
        """Takes in a sample."""
        counters = (sample.requests_total, sample.prompt_tokens_total, sample.generation_tokens_total)
        if counters != self._seen or sample.running or sample.waiting:
            self._since = now
            self._seen = counters

    def idle_s(self, now: float) -> float:
        """Seconds since the last sign of a request."""
        return now - self._since


def engine_processes(root: int) -> dict[str, psutil.Process]:
    """vLLM's own processes below ``root`` by title and pid. It titles them ``VLLM::…``; helpers come and go."""
    found: dict[str, psutil.Process] = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(root).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                title = " ".join(child.cmdline()).strip()
                if title.startswith("VLLM::"):
                    found[f"{title} (pid {child.pid})"] = child
    return found


def _how(code: int) -> str:
    """An exit code in words; real-time signals have no name."""
    if code >= 0:
        return f"exit code {code}" + (": there is no such command" if code == 127 else "")  # env's word for it
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def _alive(child: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    return False


class Watcher:
    """Watches one engine from its start to its end."""

    def __init__(self, run: RunDir, plan: Plan, client: EngineClient, child: subprocess.Popen[bytes],
                 terminated: threading.Event, deadline: float) -> None:
        self._run = run
        self._plan = plan
        self._client = client
        self._child = child
        self._root = child.pid
        self._deadline = deadline
        self._terminated = terminated
        self._over = threading.Event()
        self._ready = threading.Event()
        self._activity = Activity(time.monotonic())
        self._processes: dict[str, psutil.Process] = {}
        self._vigil: Vigil | None = None
        self._inside: subprocess.Popen[bytes] | None = None
        self._asked = 0

    def watch(self) -> End:
        """Watches until there is a reason to end, and returns it."""
        began = time.monotonic()
        threads = [threading.Thread(target=target, daemon=True)
                   for target in (self._become_ready, self._sample, self._look_at_gpus)]
        for thread in threads:
            thread.start()
        try:
            while True:
                end = self._reason_to_end(began)
                if end:
                    return end
                self._terminated.wait(TICK_S)
        finally:
            self._over.set()
            if self._inside:
                process.stop(self._inside, STOP_GRACE_S)
            for thread in threads:
                thread.join(TICK_S)

    def _reason_to_end(self, began: float) -> End | None:
        if self._terminated.is_set():
            return End("stopping", "asked to end by a signal: scancel, or the job's time limit")
        if self._run.read_events(["cancel"]):
            return End("stopping", "cancelled on request")
        now = time.monotonic()
        ready = self._ready.is_set()
        died = self._death(ready)
        if died:
            # A signal to the whole job reaches the engine as soon as us: it explains the death.
            if self._terminated.wait(TICK_S):
                return self._reason_to_end(began)
            return End("failed", died)
        swept = None if self._plan.for_people else self._sweep_end()
        if swept:
            return swept
        if not ready and now - began > self._plan.limits.load_s:
            return End("failed", f"the engine was not ready within {self._plan.limits.load_s} s (load_limit)")
        if ready and self._run.endpoint.exists():
            if self._plan.for_people:
                self._see_to_what_is_asked()
            else:
                self._see_to_the_sweep()
        return self._out_of_time(ready, now)

    def _out_of_time(self, ready: bool, now: float) -> End | None:
        """Whether nobody asks any more, or the job's time is nearly up. For a server for people that is a good end."""
        people = self._plan.for_people
        if ready and self._activity.idle_s(now) > self._plan.limits.idle_s:
            idle = f"no request for {self._plan.limits.idle_s} s"
            return End("done", f"{idle} (serve_idle_timeout)") if people else End(
                "failed", f"{idle} (idle_timeout): nobody measures")
        if time.time() > self._deadline - END_MARGIN_S:
            near = f"the job's time limit is {END_MARGIN_S} s away"
            return End("done" if people and ready else "failed", near if people else f"{near}, with points still to do")
        return None

    def _sweep_end(self) -> End | None:
        """Whether whoever measures has finished or given up."""
        for event in reversed(self._run.read_events(["sweep", "inside"])):
            if event.event == "finished":
                return End("done", event.reason or "all points are measured")
            if event.event == "failed":
                return End("stopping", "the sweep gave up")
        if self._inside and self._inside.poll() is not None:
            # It may have written its last word between the two looks.
            words = [event.event for event in self._run.read_events(["inside"])]
            if words and words[-1] == "left":
                self._inside = None  # somebody else measures after all: watch over them again
            elif not words or words[-1] not in ("finished", "failed"):
                return End("failed", f"measuring inside the serve job ended with {self._inside.returncode}")
        return None

    def _see_to_the_sweep(self) -> None:
        """Measures from inside this job if the plan says so, or if nobody else does."""
        if self._inside:
            return
        if self._vigil is None:
            limits = self._plan.limits
            self._vigil = Vigil(self._run, grace_s=limits.grace_s, silence_s=limits.silence_s)
        reason = "as planned" if self._plan.placement == "inside" else self._vigil.reason_to_take_over()
        if reason:
            self._measure(reason)

    def _see_to_what_is_asked(self) -> None:
        """Measures from inside this job what was asked for since it last did. What fails is not tried again."""
        if self._inside and self._inside.poll() is None:
            return
        count = len(asked.read(self._run))
        if count > self._asked:
            self._asked = count
            self._measure("asked to")

    def _measure(self, reason: str) -> None:
        with contextlib.suppress(OSError):
            self._run.record("serve", "note", reason=f"measuring from inside the serve job: {reason}")
        command = [sys.executable, "-m", "isambard_serve.sweep", str(self._run.path), str(newest(self._run))]
        self._inside = process.start(command, env=os.environ, log=self._run.serve_log, bound=True)

    def _death(self, ready: bool) -> str | None:
        """What of the engine has died, if anything has. Its exit code is told, never believed (it is 0 at times)."""
        code = self._child.poll()
        if code is not None:
            return f"the engine ended by itself ({_how(code)}) while {'it was needed' if ready else 'it was starting'}"
        dead = next((name for name, child in self._processes.items() if not _alive(child)), None)
        return f"the engine's process {dead} died" if dead else None

    def _become_ready(self) -> None:
        """Waits for ``/health`` and then for one answered completion: health alone proves little."""
        while not self._over.is_set() and not self._client.healthy():
            self._over.wait(TICK_S)
        while not self._over.is_set():
            try:
                self._client.complete(self._plan.model)
                break
            except EngineUnreachableError as error:
                with contextlib.suppress(OSError):
                    self._run.record("serve", "note", reason=f"healthy, but no completion yet: {error}")
                self._over.wait(5.0)
        self._activity = Activity(time.monotonic())
        self._root = nodelocal.root_process(self._run, self._child.pid)
        self._processes = engine_processes(self._root)
        with contextlib.suppress(OSError):
            self._settle()
            if not self._over.is_set():
                self._ask_outputs()
        self._ready.set()
        while not self._over.is_set():
            # A full disk must not hold the GPUs: nobody can measure, and idle_timeout ends the job.
            with contextlib.suppress(OSError):
                self._tell_ready()
                break
            self._over.wait(5.0)
        # Now, beside the measurement, and not at the end while the GPUs wait for it.
        with contextlib.suppress(OSError, ServeError):
            node = read_record(self._run.node, NodeFacts)
            kernelcache.save(self._plan, node.gpus, os.environ, self._run.serve_log, self._over)

    def _settle(self) -> None:
        """Puts the API servers where they belong, and keeps how the binding came out: before any row is judged."""
        try:
            node = read_record(self._run.node, NodeFacts)
            result = audit.settle(Path("/"), self._root, self._run.read_facts(), node.topology, node.binding)
        except (OSError, ServeError) as error:
            result = Audit(findings=(f"could not be looked at: {error}",))
        if result.verdict is False:
            self._run.record("serve", "note", reason=f"binding {result.summary}")
        write_whole(self._run.binding, msgspec.json.format(msgspec.json.encode(result), indent=2))

    def _ask_outputs(self) -> None:
        """Has the engine answer the fixed prompts, before any point."""
        try:
            answered = outputs.ask(self._client, self._plan.model)
        except EngineUnreachableError as error:
            self._run.record("serve", "note", reason=f"the fixed prompts were not answered: {error}")
        else:
            write_whole(self._run.outputs, msgspec.json.format(msgspec.json.encode(answered), indent=2))

    def _tell_ready(self) -> None:
        job_id = os.environ.get("SLURM_JOB_ID")
        node = os.environ.get("SLURMD_NODENAME") or platform.node()
        write_whole(self._run.endpoint, msgspec.json.encode(Endpoint(
            url=self._client.url, model=self._plan.model, node=node, job_id=job_id, key_file=str(self._run.key))))
        self._run.record("serve", "ready", job_id=job_id)

    def _sample(self) -> None:
        """Samples the engine into ``samples.jsonl``, from the moment that it is ready."""
        def sample() -> list[Sample]:
            taken = self._client.sample()
            self._activity.note(taken, time.monotonic())
            return [taken]

        self._ready.wait()
        self._repeat(sample, self._run.samples)

    def _look_at_gpus(self) -> None:
        """Looks at the engine's GPUs into ``gpus.jsonl``; where it has none, or they cannot be seen, nobody does."""
        self._ready.wait()
        look = gpus.looker(self._run.read_facts(), self._client, simulated=self._plan.simulated)
        if look:
            self._repeat(look, self._run.gpus)

    def _repeat(self, read: Callable[[], Sequence[msgspec.Struct]], path: Path) -> None:
        interval_s = SIMULATED_SAMPLE_S if self._plan.simulated else SAMPLE_S
        while not self._over.is_set():
            began = time.monotonic()
            with contextlib.suppress(EngineUnreachableError, HostError, ValueError):
                for record in read():
                    with contextlib.suppress(OSError):  # a full disk ends no run by itself
                        append_line(path, record)
            self._over.wait(max(0.0, interval_s - (time.monotonic() - began)))


def _dismiss_sweep(run: RunDir) -> None:
    """Cancels a sweep that has not come yet: it would hold a GPU to find that there is nothing to measure."""
    job = run.job_ids().get("sweep")
    if job and os.environ.get("SLURM_JOB_ID") and not run.read_events(["sweep"]):
        with contextlib.suppress(HostError):
            slurm.Slurm(os.environ).cancel([job])


def serve(run: RunDir, argv: list[str]) -> int:
    """Starts the engine ``argv``, watches it, ends it, and returns the job's exit code."""
    plan = read_record(run.plan, Plan)
    slots = dict(line.split("=", 1) for line in run.slots.read_text().splitlines())
    job_id = os.environ.get("SLURM_JOB_ID")
    # Slurm's own word, since a job may be given less than it asked for, or more.
    deadline = slurm.Slurm(os.environ).end_time(job_id) if job_id else None
    if deadline is None or plan.same_node:
        # The rungs behind this one have their times too.
        deadline = min(deadline or math.inf, time.time() + plan.limits.time_s)
    client = EngineClient(f"http://{slots.get('host', '127.0.0.1')}:{slots['port']}", run.key.read_text())
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    try:
        inengine.install(run.inengine)
        # podman that is asked to end between making a container and starting it leaves it so; the end of its input
        # reaches the container in any case.
        child = process.start(argv, env=os.environ, log=run.engine_log, bound=plan.runtime != "podman-hpc")
    except OSError as error:
        run.record("serve", "failed", reason=f"the engine could not be started: {error}", job_id=job_id)
        return 1
    watcher = Watcher(run, plan, client, child, terminated, deadline)
    run.record("serve", "loading", job_id=job_id)
    try:
        end = watcher.watch()
        if end.event == "done":
            run.record("serve", "stopping", reason=end.reason, job_id=job_id)
        else:
            # Said at once: whoever waits shall not wait for the engine's own end.
            run.record("serve", end.event, reason=end.reason, job_id=job_id)
        _dismiss_sweep(run)
    finally:
        process.stop(child, STOP_GRACE_S)
        nodelocal.clear(plan, os.environ)
    if end.event == "done":
        run.record("serve", "done", reason=end.reason, job_id=job_id)
    return end.exit_code


def main() -> None:
    """``python -m isambard_serve.watch RUN_DIR -- ENGINE ARGV…``."""
    split = sys.argv.index("--")
    sys.exit(serve(RunDir(Path(sys.argv[1])), sys.argv[split + 1 :]))


if __name__ == "__main__":
    main()
