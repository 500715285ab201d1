"""The load generator: one process for load after load, a command for each where that is not possible."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from isambard_serve import client as clients
from isambard_serve.client import Client, Load
from tests.support.waiting import wait_until
from tests.unit.fake_engine import FakeEngine

BENCHMARK = """
import argparse, asyncio, os, sys, time

async def main_async(args):
    print("measuring", args.do, os.environ["A"], os.getpid())
    os.write(2, b"said beside\\n")
    if args.do == "fail":
        raise RuntimeError("this version has changed")
    if args.do == "die":
        os._exit(9)
    if args.do == "exit0":
        os._exit(0)
    if args.do == "deaf":
        time.sleep(600)
    if args.do == "prompts":
        await asyncio.sleep(0.05)
        time.sleep(0.5)
    if args.do == "busy":
        for _ in range(20):
            await asyncio.sleep(0.01)
            time.sleep(0.05)
        return {"duration": 1}
    await asyncio.sleep(600 if args.do == "endless" else 0.1)
    return {"duration": 0.05}

def add_cli_args(parser):
    parser.add_argument("--do")
"""
FALLBACK = """echo commanded "$@"; echo $A"""


class Bench:
    """A client whose benchmark is :data:`BENCHMARK`, or ``text``."""

    def __init__(self, folder: Path, text: str = BENCHMARK, *, metrics: str = "http://127.0.0.1:1/metrics") -> None:
        (folder / "a_benchmark.py").write_text(textwrap.dedent(text))
        self.notes: list[str] = []
        self.folder = folder
        script = folder / "inclient/bench_client.py"
        self.client = Client(
            # By its module's name, so that its coverage is seen; the sandbox runs the copy.
            command=[sys.executable, "-m", "isambard_serve.inclient.bench_client", "a_benchmark", str(script)],
            script=script, fallback=["bash", "-c", FALLBACK, "bench"],
            env={"A": "b", "PYTHONPATH": str(folder), "OPENAI_API_KEY": "key"}, metrics=metrics,
            log=folder / "client.log", note=self.notes.append)

    def start(self, do: str) -> Load:
        """Start a load."""
        return self.client.start_point(["--do", do], self.folder / f"{do}.log")

    def run(self, do: str) -> Load:
        """Run a load to its end."""
        load = self.start(do)
        wait_until(lambda: load.ended(1) is not None, 30, "the load to end")
        load.stop()
        return load

    def said(self, do: str) -> list[str]:
        """What the benchmark has said in the load's log."""
        return (self.folder / f"{do}.log").read_text().splitlines()

    def processes(self) -> list[psutil.Process]:
        """The processes that stay."""
        return [process for process in psutil.process_iter(["cmdline"])
                if str(self.folder / "inclient/bench_client.py") in (process.info["cmdline"] or [])]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    with made.client:
        yield made
    wait_until(lambda: not made.processes(), 10, "the client to end")


def test_loads_are_sent_by_one_process_that_stays_and_each_has_its_own_log(bench: Bench) -> None:
    for do in ("one", "two"):
        load = bench.run(do)
        assert load.ended(0) == 0
    (process,) = bench.processes()
    assert bench.said("one") == ["said beside", f"measuring one b {process.pid}"]
    assert bench.said("two") == ["said beside", f"measuring two b {process.pid}"]
    assert (bench.folder / "client.log").read_text() == ""
    assert bench.notes == []


def test_its_program_is_put_where_its_command_expects_it(bench: Bench) -> None:
    bench.run("one")
    source = Path(clients.__file__).parent / "inclient/bench_client.py"
    assert (bench.folder / "inclient/bench_client.py").read_bytes() == source.read_bytes()


def test_a_stopped_load_is_over_at_once_and_the_process_stays(bench: Bench) -> None:
    load = bench.start("endless")
    wait_until(lambda: (bench.folder / "endless.log").exists(), 10, "it to begin")
    load.stop()
    (process,) = bench.processes()
    bench.run("two")
    assert bench.said("two")[-1] == f"measuring two b {process.pid}"
    assert bench.notes == []


def test_a_load_that_is_stopped_at_once_does_not_run_nor_the_next_one_stop(bench: Bench) -> None:
    for _ in range(5):
        bench.start("endless").stop()
        assert bench.run("two").ended(0) == 0
    assert len(bench.processes()) == 1


def test_a_load_that_cannot_be_broken_off_takes_the_process_with_it_and_the_next_has_another(
        bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "STOP_S", 0.3)
    load = bench.start("deaf")
    wait_until(lambda: (bench.folder / "deaf.log").exists(), 10, "it to begin")
    (before,) = bench.processes()
    load.stop()
    assert load.ended(0) is None
    assert not before.is_running()
    assert bench.run("two").ended(0) == 0
    assert bench.notes == []


@pytest.mark.parametrize("how", ["die", "exit0"])
def test_a_process_that_dies_in_a_load_has_failed_it_and_the_next_load_has_another(bench: Bench, how: str) -> None:
    assert bench.run(how).ended(0) == (9 if how == "die" else 1)
    assert bench.run("two").ended(0) == 0
    assert bench.notes == []


def test_how_the_client_fared_in_its_window_is_told(bench: Bench) -> None:
    busy, prompts = bench.run("busy").facts, bench.run("prompts").facts
    assert busy is not None
    assert busy.cpu_share is not None
    assert busy.loop_lag_p99_ms is not None
    assert busy.loop_lag_p99_ms > 30
    assert prompts is not None
    assert prompts.loop_lag_p99_ms is not None
    assert prompts.loop_lag_p99_ms < 400  # the prompts were made before


def test_the_engines_counters_are_read_right_before_and_right_after(tmp_path: Path) -> None:
    with FakeEngine(metrics="vllm:prompt_tokens_total 5\nvllm:x_bucket{le=\"1\"} 1\n") as engine:
        bench = Bench(tmp_path, metrics=f"http://127.0.0.1:{engine.port}/metrics")
        with bench.client:
            load = bench.run("one")
        assert load.counters is not None
        before, after = load.counters
        assert (before.prompt_tokens_total, after.prompt_tokens_total) == (5, 5)
        assert before.time + 0.1 <= after.time
        assert [(path, key) for path, key, _ in engine.asked] == [("/metrics", "Bearer key")] * 2


def test_counters_that_nobody_could_read_are_not_known(bench: Bench) -> None:
    assert bench.run("one").counters is None


UNFIT = {
    "no such module": "import gone",
    "no such function": "def add_cli_args(parser): pass",
    "other arguments": "def add_cli_args(): pass",
    "it dies": "import os; os._exit(0)",
}


@pytest.mark.parametrize("why", UNFIT)
def test_a_version_without_this_way_has_a_command_for_each_load_and_it_is_noted_once(tmp_path: Path, why: str) -> None:
    bench = Bench(tmp_path, UNFIT[why])
    with bench.client:
        for _ in range(2):
            assert bench.run("one").ended(0) == 0
        assert bench.processes() == []
    assert bench.said("one") == ["commanded --do one", "b"] * 2
    (note,) = bench.notes
    assert note.startswith("each load is a command of its own: ")


def test_a_program_that_cannot_be_started_is_no_reason_not_to_measure(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client._command = [str(tmp_path / "nowhere/python3")]
    with bench.client:
        assert bench.run("one").ended(0) == 0
    assert "could not be started" in bench.notes[0]


def test_a_load_that_fails_where_it_should_not_is_tried_by_command_the_next_time(bench: Bench) -> None:
    assert bench.run("fail").ended(0) == 1
    assert "RuntimeError: this version has changed" in "\n".join(bench.said("fail"))
    bench.run("two")
    assert bench.said("two") == ["commanded --do two", "b"]
    assert bench.notes == ["each load is a command of its own: a load ended with 1 there"]


def test_words_that_the_benchmark_refuses_end_as_its_command_would(bench: Bench) -> None:
    load = bench.client.start_point(["--unknown"], bench.folder / "refused.log")
    wait_until(lambda: load.ended(1) is not None, 30, "the load to end")
    assert load.ended(0) == 2
    assert "--unknown" in "\n".join(bench.said("refused"))


def test_a_command_can_be_stopped_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path, UNFIT["it dies"])
    bench.client._fallback = ["bash", "-c", "sleep 600", "bench"]
    with bench.client:
        load = bench.start("one")
        load.stop()
        assert load.ended(0) == -15


def test_an_import_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "READY_S", 0.0)
    monkeypatch.setattr(clients, "STOP_S", 0.1)
    bench = Bench(tmp_path, "import time; time.sleep(600)")
    with bench.client:
        assert bench.run("one").ended(0) == 0
    assert bench.notes == ["each load is a command of its own: it was not ready within 0 s"]


def test_the_process_ends_when_nobody_talks_to_it_any_more(
        bench: Bench, child: Callable[..., object], tmp_path: Path) -> None:
    bench.start("endless")
    wait_until(lambda: (bench.folder / "endless.log").exists(), 10, "it to begin")
    (process,) = bench.processes()
    line = bench.client._line
    assert line is not None
    line._to.close()  # as when the sweep is killed
    process.wait(10)


def test_what_is_no_message_is_not_heard(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    noisy = f"echo hello; echo 1; exec {sys.executable} -m isambard_serve.inclient.bench_client a_benchmark"
    bench.client._command = ["bash", "-c", noisy]
    with bench.client:
        assert bench.run("one").ended(0) == 0
    assert json.dumps(bench.notes) == "[]"
