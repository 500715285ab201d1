"""On a login node: makes the environment of one version of this package. Nothing need be installed there.

``deploy`` sends this file, with the wheel and the pinned requirements beside it, and has a Python run it::

    python bootstrap.py FOLDER VERSION [--offline]

Each environment gets a folder of its own, where it stays: environments cannot be moved, and jobs go on to use theirs.
A link with the version's name appears, at once, when it is whole; so two who deploy at the same time harm nobody.
The standard library only.
"""

import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

CANNOT_FETCH = 10
"""The exit code for requirements that pip could not fetch or install."""

ABANDONED_S = 86_400
"""An environment that is not whole after a day never will be."""


def install(folder: Path, version: str, sent: Path, offline: bool) -> int:
    """Makes ``folder/versions/VERSION`` of what lies in ``sent``, and the exit code."""
    versions = folder / "versions"
    versions.mkdir(mode=0o700, parents=True, exist_ok=True)
    _clear_abandoned(versions)
    environment = versions / f"{version}.{secrets.token_hex(4)}"
    try:
        code = _fill(environment, sent, offline)
    except BaseException:
        shutil.rmtree(environment, ignore_errors=True)
        raise
    if code:
        shutil.rmtree(environment, ignore_errors=True)
        return code
    (environment / ".complete").touch()
    point(versions / version, environment.name)
    point(folder / "current", f"versions/{version}")
    return 0


def _fill(environment: Path, sent: Path, offline: bool) -> int:
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, stdout=2)
    pip: list[str | Path] = [environment / "bin/python", "-m", "pip", "--disable-pip-version-check", "install",
                             "--quiet", "--no-cache-dir", "--no-deps", "--no-input", "--no-compile"]
    where: list[str | Path] = ["--no-index", f"--find-links={sent}"] if offline else ["--retries=1", "--timeout=15"]
    pinned = [*pip, "--require-hashes", "--only-binary=:all:", *where, "-r", sent / "requirements.txt"]
    code = subprocess.run(pinned, check=False, stdout=2).returncode
    if code:
        return CANNOT_FETCH if code > 0 else 128 - code  # as a shell tells a signal: KILL where memory is short
    (wheel,) = sent.glob("isambard_serve-*.whl")
    subprocess.run([*pip, "--no-index", wheel], check=True, stdout=2)
    subprocess.run([environment / "bin/isambard-serve", "--version"], check=True, stdout=2)
    return 0


def point(link: Path, target: str) -> None:
    """Has ``link`` point to ``target``: at every moment to the old one or to the new one."""
    new = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    new.symlink_to(target)
    try:
        os.replace(new, link)
    except OSError:
        new.unlink()
        raise


def _clear_abandoned(versions: Path) -> None:
    for path in versions.iterdir():
        old = not path.is_symlink() and time.time() - path.stat().st_mtime > ABANDONED_S
        if old and not (path / ".complete").exists():
            shutil.rmtree(path, ignore_errors=True)


def main() -> int:
    """``python bootstrap.py FOLDER VERSION [--offline]``."""
    os.umask(0o077)
    try:
        return install(Path(sys.argv[1]), sys.argv[2], Path(__file__).resolve().parent, "--offline" in sys.argv)
    except OSError as error:
        sys.stderr.write(f"{error.filename or sys.argv[1]}: {error.strerror or error}\n")
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{' '.join(map(str, error.cmd))} ended with {error.returncode}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
