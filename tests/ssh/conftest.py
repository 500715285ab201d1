"""One world for all tests of this folder, and a new laptop for each."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ssh.world import Laptop, World


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
