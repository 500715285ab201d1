"""The package as its users have it: a wheel in a virtual environment that an ordinary user can run."""

import fcntl
import hashlib
import subprocess
import sys
from pathlib import Path

from tests.engine.environment import SYSTEM_PYTHON, cache
from tests.support.packages import need

ROOT = Path(__file__).parents[2]
PINS = ROOT / "requirements" / "dev.txt"


def install(folder: Path) -> Path:
    """Install this checkout into a new virtual environment in `folder` and return its `bin`.

    What it depends on lies in an environment that is built once for all runs; this one holds the wheel alone.
    """
    installed = dependencies()
    _run(installed / "bin/python", "-m", "venv", "--without-pip", folder)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (shared,) = installed.glob("lib/python3*/site-packages")
    # With the .pth files in it: coverage has one.
    (packages / "dependencies.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
    pip = (installed / "bin/python", "-m", "pip", "--python", folder / "bin/python")
    _run(*pip, "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir", ROOT)
    _run("chmod", "-R", "a+rX", folder)
    return folder / "bin"


def dependencies() -> Path:
    """The environment with all pinned requirements, made by the first who needs it."""
    python = SYSTEM_PYTHON if SYSTEM_PYTHON.exists() else Path(sys.executable)
    version = subprocess.run([python, "-VV"], check=True, capture_output=True).stdout
    folder = cache() / f"dependencies-{hashlib.sha256(PINS.read_bytes() + version).hexdigest()[:12]}"
    marker = folder / ".complete"
    folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not marker.exists():
            if python == SYSTEM_PYTHON:
                need("python3-venv")
            _run(python, "-I", "-m", "venv", "--clear", folder)
            pip = (folder / "bin/python", "-I", "-m", "pip", "install", "--quiet", "--no-cache-dir")
            _run(*pip, "--require-hashes", "--no-deps", "-r", PINS)
            _run("chmod", "-R", "a+rX", folder)
            marker.touch()
    return folder


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=2, umask=0o022)
