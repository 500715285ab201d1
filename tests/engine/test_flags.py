"""The shipped lists of the engine's flags."""

import subprocess
from pathlib import Path

import pytest

from tests.engine import list_flags
from tests.engine.environment import VLLM_VERSION

LISTS = Path(__file__).parents[2] / "isambard_serve/engine_flags"


@pytest.mark.parametrize("path", sorted(LISTS.glob("*.txt")), ids=lambda path: path.stem)
def test_each_list_is_sorted_and_has_no_dashes_in_front(path: Path) -> None:
    flags = path.read_text().splitlines()
    assert flags == sorted(set(flags))
    assert not [flag for flag in flags if flag.startswith("-") or flag != flag.strip() or "_" in flag]


def test_the_list_is_what_the_engine_takes(engine_venv: Path) -> None:
    command = [str(engine_venv / "bin/python"), list_flags.__file__]
    taken = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert (LISTS / f"{VLLM_VERSION}.txt").read_text() == taken
