"""The coverage of processes that tests start as another user, in a clean environment."""

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]

RC = """\
[run]
source_pkgs = isambard_serve
branch = true
parallel = true
sigterm = true
data_file = {data}/.coverage
"""


def measured() -> bool:
    """Whether this run of the tests is measured (`make test` does so)."""
    return "COVERAGE_PROCESS_CONFIG" in os.environ


def environment(folder: Path) -> dict[str, str]:
    """The variables that make a Python process write its coverage below ``folder``."""
    return {"COVERAGE_PROCESS_START": str(folder / "coverage.rc")} if measured() else {}


def prepare(folder: Path) -> None:
    """Make a place below ``folder`` where every user can leave data."""
    data = folder / "coverage"
    data.mkdir(exist_ok=True)
    data.chmod(0o1777)
    (folder / "coverage.rc").write_text(RC.format(data=data))


def gather(folder: Path) -> None:
    """Bring the data to where `coverage combine` looks for it."""
    for path in (folder / "coverage").glob(".coverage.*"):
        shutil.copy(path, ROOT / path.name)
