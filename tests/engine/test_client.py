"""The load generator that stays, on the real engine: vLLM's own benchmark, imported once."""

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from isambard_serve import bench, loadrules
from isambard_serve.client import Client, Load
from isambard_serve.engine import EngineClient
from isambard_serve.evidence import Measured
from isambard_serve.plan import Plan
from isambard_serve.run import RunDir
from tests.engine.serving import Engine, environment, tiny_plan
from tests.support.waiting import wait_until

CLI_RESULT = Path(__file__).parents[1] / "unit/samples/bench.json"


@pytest.fixture(scope="module")
def planned(engine_venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The plan of the recipe `tiny`, whose benchmark calls the model as the tests' engine does."""
    return tiny_plan(engine_venv, tmp_path_factory.mktemp("runs"), "bench.args.served-model-name=tiny")


@pytest.fixture(scope="module")
def notes() -> list[str]:
    """What the client had to say."""
    return []


@pytest.fixture(scope="module")
def client(engine: Engine, planned: Plan, notes: list[str]) -> Iterator[Client]:
    """One client for all tests: its imports take their time."""
    run = RunDir(Path(planned.run_dir))
    run.create()
    with Client(command=planned.client_command, script=run.client, fallback=planned.bench_command,
                env=environment(run.path) | {"OPENAI_API_KEY": engine.key}, metrics=f"{engine.url}/metrics",
                log=run.points / "client.log", note=notes.append) as made:
        yield made
    assert processes(run) == []


def processes(run: RunDir) -> list[psutil.Process]:
    """The client's processes."""
    return [process for process in psutil.process_iter(["cmdline"])
            if str(run.client) in (process.info["cmdline"] or [])]


def started(client: Client, engine: Engine, planned: Plan, name: str, *, prompts: int, osl: int) -> Load:
    words = bench.load(planned, url=engine.url, prompts=prompts, concurrency=2, seed=len(name), osl=osl)
    return client.start_point(words, RunDir(Path(planned.run_dir)).points / f"{name}.log")


def free(engine: Engine) -> bool:
    """Whether the engine works on nothing."""
    sample = EngineClient(engine.url, engine.key).sample()
    return not sample.running and not sample.waiting


def test_points_run_back_to_back_in_one_process_and_leave_what_the_command_would(
        client: Client, engine: Engine, planned: Plan, notes: list[str]) -> None:
    run = RunDir(Path(planned.run_dir))
    pids = set()
    for point in planned.points[:3]:
        folder = run.points / point.name
        folder.mkdir()
        load = client.start_point(bench.words(planned, point, url=engine.url, folder=folder),
                                  folder / "bench.log")
        wait_until(lambda load=load: load.ended(1) is not None, 120, "the point to end")  # type: ignore[misc]
        assert load.ended(0) == 0, (folder / "bench.log").read_text()
        pids |= {process.pid for process in processes(run)}

        result = json.loads((folder / bench.RESULT).read_text())
        assert result.keys() - {"run_id", "point"} == json.loads(CLI_RESULT.read_text()).keys() - {"run_id", "point"}
        assert (result["completed"], result["failed"]) == (point.prompts, 0)
        assert result["total_output_tokens"] == point.prompts * 64
        assert "Serving Benchmark Result" in (folder / "bench.log").read_text()
        # Exactly this point's, however short it was: also the prefix cache's, which this rule needs.
        assert load.counters is not None
        before, after = load.counters
        assert after.requests_total is not None
        assert before.requests_total is not None
        assert after.requests_total - before.requests_total == point.prompts
        assert after.prefix_cache_hits_total == before.prefix_cache_hits_total
        window = (before, after)
        measured = Measured(bench=result, returncode=0, point=point, isl=planned.isl, osl=64, min_window_s=0,
                            window=window)
        assert loadrules.increase(window, "generation_tokens_total") == result["total_output_tokens"]
        for rule in (loadrules.ended, loadrules.tokens_out, loadrules.alone):
            assert rule(measured).outcome == "verified"
        assert load.facts is not None
        assert load.facts.cpu_share is not None
    assert len(pids) == 1
    assert notes == []


def test_a_stopped_load_leaves_the_engine_free_and_the_client_fit(
        client: Client, engine: Engine, planned: Plan, notes: list[str]) -> None:
    load = started(client, engine, planned, "endless", prompts=200, osl=1900)
    wait_until(lambda: not free(engine), 120, "the load to begin")
    load.stop()
    wait_until(lambda: free(engine), 10, "the engine to be free")
    short = started(client, engine, planned, "short", prompts=4, osl=4)
    wait_until(lambda: short.ended(1) is not None, 60, "the next load to end")
    assert short.ended(0) == 0
    assert notes == []


def test_a_client_whose_caller_has_gone_leaves_the_engine_free(
        client: Client, engine: Engine, planned: Plan) -> None:
    started(client, engine, planned, "left", prompts=200, osl=1900)
    wait_until(lambda: not free(engine), 120, "the load to begin")
    (process,) = processes(RunDir(Path(planned.run_dir)))
    client.hang_up()  # its input ends, as when whoever measures is killed
    assert not process.is_running()
    wait_until(lambda: free(engine), 10, "the engine to be free")
