"""From the simulated engine to the verdict: each fault that is planted there refutes the rule that is to see it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isambard_serve import bench, gpus, outputs
from isambard_serve.audit import Audit
from isambard_serve.client import Client
from isambard_serve.engine import EngineClient
from isambard_serve.evidence import CLIENT, Evidence, Observer
from isambard_serve.plan import Plan, filled
from isambard_serve.records import Row
from isambard_serve.run import append_line, write_whole
from isambard_serve.sim import facts, settings
from isambard_serve.sim.client import bench as simulated_bench
from isambard_serve.sim.log import Log
from isambard_serve.sim.server import SimServer
from tests.support.waiting import wait_until
from tests.unit.helpers import small_plan, written_run

KEY = "secret"
QUANT = '{"dtype":"float8e4m3","input_scale_group_size":128}'
HUMMING: dict[str, Any] = {
    "model": "deepseek-ai/DeepSeek-V4-Flash",
    "engine": {"args": {"data-parallel-size": 4, "moe-backend": "humming", "kv-cache-dtype": "fp8",
                        "max-model-len": 4096},
               "env": {"VLLM_HUMMING_INPUT_QUANT_CONFIG": QUANT}},
    "expect": {"moe_backend": "humming", "input_quant": "float8e4m3 group 128", "kv_cache_dtype": "fp8",
               "attention_backend": "FLASHMLA_SPARSE_DSV4"},
    "resources": {"gpus": 4},
    "bench": {"isl": 64, "osl": 64, "concurrency": [8], "min_window": "0s"},
}


class Scene:
    """A run whose engine is simulated in this process, and what the watcher does for its rows."""

    def __init__(self, plan: Plan, *words: str) -> None:
        self.plan = plan
        self.run = written_run(plan)
        self._log = open(self.run.engine_log, "a", encoding="utf-8")  # noqa: SIM115 - closed with the scene
        argv = filled(plan.engine_argv, port="0")
        asked = settings.parse(
            [*argv[argv.index("serve") + 1:], *words],
            plan.environment | {"VLLM_API_KEY": KEY, "ISAMBARD_SERVE_FACTS": str(self.run.facts)})
        log = Log(self._log)
        log.begin(asked)
        log.loaded(asked, 1.5)
        facts.write(asked)
        self._server = SimServer(asked, log, lambda code: None)
        self._server.start()
        self.client = EngineClient(self._server.url, KEY)
        if asked.time_scale > 1:
            write_whole(self.run.outputs, msgspec.json.encode(outputs.ask(self.client, plan.model)))
        self._look = gpus.looker([], self.client, simulated=True)
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch)
        self._watching.start()

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            append_line(self.run.samples, self.client.sample())

    @property
    def port(self) -> str:
        """Where the engine listens."""
        return self._server.url.rpartition(":")[2]

    def row(self, send: Callable[[Sequence[str]], Any] | None = None) -> Row:
        """Measure the plan's point, with ``send`` as the load generator."""
        (point,) = self.plan.points
        folder = self.run.points / point.name
        folder.mkdir(exist_ok=True)
        words = bench.words(self.plan, point, url=self._server.url, folder=folder)
        observer = Observer(self.run)
        first = self.client.sample()
        (send or (lambda words: simulated_bench(words, {"OPENAI_API_KEY": KEY})))(words)
        assert self._look
        for look in self._look():
            append_line(self.run.gpus, look)
        last = self.client.sample()
        wait_until(lambda: (samples := self.samples()) and samples[-1].time > last.time, 10, "one more sample")
        window = [first, *(each for each in self.samples() if first.time < each.time < last.time), last]
        return bench.row(self.plan, point, node="n", bench=bench.result(folder), returncode=0, window=window,
                         evidence=observer.gathered(folder, window))

    def samples(self) -> list[Any]:
        """All samples so far."""
        from isambard_serve.records import Sample
        from isambard_serve.run import read_lines

        return read_lines(self.run.samples, Sample)

    def close(self) -> None:
        """End it."""
        self._over.set()
        self._watching.join()
        self._server.stop()
        self._log.close()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scene]]:
    """Make a scene out of a recipe and faults; it is over at the end of the test."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:

        def make(*faults: str, over: dict[str, Any] = HUMMING, scale: str = "100", **changes: Any) -> Scene:
            plan = small_plan(tmp_path / "runs", over, simulated=True, **changes)
            words = [word for fault in faults for word in ("--sim-fault", fault)]
            made = Scene(plan, *words, "--sim-time-scale", scale)
            stack.callback(made.close)
            return made

        yield make


def test_without_a_fault_nothing_is_refuted_and_what_was_looked_at_is_known(scene: Callable[..., Scene]) -> None:
    made = scene()
    write_whole(made.run.binding, msgspec.json.encode(Audit(not_applicable="the engine is simulated")))
    row = made.row()
    assert (row.reasons, row.valid) == ((), True)
    assert row.unknown == ()
    assert set(row.not_applicable) == {"littles_law", "client", "binding", "window"}
    assert row.power_capped == 1.0


@pytest.mark.parametrize(("fault", "codes", "why"), [
    ("wrong-moe-backend", {"expected"}, "DP rank 0, TP rank 0 has moe_backend marlin"),
    ("odd-rank=1", {"expected"}, "DP rank 1, TP rank 0 has moe_backend marlin, not humming"),
    ("lost-variable", {"expected", "environment"}, "DP rank 0, TP rank 0 has input_quant none"),
    ("compile-in-window", {"compiled"}, "1 in the window: Triton kernel JIT compilation during inference"),
    ("broken-output", {"outputs"}, "32 times the same token"),
    ("broken-output=empty", {"outputs"}, "is empty"),
    ("broken-output=garbage", {"outputs"}, "is no text"),
    ("throttle=1", {"throttled"}, "too hot: GPU-simulated-1"),
    ("warm-prefix-cache", {"prefix_hits"}, "50.0% of the prompt tokens came from the cache"),
    ("fail-requests=0.5", {"completed", "none_failed", "tokens_out"}, "8 requests were answered, 16 should have"),
    ("short-output", {"tokens_out"}, "512 tokens came out, 1024 should have"),
    ("slow-client", {"in_flight"}, "4 requests at most were under way at once, 8 should have been"),
    ("preempt=4", {"recomputed"}, "of the tokens were computed again"),
])
def test_a_planted_fault_refutes_what_is_to_see_it_and_nothing_else(scene: Callable[..., Scene], fault: str,
                                                                    codes: set[str], why: str) -> None:
    row = scene(fault).row()
    assert set(row.reasons) == codes
    assert not row.valid
    assert any(why in row.details[code] for code in codes)


def test_without_the_plugin_the_log_alone_proves_nothing_of_the_other_ranks(scene: Callable[..., Scene]) -> None:
    row = scene("no-facts").row()
    assert row.valid
    assert {"expected", "environment"} <= set(row.unknown)
    assert "4 of 4 ranks" in row.details["expected"]


def test_without_the_plugin_the_log_refutes_all_the_same(scene: Callable[..., Scene]) -> None:
    row = scene("no-facts", "wrong-moe-backend").row()
    assert (row.reasons, row.details["expected"]) == (("expected",), "the log has moe_backend marlin, not humming")


def test_a_kernel_that_was_named_before_might_be_compiled_unheard(scene: Callable[..., Scene]) -> None:
    quiet = {**HUMMING["engine"]["args"], "jit-monitor-verbose": False}
    made = scene("compile-in-window", over={**HUMMING, "engine": {**HUMMING["engine"], "args": quiet}})
    made.row()
    with open(made.run.engine_log, encoding="utf-8") as log:
        assert "JIT compilation during inference" in log.read()
    observer = Observer(made.run)  # a point in which the log says nothing
    evidence = observer.gathered(made.run.points / "none", made.samples()[-1:])
    assert (evidence.compiled, evidence.log.verbose, len(evidence.log.compiled)) == ((), False, 1)


REAL_TIME = {**HUMMING, "bench": {**HUMMING["bench"], "osl": 24, "concurrency": [2]}}


def test_requests_that_lie_before_the_engine_are_missed_by_it(scene: Callable[..., Scene]) -> None:
    row = scene("hidden-queue=1", over=REAL_TIME, scale="1").row()
    assert "littles_law" in row.reasons


def test_requests_of_somebody_else_are_seen(scene: Callable[..., Scene]) -> None:
    made = scene(over=REAL_TIME, scale="1")
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            made.client.complete(made.plan.model)

    others = [threading.Thread(target=ask) for _ in range(2)]
    for other in others:
        other.start()
    try:
        row = made.row()
    finally:
        over.set()
        for other in others:
            other.join()
    assert "littles_law" in row.reasons


def test_a_client_without_time_to_spare_is_not_believed(scene: Callable[..., Scene]) -> None:
    made = scene("busy-client", over=REAL_TIME, scale="1")
    script = made.run.path / "inclient/bench_client.py"
    client = Client(command=[sys.executable, "-m", "isambard_serve.inclient.bench_client",
                             "isambard_serve.sim.benchmarks", str(script)],
                    script=script, fallback=["false"], env={"OPENAI_API_KEY": KEY}, log=made.run.path / "client.log",
                    metrics=f"http://127.0.0.1:{made.port}/metrics", note=lambda text: None)

    def send(words: Sequence[str]) -> None:
        load = client.start_point(words, made.run.path / "bench.log")
        wait_until(lambda: load.ended(1) is not None, 60, "the load to end")
        load.stop()
        assert load.facts
        write_whole(made.run.points / "c0002.r1" / CLIENT, msgspec.json.encode(load.facts))

    with client:
        row = made.row(send)
    assert "client" in row.reasons


def test_what_is_damaged_or_missing_is_no_evidence(tmp_path: Path) -> None:
    run = written_run(small_plan(tmp_path))
    run.binding.write_text("{")
    (tmp_path / CLIENT).write_text("[]")
    assert Observer(run).gathered(tmp_path, []) == Evidence()


def test_the_log_before_the_point_is_not_the_points(tmp_path: Path) -> None:
    run = written_run(small_plan(tmp_path))
    run.engine_log.write_text("Initializing a V1 LLM engine (v0.33.0)\nKernel JIT monitor activated;\n"
                              "Triton kernel JIT compilation during inference: x\n")
    observer = Observer(run)
    with open(run.engine_log, "a", encoding="utf-8") as log:
        log.write("TileLang JIT compilation during inference: y\n")
    evidence = observer.gathered(tmp_path, [])
    assert evidence.compiled == ("TileLang JIT compilation during inference: y",)
    assert len(evidence.log.compiled) == 2
