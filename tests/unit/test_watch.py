"""The watcher: ready needs an answer, every death of the engine is a failure, and the GPUs are given back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import psutil
import pytest

from isambard_serve import asked, nvml, prepare, watch
from isambard_serve.audit import Audit
from isambard_serve.binding import Binding
from isambard_serve.ceilings import Reading
from isambard_serve.claim import Claim
from isambard_serve.errors import HostError
from isambard_serve.plan import Plan
from isambard_serve.prepare import free_port
from isambard_serve.recipe import END_MARGIN_S
from isambard_serve.records import Device, Endpoint, GpuSample, Outputs, Sample, Writer
from isambard_serve.run import RunDir, read_lines, read_record, write_whole
from isambard_serve.watch import Activity, End, Watcher
from tests.support.waiting import wait_until
from tests.unit import fake_engine
from tests.unit.fake_engine import FakeEngine
from tests.unit.helpers import (
    HERE,
    Stubs,
    keep_facts,
    small_plan,
    some_facts,
    some_sample,
    submitted,
    written_run,
)

Start = Callable[..., "subprocess.Popen[bytes]"]
ENGINE = [sys.executable, str(Path(fake_engine.__file__))]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and give little grace."""
    monkeypatch.setattr(watch, "TICK_S", 0.02)
    monkeypatch.setattr(watch, "SAMPLE_S", 0.02)
    monkeypatch.setattr(watch, "STOP_GRACE_S", 5.0)
    monkeypatch.setenv("SLURMD_NODENAME", "nid001")


def limited(folder: Path, *, placement: str = "dependent", simulated: bool = False, **limits: int) -> Plan:
    """A plan with little time for anything but what ``limits`` says."""
    plan = small_plan(folder)
    changed = msgspec.structs.replace(plan.limits, **{"load_s": 60, "idle_s": 60, **limits})
    return msgspec.structs.replace(plan, limits=changed, placement=placement, simulated=simulated)


def wait_until_ready(run: RunDir) -> None:
    def told() -> bool:
        return any(event.event == "ready" for event in run.read_events(["serve"]))

    wait_until(told, 10, "ready", interval_s=0.005)


class Scene:
    """A watcher at work on an engine: the HTTP side is ``fake``, the process is ``process``."""

    def __init__(self, plan: Plan, fake: FakeEngine, process: subprocess.Popen[bytes],
                 deadline: float) -> None:
        self.run = written_run(plan)
        self.process = process
        self.terminated = threading.Event()
        self.ends: list[End] = []
        self._watcher = Watcher(self.run, plan, fake.client(), process, self.terminated, deadline)
        self.thread = threading.Thread(target=lambda: self.ends.append(self._watcher.watch()))

    @property
    def over(self) -> threading.Event:
        """What the watcher's threads wait for."""
        return self._watcher._over

    def begin(self) -> None:
        """Begin to watch."""
        self.thread.start()

    def ready(self) -> None:
        """Begin to watch, and wait until the engine is called ready."""
        self.begin()
        wait_until_ready(self.run)

    def words(self) -> list[str]:
        """What the watcher has said so far."""
        return [event.event for event in self.run.read_events(["serve"])]

    def end(self) -> End:
        """The watcher's reason to end."""
        self.thread.join(10)
        assert self.ends, "the watcher goes on"
        return self.ends[0]


@pytest.fixture
def scene(tmp_path: Path, child: Start) -> Iterator[Callable[..., Scene]]:
    """Set scenes: an engine that answers as told, and a process that sleeps."""
    fakes: list[FakeEngine] = []
    scenes: list[Scene] = []

    def _scene(*, plan: Plan | None = None, argv: tuple[str, ...] = ("sleep", "60"), deadline: float | None = None,
               **answers: object) -> Scene:
        fakes.append(FakeEngine(**answers).__enter__())  # type: ignore[arg-type]
        scenes.append(Scene(plan or limited(tmp_path), fakes[-1], child(*argv), deadline or time.time() + 3600))
        return scenes[-1]

    yield _scene
    for each in scenes:
        each.terminated.set()
        if each.thread.ident:
            each.thread.join(10)
    for fake in fakes:
        fake.__exit__(None, None, None)


def test_an_engine_is_ready_when_it_is_healthy_and_has_answered_a_completion(
        scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "301")
    watched = scene()
    watched.ready()
    endpoint = msgspec.json.decode(watched.run.endpoint.read_bytes(), type=Endpoint)
    assert endpoint.url.startswith("http://127.0.0.1:")
    assert (endpoint.model, endpoint.node, endpoint.job_id) == ("small-model", "nid001", "301")
    assert endpoint.key_file == str(watched.run.key)


def audited(run: RunDir) -> Audit:
    """What became of the binding."""
    return msgspec.json.decode(run.binding.read_bytes(), type=Audit)


def test_how_the_binding_came_out_is_kept_before_the_engine_is_called_ready(scene: Callable[..., Scene]) -> None:
    watched = scene()
    write_whole(watched.run.node, msgspec.json.encode(prepare.node_facts(limited(watched.run.path))))
    watched.ready()
    assert audited(watched.run).not_applicable == "the recipe does not ask for it (engine.args.numa-bind)"
    assert watched.words() == ["ready"]


def test_a_binding_that_is_wrong_is_noted_and_one_that_cannot_be_looked_at_stops_nothing(
        scene: Callable[..., Scene]) -> None:
    wrong, unclear = scene(), scene(plan=msgspec.structs.replace(limited(Path("/")), run_dir=f"{os.getcwd()}/other"))
    node = prepare.node_facts(limited(wrong.run.path))
    node = msgspec.structs.replace(node, binding=Binding(impossible="the job has no core beside its GPU"))
    write_whole(wrong.run.node, msgspec.json.encode(node))
    for watched in (wrong, unclear):
        watched.ready()
    assert audited(wrong.run).verdict is False
    assert wrong.words() == ["note", "ready"]
    assert audited(unclear.run).verdict is None
    assert "could not be looked at" in audited(unclear.run).findings[0]


def test_the_fixed_prompts_are_answered_before_the_engine_is_called_ready(scene: Callable[..., Scene]) -> None:
    made = scene(completion=b'{"choices": [{"index": 0, "text": "Paris", "token_ids": [7]}]}')
    made.ready()
    (answer,) = read_record(made.run.outputs, Outputs).answers
    assert (answer.text, answer.tokens) == ("Paris", (7,))
    assert made.words() == ["ready"]


def test_an_engine_that_does_not_answer_them_is_ready_all_the_same_and_it_is_noted(scene: Callable[..., Scene]) -> None:
    made = scene(completion=b'{"choices": [{"text": "without a number"}]}')
    made.ready()
    assert not made.run.outputs.exists()
    note, ready = made.run.read_events(["serve"])
    assert (note.event, ready.event) == ("note", "ready")
    assert str(note.reason).startswith("the fixed prompts were not answered: /v1/completions: ")


def test_the_gpus_that_the_engine_uses_are_looked_at_from_then_on(scene: Callable[..., Scene],
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([HostError("not now"), *range(1, 100_000)])

    class Driver:
        def device(self, uuid: str) -> str:
            return uuid

        def reading(self, handle: str) -> Reading:
            number = next(readings)
            if isinstance(number, HostError):
                raise number
            return Reading(time=0.0, sm_mhz=number, power_w=1.0, temperature_c=1, reasons=4)

    monkeypatch.setattr(nvml, "Nvml", Driver)
    made = scene()
    keep_facts(made.run, some_facts(device=Device(name="GH200", uuid="GPU-1", pci_bus_id="x")))
    made.ready()
    wait_until(lambda: len(read_lines(made.run.gpus, GpuSample)) > 2, 10, "looks")
    look, *_ = read_lines(made.run.gpus, GpuSample)
    assert (look.gpu, look.sm_mhz, look.reasons) == ("GPU-1", 1, 4)  # one look missed ends nothing


def test_an_engine_on_no_gpu_leaves_no_looks(scene: Callable[..., Scene]) -> None:
    made = scene()
    keep_facts(made.run, some_facts())
    made.ready()
    wait_until(lambda: len(read_lines(made.run.samples, Sample)) > 2, 10, "samples")
    assert not made.run.gpus.exists()


def test_an_engine_that_is_not_healthy_is_not_ready_and_fails_after_its_load_limit(
        scene: Callable[..., Scene], tmp_path: Path) -> None:
    watched = scene(plan=limited(tmp_path, load_s=0), health=503)
    watched.begin()
    assert watched.end().event == "failed"
    assert "load_limit" in watched.end().reason
    assert watched.words() == []
    assert not watched.run.endpoint.exists()


def test_a_healthy_engine_that_completes_nothing_is_not_ready(scene: Callable[..., Scene]) -> None:
    watched = scene(status=500)
    watched.begin()
    wait_until(watched.words, 10, "the note", interval_s=0.005)
    assert watched.words() == ["note"]
    assert "no completion yet: /v1/completions: HTTP Error 500" in str(watched.run.read_events()[0].reason)
    assert not watched.run.endpoint.exists()


def test_samples_are_taken_from_the_moment_that_the_engine_is_ready(scene: Callable[..., Scene]) -> None:
    watched = scene()
    watched.ready()
    samples = wait_until(lambda: read_lines(watched.run.samples, Sample)[2:], 10, "samples", interval_s=0.01)
    assert samples[0].kv_cache_usage == 0.5


@pytest.mark.parametrize("metrics", ["not { metrics", ""])
def test_a_sample_that_cannot_be_read_stops_nothing(scene: Callable[..., Scene], metrics: str) -> None:
    watched = scene(metrics=f"vllm:kv_cache_usage_perc {metrics}")
    watched.ready()
    watched.run.record("sweep", "finished", reason="2 points measured, 2 valid")
    assert watched.end() == End("done", "2 points measured, 2 valid")


@pytest.mark.parametrize(("script", "told"), [
    ("exit 0", "exit code 0"), ("exit 1", "exit code 1"), ("exit 127", "exit code 127: there is no such command"),
    ("kill -KILL $$", "signal SIGKILL"), ("kill -40 $$", "signal 40")])
def test_an_engine_that_ends_by_itself_has_failed_whatever_its_exit_code(
        scene: Callable[..., Scene], script: str, told: str) -> None:
    watched = scene(argv=("bash", "-c", script), health=503)
    watched.begin()
    assert watched.end() == End("failed", f"the engine ended by itself ({told}) while it was starting")


def test_an_engine_that_ends_while_it_is_needed_has_failed(scene: Callable[..., Scene]) -> None:
    watched = scene()
    watched.ready()
    watched.process.terminate()
    assert watched.end() == End("failed", "the engine ended by itself (signal SIGTERM) while it was needed")


def test_the_death_of_one_of_the_engines_processes_is_a_failure_too(scene: Callable[..., Scene]) -> None:
    watched = scene(argv=("bash", "-c", "(exec -a VLLM::EngineCore_DP1 sleep 60) & (exec -a helper sleep 60) & wait"))
    wait_until(lambda: watch.engine_processes(watched.process.pid), 10, "the engine's process", interval_s=0.005)
    watched.ready()
    ((title, inner),) = watch.engine_processes(watched.process.pid).items()
    inner.kill()
    assert watched.end() == End("failed", f"the engine's process {title} died")
    assert title.startswith("VLLM::EngineCore_DP1 60 (pid ")


def test_an_engine_that_is_not_there_has_no_processes(child: Start) -> None:
    gone = child("true")
    gone.wait()
    assert watch.engine_processes(gone.pid) == {}


def test_when_the_sweep_has_finished_the_run_is_done(scene: Callable[..., Scene]) -> None:
    watched = scene()
    watched.ready()
    watched.run.record("sweep", "finished", reason="2 points measured, 1 valid")
    assert watched.end() == End("done", "2 points measured, 1 valid")
    assert watched.end().exit_code == 0


def test_when_the_sweep_gives_up_the_engine_stops_and_leaves_the_verdict_to_it(scene: Callable[..., Scene]) -> None:
    watched = scene()
    watched.begin()
    watched.run.record("sweep", "failed", reason="the sweep: no point left a result")
    assert watched.end().event == "stopping"
    assert watched.end().exit_code == 1


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_cancelled_run_ends(scene: Callable[..., Scene], is_ready: bool) -> None:
    watched = scene(health=200 if is_ready else 503)
    if is_ready:
        watched.ready()
    else:
        watched.begin()
    watched.run.record("cancel", "cancelled", reason="cancelled on request")
    assert watched.end() == End("stopping", "cancelled on request")


def test_a_request_to_end_is_followed_and_told(scene: Callable[..., Scene]) -> None:
    watched = scene()
    watched.ready()
    watched.terminated.set()
    assert watched.end().event == "stopping"
    assert "signal" in watched.end().reason


def test_a_signal_to_the_whole_job_explains_the_engines_death(
        scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "TICK_S", 5.0)
    watched = scene(argv=("true",), health=503)
    watched.process.wait()
    watched.begin()
    watched.terminated.set()
    assert watched.end().event == "stopping"


def test_an_engine_that_nobody_asks_for_anything_is_ended(scene: Callable[..., Scene], tmp_path: Path) -> None:
    watched = scene(plan=limited(tmp_path, idle_s=0))
    watched.begin()
    assert watched.end().event == "failed"
    assert "idle_timeout" in watched.end().reason


@pytest.mark.parametrize("left_s", [END_MARGIN_S - 1, -5.0])
def test_a_job_stops_by_itself_before_its_time_limit_cuts_it_off(scene: Callable[..., Scene], left_s: float) -> None:
    watched = scene(deadline=time.time() + left_s)
    watched.begin()
    assert watched.end().event == "failed"
    assert "time limit" in watched.end().reason


def test_a_server_for_people_waits_for_nobody_and_ends_well_when_nobody_asks(
        scene: Callable[..., Scene], tmp_path: Path) -> None:
    watched = scene(plan=limited(tmp_path, placement="none", idle_s=1, grace_s=0))
    watched.ready()
    assert watched.end() == End("done", "no request for 1 s (serve_idle_timeout)")
    assert watched.words() == ["ready"]


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_server_for_people_ends_well_at_its_time_limit_if_it_has_served_at_all(
        scene: Callable[..., Scene], tmp_path: Path, is_ready: bool) -> None:
    plan = limited(tmp_path, placement="none")
    watched = scene(plan=plan, health=200 if is_ready else 503, deadline=time.time() + END_MARGIN_S + 1)
    watched.begin()
    assert watched.end() == End("done" if is_ready else "failed", "the job's time limit is 180 s away")


def test_what_is_asked_of_a_server_for_people_is_measured_from_inside_and_ends_nothing(
        scene: Callable[..., Scene], inside: Callable[[str], Inside], tmp_path: Path) -> None:
    watched = scene(plan=limited(tmp_path, placement="none"))
    started = inside(f"{say(watched.run, 'failed')}; exit 1")
    watched.ready()
    looked(watched)
    assert started.commands == []
    for count in (1, 2):  # the first of which fails, and is not tried again
        asked.add(watched.run, [4], 2)
        wait_until(lambda count=count: len(started.commands) == count, 10, "the sweep")  # type: ignore[misc]
        looked(watched)
    assert len(started.commands) == 2
    assert watched.ends == []


def test_a_job_with_time_left_goes_on(scene: Callable[..., Scene]) -> None:
    watched = scene(deadline=time.time() + END_MARGIN_S + 60)
    watched.ready()
    assert watched.ends == []


def test_idle_is_counted_from_the_last_sign_of_a_request() -> None:
    activity = Activity(now=100)
    assert activity.idle_s(130) == 30
    activity.note(some_sample(requests_total=1), 200)
    activity.note(some_sample(requests_total=1), 210)
    assert activity.idle_s(230) == 30
    activity.note(some_sample(requests_total=1, running=1), 300)
    activity.note(some_sample(requests_total=1, waiting=1), 310)
    assert activity.idle_s(310) == 0
    activity.note(some_sample(requests_total=1, generation_tokens_total=5), 400)
    assert activity.idle_s(401) == 1


class Inside:
    """Stands where the watcher starts the measuring inside its job, and does ``script`` instead."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.commands: list[list[str]] = []
        self.children: list[subprocess.Popen[bytes]] = []
        self.logs: list[Path] = []
        self.bound: list[bool] = []

    def __call__(self, argv: list[str], *, env: Mapping[str, str], log: Path, bound: bool) -> subprocess.Popen[bytes]:
        """Start it, as :func:`isambard_serve.process.start` would."""
        self.commands.append(argv)
        self.logs.append(log)
        self.bound.append(bound)
        self.children.append(subprocess.Popen(["bash", "-c", self.script], process_group=0))
        return self.children[-1]


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Inside]]:
    """Have the script given measure inside the serve job. Nothing of it may outlive the watcher."""
    made: list[Inside] = []

    def _inside(script: str) -> Inside:
        made.append(Inside(script))
        monkeypatch.setattr("isambard_serve.process.start", made[-1])
        return made[-1]

    yield _inside
    for each in made:
        for process in each.children:
            process.kill()
            process.wait()


def say(run: RunDir, event: str) -> str:
    """A command that says ``event`` as whoever measures inside."""
    return f"""echo '{{"time": 9e9, "writer": "inside", "event": "{event}"}}' >> {run.events}/inside.jsonl"""


def looked(watched: Scene, times: int = 3) -> None:
    """Wait until the watcher has had the time to look at all there is."""
    seen = len(read_lines(watched.run.samples, Sample))
    wait_until(lambda: len(read_lines(watched.run.samples, Sample)) >= seen + times, 10, "samples", interval_s=0.005)


def test_if_no_sweep_comes_in_time_the_points_are_measured_from_inside(
        scene: Callable[..., Scene], inside: Callable[[str], Inside], tmp_path: Path) -> None:
    watched = scene(plan=limited(tmp_path, grace_s=0))
    started = inside(f"{say(watched.run, 'finished')}; sleep 60")
    watched.begin()
    assert watched.end().event == "done"
    assert started.commands == [[sys.executable, "-m", "isambard_serve.sweep", str(watched.run.path), "0"]]
    assert started.logs == [watched.run.serve_log]
    assert started.bound == [True]
    (noted,) = [event.reason for event in watched.run.read_events(["serve"]) if event.event == "note"]
    assert noted == "measuring from inside the serve job: no sweep came within 0 s"


def test_nothing_is_taken_over_before_the_engine_is_ready(
        scene: Callable[..., Scene], inside: Callable[[str], Inside], tmp_path: Path) -> None:
    watched = scene(plan=limited(tmp_path, grace_s=0, placement="inside"), health=503)
    started = inside("sleep 60")
    watched.begin()
    time.sleep(0.1)
    assert started.commands == []


def test_a_sweep_whose_heartbeat_stands_still_is_taken_over_from_its_claim(
        scene: Callable[..., Scene], inside: Callable[[str], Inside], tmp_path: Path) -> None:
    watched = scene(plan=limited(tmp_path, silence_s=0))
    started = inside("sleep 60")
    Claim.take(watched.run, "sweep", "102", over=0)
    (watched.run.claims / "0001.beat").write_text("7\n")
    watched.ready()
    wait_until(lambda: started.commands, 10, "the takeover", interval_s=0.005)
    assert started.commands[0][-1] == "1"
    assert "heartbeat stood still" in str(watched.run.read_events(["serve"])[-1].reason)


def test_a_sweep_that_came_in_time_is_left_alone(
        scene: Callable[..., Scene], inside: Callable[[str], Inside], tmp_path: Path) -> None:
    watched = scene(plan=limited(tmp_path, grace_s=0))
    started = inside("sleep 60")
    claim = Claim.take(watched.run, "sweep", "102", over=0)
    with claim.beating(0.01):
        watched.ready()
        looked(watched)
    assert started.commands == []
    assert watched.words() == ["ready"]


def test_where_the_plan_says_so_the_points_are_measured_from_inside_at_once_and_once(
        scene: Callable[..., Scene], inside: Callable[[str], Inside], tmp_path: Path) -> None:
    watched = scene(plan=limited(tmp_path, placement="inside"))
    started = inside("sleep 60")
    watched.ready()
    looked(watched)
    assert len(started.commands) == 1
    assert str(watched.run.read_events(["serve"])[-1].reason).endswith(": as planned")
    watched.terminated.set()
    assert watched.end().event == "stopping"
    assert started.children[0].poll() is not None


def test_measuring_inside_that_ends_without_a_last_word_fails_the_job(
        scene: Callable[..., Scene], inside: Callable[[str], Inside], tmp_path: Path) -> None:
    watched = scene(plan=limited(tmp_path, placement="inside"))
    inside("exit 3")
    watched.begin()
    assert watched.end() == End("failed", "measuring inside the serve job ended with 3")


def test_measuring_inside_that_fails_says_why_itself(
        scene: Callable[..., Scene], inside: Callable[[str], Inside], tmp_path: Path) -> None:
    watched = scene(plan=limited(tmp_path, placement="inside"))
    inside(f"{say(watched.run, 'failed')}; exit 1")
    watched.begin()
    assert watched.end() == End("stopping", "the sweep gave up")


def leaves(run: RunDir) -> str:
    """A command that finds that the sweep has come after all, and leaves the points to it."""
    claim = f"""echo '{{"holder": "sweep", "job_id": "102", "time": 1}}' > {run.claims}/0001.json"""
    return f"{claim}; {say(run, 'left')}"


def test_measuring_inside_leaves_the_points_to_a_sweep_that_came_after_all(
        scene: Callable[..., Scene], inside: Callable[[str], Inside], tmp_path: Path) -> None:
    watched = scene(plan=limited(tmp_path, grace_s=0, silence_s=60))
    started = inside(leaves(watched.run))
    watched.ready()
    wait_until(lambda: started.children and started.children[0].poll() is not None, 10, "it to leave", interval_s=0.005)
    looked(watched, 5)
    assert len(started.commands) == 1
    assert watched.ends == []
    watched.run.record("sweep", "finished", reason="2 points measured, 2 valid")
    assert watched.end().event == "done"


def test_a_sweep_that_came_after_all_is_watched_over_and_taken_over_when_its_heartbeat_stops(
        scene: Callable[..., Scene], inside: Callable[[str], Inside], tmp_path: Path) -> None:
    watched = scene(plan=limited(tmp_path, grace_s=0, silence_s=0))
    first = leaves(watched.run)
    started = inside(f"[ -e {watched.run.claims}/0001.json ] && exec sleep 60; {first}")
    watched.ready()
    wait_until(lambda: len(started.commands) == 2, 10, "the second takeover", interval_s=0.005)
    assert [command[-1] for command in started.commands] == ["0", "1"]


def test_a_simulated_engine_is_sampled_more_often(
        scene: Callable[..., Scene], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SAMPLE_S", 1000.0)
    monkeypatch.setattr(watch, "SIMULATED_SAMPLE_S", 0.01)
    watched = scene(plan=limited(tmp_path, simulated=True))
    watched.ready()
    looked(watched, 2)


def test_a_full_disk_ends_no_run_by_itself(scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()

    def full(*_: object) -> None:
        tried.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watch, "append_line", full)
    watched = scene()
    watched.ready()
    assert tried.wait(10)
    watched.run.record("sweep", "finished", reason="2 points measured, 2 valid")
    assert watched.end().event == "done"


@pytest.mark.parametrize("told", ["endpoint", "ready"])
def test_an_engine_that_becomes_ready_while_the_disk_is_full_says_so_as_soon_as_there_is_room(
        scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    tries: list[str] = []
    record = RunDir.record

    def full_at_first(what: str) -> None:
        if what == told:
            tries.append(what)
            if len(tries) < 3:
                raise OSError(28, "No space left on device")

    def write_endpoint(path: Path, content: bytes) -> None:
        full_at_first("endpoint")
        write_whole(path, content)

    def record_ready(run: RunDir, writer: Writer, event: str, **more: str | None) -> None:
        full_at_first(event)
        record(run, writer, event, **more)

    monkeypatch.setattr(watch, "write_whole", write_endpoint)
    monkeypatch.setattr(RunDir, "record", record_ready)
    watched = scene()
    wait = watched.over.wait
    monkeypatch.setattr(watched.over, "wait", lambda timeout: wait(min(timeout, 0.01)))
    watched.ready()
    assert len(tries) == 3
    assert watched.words() == ["ready"]
    assert watched.run.endpoint.exists()


def test_an_engine_that_can_tell_nobody_that_it_is_ready_is_ended_when_it_is_idle(
        scene: Callable[..., Scene], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watch, "write_whole", full)
    watched = scene(plan=limited(tmp_path, idle_s=0))
    watched.begin()
    assert "idle_timeout" in watched.end().reason
    assert watched.words() == []


@pytest.fixture
def prepared(tmp_path: Path) -> RunDir:
    """A run as ``prepare`` leaves it."""
    run = written_run(limited(tmp_path / "runs"))
    write_whole(run.slots, f"port={free_port()}\n")
    write_whole(run.key, "secret")
    return run


@pytest.fixture
def same_handler() -> Iterator[None]:
    """Put TERM's handler back: the watcher takes it, as the main program that it is on a node."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def engine_argv(run: RunDir) -> list[str]:
    return [*ENGINE, run.slots.read_text().strip().removeprefix("port=")]


@pytest.mark.usefixtures("same_handler")
def test_a_serve_job_from_start_to_end(prepared: RunDir, monkeypatch: pytest.MonkeyPatch, stubs: Stubs) -> None:
    stubs.add("scontrol", "echo EndTime=2099-01-01T00:00:00")
    monkeypatch.setenv("SLURM_JOB_ID", "301")
    monkeypatch.setattr("sys.argv", ["watch", str(prepared.path), "--", *engine_argv(prepared)])

    def finish() -> None:
        wait_until_ready(prepared)
        prepared.record("sweep", "finished", reason="2 points measured, 2 valid")

    thread = threading.Thread(target=finish)
    thread.start()
    with pytest.raises(SystemExit) as caught:
        watch.main()
    thread.join()
    assert caught.value.code == 0
    events = prepared.read_events(["serve"])
    assert [event.event for event in events] == ["loading", "ready", "stopping", "done"]
    assert {event.job_id for event in events} == {"301"}
    assert events[-1].reason == "2 points measured, 2 valid"


@pytest.mark.usefixtures("same_handler")
def test_an_engine_that_exits_with_0_at_once_fails_the_job(prepared: RunDir) -> None:
    assert watch.serve(prepared, ["sh", "-c", "echo no GPU; exit 0"]) == 1
    assert [event.event for event in prepared.read_events()] == ["loading", "failed"]
    assert prepared.engine_log.read_text() == "no GPU\n"


@pytest.mark.usefixtures("same_handler")
def test_an_engine_that_cannot_be_started_fails_the_job_with_the_reason(prepared: RunDir) -> None:
    assert watch.serve(prepared, ["/nowhere/vllm"]) == 1
    (event,) = prepared.read_events()
    assert event.event == "failed"
    assert "/nowhere/vllm" in str(event.reason)


def test_a_serve_job_that_is_asked_to_end_takes_its_engine_with_it(prepared: RunDir) -> None:
    argv = [sys.executable, "-m", "isambard_serve.watch", str(prepared.path), "--", *engine_argv(prepared)]
    job = subprocess.Popen(argv, cwd=HERE.parents[1])
    try:
        wait_until_ready(prepared)
        engine = psutil.Process(job.pid).children()
        assert len(engine) == 1
        job.terminate()
        assert job.wait(10) == 1
    finally:
        job.kill()
        job.wait()
    assert not any(process.is_running() for process in engine)
    events = prepared.read_events(["serve"])
    assert events[-1].event == "stopping"
    assert "asked to end by a signal" in str(events[-1].reason)


@pytest.mark.usefixtures("same_handler")
def test_without_slurms_word_the_jobs_time_limit_is_the_plans(tmp_path: Path) -> None:
    run = written_run(limited(tmp_path / "runs", time_s=END_MARGIN_S - 1))
    write_whole(run.slots, "port=1\n")
    write_whole(run.key, "secret")
    assert watch.serve(run, ["sleep", "60"]) == 1
    assert "time limit is 180 s away" in str(run.read_events(["serve"])[-1].reason)


@pytest.mark.usefixtures("same_handler")
@pytest.mark.parametrize(("came", "cancelled"), [(False, ["102"]), (True, [])])
def test_a_sweep_that_has_not_come_is_dismissed_when_the_engine_has_ended(
        prepared: RunDir, monkeypatch: pytest.MonkeyPatch, stubs: Stubs, came: bool, cancelled: list[str]) -> None:
    record = prepared.path / "cancelled"
    stubs.add("scontrol", "true")
    stubs.add("scancel", f'echo "$@" >> {record}')
    monkeypatch.setenv("SLURM_JOB_ID", "101")
    write_whole(prepared.jobs, msgspec.json.encode(submitted()))
    if came:
        prepared.record("sweep", "waiting", job_id="102")
    assert watch.serve(prepared, ["true"]) == 1
    assert (record.read_text().split() if record.exists() else []) == cancelled


@pytest.mark.usefixtures("same_handler")
def test_a_sweep_that_slurm_will_not_cancel_changes_nothing(
        prepared: RunDir, monkeypatch: pytest.MonkeyPatch, stubs: Stubs) -> None:
    stubs.add("scontrol", "true")
    stubs.add("scancel", "echo outage >&2; exit 1")
    monkeypatch.setenv("SLURM_JOB_ID", "101")
    write_whole(prepared.jobs, msgspec.json.encode(submitted()))
    assert watch.serve(prepared, ["true"]) == 1
    assert [event.event for event in prepared.read_events(["serve"])] == ["loading", "failed"]


def test_an_engine_whose_watcher_is_killed_is_ended_by_the_kernel(prepared: RunDir) -> None:
    argv = [sys.executable, "-m", "isambard_serve.watch", str(prepared.path), "--", *engine_argv(prepared)]
    job = subprocess.Popen(argv, cwd=HERE.parents[1])
    try:
        wait_until_ready(prepared)
        (engine,) = psutil.Process(job.pid).children()
    finally:
        job.kill()
        job.wait()
    wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 10, "the engine's end",
               interval_s=0.01)
