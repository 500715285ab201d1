"""Putting this version on a login node, which reaches no package index."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from isambard_serve import bootstrap, deploy, wheel
from isambard_serve.host import connected
from tests.ssh.commands import SERVE
from tests.ssh.world import ALIAS, Laptop, World


@pytest.fixture
def empty(world: World) -> Iterator[World]:
    """A login node with nothing of ours on it."""
    yield world
    subprocess.run(["rm", "-rf", world.home / ".local"], check=True)


def test_a_version_is_put_there_once_with_wheels_and_does_commands_there(laptop: Laptop, empty: World,
                                                                        offline: dict[str, str]) -> None:
    missing = laptop.run([*SERVE, "status", "--host", ALIAS, "--site", "sandbox"], check=False)
    assert missing.returncode == 3
    assert f"isambard-serve deploy --host {ALIAS}" in missing.stderr

    first = laptop.run([*SERVE, "status", "--host", ALIAS, "--deploy", "--site", "sandbox", "--json"], env=offline,
                       timeout=300)
    assert json.loads(first.stdout)["runs"] == []
    assert "reaches no package index" in first.stderr
    home = empty.home / ".local/share/isambard-serve"
    (version,) = [path for path in (home / "versions").iterdir() if path.is_symlink()]
    assert version.name == wheel.identity(wheel.files())
    assert (home / "current").resolve() == version.resolve()
    assert (version / ".complete").exists()
    assert not list((home / "incoming").iterdir())

    again = json.loads(laptop.run([*SERVE, "deploy", "--host", ALIAS, "--json"]).stdout)
    assert again == {"schema": "isambard-serve/deploy/1", "host": ALIAS, "version": version.name, "new": False,
                     "command": f"{home}/current/bin/isambard-serve"}
    assert laptop.run([*SERVE, "status", "--host", ALIAS, "--site", "sandbox"]).stdout == ""
    # Nothing of this machine's way to its index has got there.
    found = subprocess.run(["grep", "-rlE", "find-links|index-url|PIP_|/simple", home, "--include=*.cfg",
                            "--include=*.conf", "--include=*.txt", "--include=*.toml"], capture_output=True, text=True,
                           check=False)
    assert [path for path in found.stdout.splitlines() if "/site-packages/pip/" not in path] == []


def test_a_login_node_is_looked_at(laptop: Laptop, world: World) -> None:
    profile = world.home / ".bash_profile"
    profile.write_text("cat >/dev/null; echo hello\n")
    with connected(ALIAS) as there:
        facts = deploy.look(there)
    profile.unlink()
    assert facts.home == str(world.home)
    assert facts.python
    assert facts.tag >= "3.11"
    assert facts.machine == os.uname().machine
    assert facts.memory > 1 << 28


def test_a_login_node_without_a_fitting_python_is_told_how_to_get_one(laptop: Laptop, world: World,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    (world.home / ".bash_profile").write_text(f"mkdir -p {world.home}/none; PATH={world.home}/none:/usr/bin:/bin\n"
                                              "alias python3=false; enable -n command\n"
                                              "command() { case \"$2\" in python*) return 1;; esac; }; "
                                              "export -f command\n")
    try:
        done = laptop.run([*SERVE, "deploy", "--host", ALIAS], check=False)
    finally:
        (world.home / ".bash_profile").unlink()
    assert done.returncode == 3
    assert "no Python 3.11 or newer" in done.stderr


def test_an_installation_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    sent = tmp_path / "sent"
    sent.mkdir()
    (sent / "requirements.txt").write_text("no-such-package==1 --hash=sha256:" + "0" * 64 + "\n")
    assert bootstrap.install(tmp_path / "there", "1", sent, offline=True) == bootstrap.CANNOT_FETCH
    assert list((tmp_path / "there" / "versions").iterdir()) == []
