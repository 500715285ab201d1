"""The real engine for the tests of this folder."""

from pathlib import Path

import pytest

from tests.engine import environment


@pytest.fixture(scope="session")
def engine_venv() -> Path:
    """Return the folder of a virtual environment with the CPU build of vLLM, installed if it has to be."""
    return environment.ensure()
