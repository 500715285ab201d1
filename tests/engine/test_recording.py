"""A profile of the real engine: its profiler is told, records steady decode, and leaves traces that can be read."""

from pathlib import Path

from isambard_serve import recording
from isambard_serve.claim import Claim
from isambard_serve.client import Client
from isambard_serve.engine import EngineClient
from isambard_serve.points import Loop
from isambard_serve.run import RunDir
from isambard_serve.trace.read import read
from tests.engine.conftest import RECORDED_STEPS
from tests.engine.serving import Engine, environment, tiny_plan


def test_the_engines_profiler_records_steps_of_steady_decode(
        engine_venv: Path, engine: Engine, tmp_path: Path) -> None:
    planned = tiny_plan(engine_venv, tmp_path, "bench.args.served-model-name=tiny", "bench.profile_at=4",
                        f"bench.profile_steps={RECORDED_STEPS}")
    run = RunDir(Path(planned.run_dir))
    run.create()
    run.profile = engine.folder / "profile"  # where the tests' engine was told to write
    notes: list[str] = []
    with Client(command=planned.client_command, script=run.client, fallback=planned.bench_command,
                env=environment(run.path) | {"OPENAI_API_KEY": engine.key}, metrics=f"{engine.url}/metrics",
                log=run.points / "client.log", note=notes.append) as client:
        loop = Loop(run, planned, Claim.take(run, "inside", None, over=0), writer="inside", client=client, node="here",
                    url=engine.url)
        assert planned.profile
        said = recording.take(loop, EngineClient(engine.url, engine.key), planned.profile)
    assert said == f"{RECORDED_STEPS} steps at concurrency 4 recorded: 1 traces"
    assert notes == []
    (path,) = run.profile.glob("*.pt.trace.json.gz")
    trace = read(path)
    assert (trace.rank, trace.gpus) == (0, {})
    # vLLM's own marks of its steps: by them a GPU's kernels are divided.
    assert len(trace.marked()) == RECORDED_STEPS
    assert run.read_rows() == []
