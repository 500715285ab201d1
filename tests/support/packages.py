"""Debian packages that a test needs: installed on the spot by root, named to everybody else.

A test that cannot run is a failure, not a skip: without root a missing package ends the run with status 2.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

LOCK = Path("/run/isambard-tests.lock")
POLICY = Path("/usr/sbin/policy-rc.d")


def need(*debian_packages: str) -> None:
    """Have `debian_packages` installed, without starting any daemon that they bring.

    Raises `SystemExit(2)` after printing what is missing if it cannot be installed, and
    `subprocess.CalledProcessError` if apt-get fails. Safe to call from several processes at once.
    """
    if not _missing(debian_packages):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        _give_up(f"missing Debian packages: {' '.join(_missing(debian_packages))} (root could install them)")
    with machine_lock(), _no_daemons():
        if missing := _missing(debian_packages):
            sys.stderr.write(f"installing {' '.join(missing)}\n")
            _apt_get("update", check=False)  # somebody else's update may hold the lock; its lists do as well
            _apt_get("install", "-y", "--no-install-recommends", *missing)


def need_root(why: str) -> None:
    """Raise `SystemExit(2)`, after saying `why`, unless this process is root."""
    if os.geteuid() != 0:
        _give_up(f"root is needed: {why}")


@contextmanager
def machine_lock() -> Iterator[None]:
    """Hold the one lock under which tests change the machine itself (packages, users). For root only."""
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _missing(debian_packages: tuple[str, ...]) -> list[str]:
    if not shutil.which("dpkg-query"):
        return list(debian_packages)
    query = ["dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\n", *debian_packages]
    answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    installed = {line.split()[0] for line in answer.splitlines() if line.endswith(" installed")}
    return [package for package in debian_packages if package not in installed]


def _apt_get(*arguments: str, check: bool = True) -> None:
    command = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=600", *arguments]
    quiet = subprocess.DEVNULL
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(command, env=environment, stdin=quiet, stdout=quiet, check=check)


@contextmanager
def _no_daemons() -> Iterator[None]:
    """Forbid maintainer scripts to start services (Debian policy 9.3.3), as most container images do."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


def _give_up(reason: str) -> NoReturn:
    sys.stderr.write(f"{reason}\n")
    raise SystemExit(2)
