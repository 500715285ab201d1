"""Collecting over real SSH: whole files, and after a cut nothing again but the file that was under way."""

from __future__ import annotations

import hashlib
import os
import pwd
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from isambard_serve import host, transfer
from isambard_serve.collect import Copied
from isambard_serve.errors import ConnectionLostError
from isambard_serve.farstream import FarSide, Want
from isambard_serve.host import Host
from isambard_serve.ssh.opensshhost import OpensshHost
from isambard_serve.transfer import Fetch
from tests.ssh.test_host import by_paramiko
from tests.ssh.world import ALIAS, Laptop, World
from tests.support import users

TRIALS = int(os.environ.get("ISAMBARD_SERVE_TRIALS", "3"))
STREAMS = 2
WINDOW = 2 << 20
"""What an SSH channel may have under way: CHAN_SES_WINDOW_DEFAULT of OpenSSH's channels.h."""


@pytest.fixture(scope="module")
def run(world: World) -> Path:
    """A run on the login node: logs, much that does not shrink, many small files, and a key."""
    dice = random.Random(7)  # noqa: S311 - no secret
    folder = world.home / "runs" / "20261129-181258-small-3f2a"
    for name, content in {
        "api.key": b"secret", "plan.json": b"{}",
        "engine/engine.log": b"".join(b"line %d %d\n" % (each, dice.randrange(10**9)) for each in range(300_000)),
        **{f"profile/rank{rank}.bin": dice.randbytes(9_000_000) for rank in range(4)},
        **{f"points/c{each:04d}.r1/row.json": b"[%d]" % each for each in range(400)},
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    user = pwd.getpwnam(users.USER)
    for place, _, names in os.walk(folder.parent):
        for path in (Path(place), *(Path(place) / name for name in names)):
            os.chown(path, user.pw_uid, user.pw_gid)
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*") if path.is_file() and path.name != "api.key"}


def run_over(there: Host, fetching: Fetch) -> Copied:
    with closing(FarSide(there)) as far:
        return fetching.run(there, far)


def came_by(laptop: Laptop) -> int:
    """How many bytes have reached the laptop."""
    with laptop.world.laptop.entered():
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.strip().startswith("to-jump:"))


class Cutter:
    """Cuts all connections each time that so many bytes of files have come."""

    def __init__(self, world: World, at: Sequence[int]) -> None:
        self._world = world
        self._at = sorted(at)
        self._came = 0

    def begin(self, total: int) -> None:
        """Nothing is cut before a byte has come."""

    def advance(self, count: int) -> None:
        """Cut if it is time."""
        self._came += count
        while self._at and self._came > self._at[0]:
            self._at.pop(0)
            self._world.cut_sessions()


@pytest.mark.parametrize("make", [by_paramiko, OpensshHost], ids=["paramiko", "openssh"])
def test_a_run_comes_whole_and_only_once(run: Path, laptop: Laptop, make: Callable[[str], Host]) -> None:
    here = laptop.folder / "results"
    with closing(make(ALIAS)) as there:
        first = run_over(there, Fetch(str(run), here))
        again = run_over(there, Fetch(str(run), here))
    assert digests(here) == digests(run)
    assert (first.files, again) == (406, Copied(files=0, bytes=0, unchanged=406))


@pytest.mark.parametrize("trial", range(TRIALS))
def test_connections_cut_at_random_cost_what_was_under_way_and_no_more(
        run: Path, laptop: Laptop, monkeypatch: pytest.MonkeyPatch, trial: int) -> None:
    dice = random.Random(trial)  # noqa: S311 - no secret
    monkeypatch.setattr(transfer, "TRIAL_S", 0.0)  # further streams at once
    monkeypatch.setattr(transfer, "MAX_STREAMS", STREAMS)
    asked: list[Want] = []
    ask = FarSide.ask

    def note(far: FarSide, root: str, wants: Sequence[Want]) -> None:
        asked.extend(wants)
        ask(far, root, wants)

    monkeypatch.setattr(FarSide, "ask", note)
    here = laptop.folder / "results"
    size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file() and path.name != "api.key")
    # What has come is not lost with the connection: a cut at the very end may be none.
    cuts = [dice.randrange(size // 2) for _ in range(dice.randrange(1, 4))]
    before = came_by(laptop)
    fetching = Fetch(str(run), here, progress=Cutter(laptop.world, cuts))
    losses = 0

    def work(there: Host) -> Copied:
        nonlocal losses
        whole = {name for name in (digests(here) if here.exists() else {}) if not name.endswith(".part.tmp")}
        asked.clear()
        try:
            return run_over(there, fetching)
        except ConnectionLostError:
            losses += 1
            raise
        finally:
            assert not whole & {want.listed.path for want in asked}

    copied = host.persistently(ALIAS, work, bulk=True, pauses_s=[0.0] * 5)
    assert digests(here) == digests(run)
    assert copied == Copied(files=406, bytes=size, unchanged=0)
    assert losses
    # Beside the files: listings, logins, packets' headers, and what the cuts caught under way in each stream.
    assert came_by(laptop) - before < size * 1.05 + losses * (STREAMS * WINDOW + 500_000)
