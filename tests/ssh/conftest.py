"""One world for all tests of this folder, and a new laptop for each."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from isambard_serve import deploy, remote, wheel
from tests.engine.environment import cache
from tests.ssh.world import Laptop, World
from tests.support import coverage, installation
from tests.support.packages import need


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """The machines. What lies in the login node's home is left there from test to test."""
    folder = Path(tempfile.mkdtemp(prefix="ssh-world-"))
    folder.chmod(0o755)
    try:
        with World.booted(folder) as booted:
            yield booted
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def laptop(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Laptop]:
    """A laptop, and this test stands in its place: in its namespace, with its environment."""
    unpacked = Laptop.unpacked(world, tmp_path / "laptop")
    for name, value in unpacked.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("SSH_AUTH_SOCK", "DISPLAY", "ISAMBARD_SERVE_SITE", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    with world.laptop.entered():
        yield unpacked


@pytest.fixture(scope="session")
def installed(world: World) -> Iterator[World]:
    """A login node with this version on it. Its login shell is not a quiet one."""
    folder = world.folder / "installed"
    installation.install(folder)
    versions = world.home / remote.VERSIONS
    versions.mkdir(parents=True)
    (versions / remote.version()).symlink_to(folder)
    subprocess.run(["chown", "-R", "--no-dereference", f"--reference={world.home}", world.home], check=True)
    coverage.prepare(world.folder) if coverage.measured() else None
    settings = "".join(f"export {name}={value}\n" for name, value in coverage.environment(world.folder).items())
    (world.home / ".bash_profile").write_text(f"echo Welcome; echo '{{}}'; echo be careful >&2\n{settings}")
    yield world
    coverage.gather(world.folder) if coverage.measured() else None
    for name in (".bash_profile", ".local"):
        shutil.move(world.home / name, world.folder / f"{name}-of-remote")


@pytest.fixture(scope="session")
def wheels() -> Path:
    """What pip fetches for the login node, kept for other runs. A test's laptop has no way to the index."""
    need("python3-venv")
    pinned = wheel.files()[wheel.REQUIREMENTS]
    folder = cache() / f"wheels-{wheel.identity({'': pinned})}"
    if not folder.exists():
        facts = deploy.Facts(home="/", memory=0, tag="3.11", full="3.11.2", machine=os.uname().machine, glibc="2.36")
        new = Path(f"{folder}.{os.getpid()}")
        new.mkdir(parents=True)
        deploy.fetch_wheels(facts, pinned.decode(), new)
        new.rename(folder)
    return folder


@pytest.fixture
def offline(wheels: Path) -> dict[str, str]:
    """The laptop's own pip configuration: it finds what the wheelhouse is to be made of."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
