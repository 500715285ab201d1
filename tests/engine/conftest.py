"""The real engine for the tests of this folder."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from isambard_serve import inengine, profiler
from tests.engine import environment
from tests.engine.serving import Engine, serving

RECORDED_STEPS = 5


@pytest.fixture(scope="session")
def engine_venv() -> Path:
    """Return the folder of a virtual environment with the CPU build of vLLM, installed if it has to be."""
    return environment.ensure()


@pytest.fixture(scope="session")
def engine(engine_venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Serve the tiny model, with what the package puts into the engine: one engine for all tests."""
    folder = tmp_path_factory.mktemp("engine")
    inengine.install(folder / "inengine")
    given = inengine.variables(str(folder / "inengine"), str(folder / "facts"), ["SHOWN", "SHOWN_TOKEN"], None)
    shown = {"SHOWN": "yes", "SHOWN_TOKEN": "hidden", "VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype":"float8e4m3"}'}
    recorder = profiler.words(profiler.Profile(concurrency=4, steps=RECORDED_STEPS), str(folder / "profile"))
    with serving(engine_venv, folder, secrets.token_hex(), "--middleware", inengine.GUARD, *recorder,
                 **given, **shown) as engine:
        yield engine
