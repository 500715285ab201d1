"""`collect` from a host over SSH beside `scp -r` and `rsync -a`, each as a whole command. As root, on Debian.

Usage: python -m benchmarks.collect [--scale SCALE] [--repeats N] [--only WORD]

The host is a real sshd: over loopback, and a long way off (50 ms each way by the tests' relay, 200 Mbit/s by htb).
`collect` asks the host's own isambard-serve for the run, fetches its files, checks each by the SHA-256 that it has
there, and tables the run's rows. The three take turns, each with an empty folder; the times are medians of whole
commands, and a ratio says how many times as fast `collect` is. Where another tool would take all day it is stopped
after 20 times as long, and a ratio with a plus is a lower bound.

Over loopback, where both sides share this machine's processors, a line says what the parts of any such transfer cost
them: `ssh HOST cat FILES > copy` (whatever works meanwhile, so let nothing else), and hashing on both sides; or zlib
and hashing, as if all else were free. Shared evenly by all processors, after one `ssh true`, that is about the least
that such a transfer can take.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import hashlib
import os
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from isambard_serve import remote
from isambard_serve.run import RunDir
from tests.ssh.world import JUMP, Laptop, World
from tests.support import packages, users
from tests.support.installation import install
from tests.unit.helpers import PRETEND, SAMPLES, pretend_site, small_plan, some_sample, written_run

MIB = 1 << 20
PORT = 2222
CUT_OFF = 20
QUICK = "aes128-gcm@openssh.com"
"""The cipher that costs least where a processor has instructions for AES; `collect` offers it first."""

TOOLS = ("collect", "scp -r", "rsync -a")


def incompressible(run: RunDir, scale: float) -> None:
    """1 GiB of what does not shrink, as a profile's packed traces do not, in eight files."""
    (run.path / "profile").mkdir()
    for each in range(8):
        with open(run.path / "profile" / f"rank{each}.bin", "wb") as file:
            file.writelines(os.urandom(MIB) for _ in range(int(128 * scale)))


def logs(run: RunDir, scale: float) -> None:
    """1 GiB of logs and JSON: vLLM's own lines and this package's samples, with numbers drawn anew."""
    dice = random.Random(1)  # noqa: S311 - no secret
    lines = (SAMPLES / "vllm-0.26.log").read_text().splitlines()
    sample = msgspec.json.encode(some_sample(kv_cache_usage=0.123456, time=1764448978.123456)).decode()
    bench = (SAMPLES / "bench.json").read_text().replace("\n", "")
    for path, texts, size in (
        (run.engine_log, lines, 512), (run.samples, [sample], 256), (run.path / "points.json", [bench], 256),
    ):
        drawn = _drawn(texts, 8 * MIB, dice)
        with open(path, "wb") as file:
            file.writelines(drawn for _ in range(int(size * scale) // 8))


_CHANGING = re.compile(r"\d\d:\d\d:\d\d|(?<=:)\d{5}\b|\d+\.\d+")


def _drawn(texts: list[str], size: int, dice: random.Random) -> bytes:
    """So many bytes of lines like ``texts``, with other times, ports and measured values (numbers with a point)."""
    made = bytearray()
    while len(made) < size:
        changed = _CHANGING.sub(lambda match: re.sub(r"\d", lambda _: str(dice.randrange(10)), match[0]),
                                dice.choice(texts))
        made += changed.encode() + b"\n"
    return bytes(made)


def small(run: RunDir, scale: float) -> None:
    """5,000 files of 4 KiB that do not shrink."""
    for each in range(int(5000 * scale)):
        path = run.points / f"c{each // 100:04d}.r1" / f"{each:05d}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.urandom(4096))


@dataclass(frozen=True)
class Case:
    """What is fetched, and how many times as fast as scp it has to come over loopback and the slow link."""

    name: str
    fill: Callable[[RunDir, float], None]
    wanted: tuple[float, float]
    pile_up: bool = False
    """Whether what was fetched stays until all is measured: ext4 is slow to use the inodes again of thousands of files
    that were just deleted. Much data goes after each turn: memory that nobody has used yet costs a virtual machine
    more than the transfer."""


CASES = (
    Case("incompressible", incompressible, (1.0, 0.95)),
    Case("logs", logs, (1.5, 3.0)),
    Case("small", small, (3.0, 10.0), pile_up=True),
)


class Bench:
    """A laptop, a host with isambard-serve and runs, and the three ways from one to the other."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.laptop = Laptop.unpacked(world, folder / "laptop")
        self._out = folder / "out"
        self._commands = install(folder / "installed")
        self._runs = world.home / "runs"
        # What `deploy` would make.
        version = subprocess.run([self._commands / "python", "-c", "from isambard_serve import remote; "
                                  "print(remote.version())"], check=True, capture_output=True, text=True)
        deployed = world.home / remote.VERSIONS / version.stdout.strip()
        deployed.mkdir(parents=True)
        (deployed / "bin").symlink_to(self._commands)
        settings = world.home / ".config" / "isambard-serve"
        (settings / "sites").mkdir(parents=True)
        site = PRETEND.read_text().replace("scheduler: slurm\npartition: batch", "scheduler: local")
        (settings / "sites" / "there.yaml").write_text(site.replace("/shared/runs", str(self._runs)))
        (settings / "config.yaml").write_text("site: there\n")

    @contextlib.contextmanager
    def run_of(self, case: Case, scale: float) -> Iterator[RunDir]:
        """A run of ``case`` on the host, for as long as the block lasts."""
        run = written_run(small_plan(self._runs, site=pretend_site(scheduler="local", partition=None)))
        run.record("serve", "done")
        case.fill(run, scale)
        subprocess.run(["chown", "-R", f"{users.USER}:", self.world.home], check=True)
        try:
            yield run
        finally:
            shutil.rmtree(run.path)

    @contextlib.contextmanager
    def link(self, *, slow: bool) -> Iterator[None]:
        """The host, over loopback or a long way off."""
        with contextlib.ExitStack() as down:
            port = down.enter_context(self.world.slow(0.05, 200, to=PORT)) if slow else PORT
            address = JUMP if slow else "127.0.0.1"
            self.laptop.configure(f"Host bench\n Hostname {address}\n Port {port}\n User {users.USER}\n"
                                  f" IdentityFile {self.laptop.key}\n CertificateFile {self.laptop.certificate}\n"
                                  f" UserKnownHostsFile {self.laptop.known_hosts}\n GlobalKnownHostsFile none\n")
            key = self.world.host_key("far" if slow else "near")
            self.laptop.known_hosts.write_text(f"[{address}]:{port} {key}\n")
            yield

    def command(self, tool: str, run: RunDir, out: Path) -> list[str | Path]:
        """What a tool is typed as that fetches ``run`` into ``out``."""
        there = f"bench:{run.path}"
        commands: dict[str, list[str | Path]] = {
            "collect": [self._commands / "isambard-serve", "collect", run.run_id, "--host", "bench", "-o", out],
            "scp -r": ["scp", "-q", "-F", self.laptop.folder / "ssh_config", "-r", there, out],
            "rsync -a": ["rsync", "-a", there, out],
        }
        return commands[tool]

    def timed(self, command: list[str | Path], limit_s: float = 3600.0) -> float:
        """How long ``command`` takes, in seconds; ``limit_s`` if it is stopped after that."""
        os.sync()  # what was written before is no burden of this one
        began = time.perf_counter()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.laptop.run(command, timeout=limit_s)
        return min(time.perf_counter() - began, limit_s)

    def new_folder(self) -> Path:
        """A new folder."""
        self._out.mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self._out))

    def clear(self) -> None:
        """Deletes what was fetched."""
        shutil.rmtree(self._out, ignore_errors=True)


def differing(here: Path, there: Path) -> list[str]:
    """The files of ``there`` that are not, byte for byte, ``here``."""
    names = [str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()]
    _, other, missing = filecmp.cmpfiles(there, here, names, shallow=False)
    return other + missing


def measure(bench: Bench, run: RunDir, wanted: float, repeats: int, *, pile_up: bool) -> None:
    """Prints how long each tool takes."""
    took: dict[str, list[float]] = {tool: [] for tool in TOOLS}
    for _ in range(repeats):
        for tool in TOOLS:
            out = bench.new_folder()
            limit_s = CUT_OFF * max(took["collect"]) if took["collect"] else 3600.0
            took[tool].append(bench.timed(bench.command(tool, run, out), limit_s))
            if tool == "collect" and (wrong := differing(out / run.run_id, run.path)):
                raise SystemExit(f"not fetched, or not as they are there: {wrong}")
            if not pile_up:
                bench.clear()
    ours = statistics.median(took["collect"])
    for tool, times in took.items():
        theirs = statistics.median(times)
        bound = "+" if theirs >= CUT_OFF * ours else " "
        ratio = "" if tool == "collect" else f"{theirs / ours:>9.2f}{bound}"
        target = f"   (wanted: {wanted})" if tool == "scp -r" else ""
        print(f"    {tool:<10}{theirs:>9.2f} s{ratio}{target}", flush=True)


def print_least(bench: Bench, run: RunDir) -> None:
    """Prints what a transfer of the run's files that is checked by SHA-256 takes here at the least."""
    files = [path for path in run.path.rglob("*") if path.is_file()]
    began = time.perf_counter()
    bench.laptop.run(["ssh", "bench", "true"])
    connected = time.perf_counter() - began
    moved = _busy_s()
    bench.laptop.run(["sh", "-c", 'cipher=$1; shift; ssh -c "$cipher" bench cat -- "$@" > "$0"',
                      bench.new_folder() / "copy", QUICK, *files])
    moved = _busy_s() - moved
    bench.clear()
    by_zlib = by_hash = 0.0
    for path in files:
        with open(path, "rb") as file:
            while block := file.read(MIB):
                began = time.process_time()
                hashlib.sha256(block).digest()
                hashed = time.process_time()
                zlib.decompress(zlib.compress(block, 1))
                by_zlib += time.process_time() - hashed
                by_hash += hashed - began
    cores = os.cpu_count() or 1
    plain = connected + (moved + 2 * by_hash) / cores
    squeezed = connected + (by_zlib + 2 * by_hash) / cores
    print(f"    the least here: {plain:.2f} s as it is, {squeezed:.2f} s by zlib, were all else then free ({cores} "
          f"processors, {connected:.2f} s to connect; processor seconds: ssh from file to file {moved:.2f}, SHA-256 "
          f"twice {2 * by_hash:.2f}, zlib both ways {by_zlib:.2f})", flush=True)


def _busy_s() -> float:
    """What all processors have worked since they were started, for whomever, in seconds."""
    times = psutil.cpu_times()
    return sum(times[:3]) + times.irq + times.softirq


def measure_again(bench: Bench, run: RunDir, repeats: int) -> None:
    """Prints how long `collect` and `rsync -a` take to find that nothing has changed."""
    for tool in ("collect", "rsync -a"):
        command = bench.command(tool, run, bench.new_folder())
        bench.timed(command)
        again = statistics.median(bench.timed(command) for _ in range(repeats))
        print(f"    {tool} again, unchanged: {again:.2f} s", flush=True)


def main() -> None:
    """Prints a table for each case and link."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes; 1 is 1 GiB and 5,000 files")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="cases and links whose name has this word")
    arguments = parser.parse_args()
    packages.need("rsync")
    folder = Path(tempfile.mkdtemp(prefix="collect-bench-"))
    folder.chmod(0o755)
    try:
        with World.booted(folder) as world:
            variables = {"HOME": str(world.home)}
            world.start("near", world.laptop, PORT, variables)
            world.start("far", world.jump, PORT, variables)
            bench = Bench(world, folder)
            for case in CASES:
                with bench.run_of(case, arguments.scale) as run:
                    for slow in (False, True):
                        title = f"{case.name}, {'50 ms, 200 Mbit/s' if slow else 'loopback'}"
                        if arguments.only not in title:
                            continue
                        print(f"{title} (scale {arguments.scale:g}, {arguments.repeats} repeats)", flush=True)
                        with bench.link(slow=slow):
                            measure(bench, run, case.wanted[slow], arguments.repeats, pile_up=case.pile_up)
                            if case.name == "small":
                                measure_again(bench, run, arguments.repeats)
                            elif not slow:
                                print_least(bench, run)
                        bench.clear()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
