"""paramiko beside OpenSSH's client: the figures behind the rule in isambard_serve/host.py. As root, on Debian.

Both lead through the jump host to the login node of the tests' world, at hand and a long way off (50 ms each way,
200 Mbit/s). Times are medians; the two take turns.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from unittest import mock

from isambard_serve import host
from isambard_serve.host import Host
from isambard_serve.ssh.keys import Keyring
from isambard_serve.ssh.opensshhost import OpensshHost
from isambard_serve.ssh.paramikohost import ParamikoHost
from tests.ssh.world import ALIAS, Laptop, World, clifton_03


def by_paramiko() -> Host:
    """The login node, with paramiko."""
    with closing(Keyring()) as keys:
        return ParamikoHost(host.resolve(ALIAS), keys)


WAYS: dict[str, Callable[[], Host]] = {"paramiko": by_paramiko, "OpenSSH": lambda: OpensshHost(ALIAS)}


TRIALS: list[tuple[str, tuple[float, float] | None, int, int]] = [
    ("at hand", None, 256, 5), ("50 ms, 200 Mbit/s", (0.05, 200), 64, 3)]
"""Title, delay in seconds and Mbit/s, megabytes, repeats."""


def command_s(there: Host) -> float:
    """How long a command takes that does nothing, in seconds."""
    began = time.perf_counter()
    there.run(["true"])
    return time.perf_counter() - began


def mb_s(there: Host, megabytes: int) -> float:
    """At how many MB/s a program's output comes, of ``megabytes`` that do not compress."""
    began = time.perf_counter()
    with there.start(["head", "-c", f"{megabytes}M", "/dev/urandom"]) as running:
        while running.stdout.read(1 << 20):
            pass
    return megabytes / (time.perf_counter() - began)


def measure(megabytes: int, repeats: int) -> dict[str, dict[str, float]]:
    """Seconds to connect and run a first command, to run a further one, and MB/s of a program's output."""
    found: dict[str, dict[str, list[float]]] = {name: {"connect": [], "command": [], "MB/s": []} for name in WAYS}
    for _ in range(repeats):
        for name, connect in WAYS.items():
            began = time.perf_counter()
            with closing(connect()) as there:
                there.run(["true"])
                found[name]["connect"].append(time.perf_counter() - began)
                found[name]["command"].append(command_s(there))
                found[name]["MB/s"].append(mb_s(there, megabytes))
    return {name: {what: statistics.median(values) for what, values in each.items()} for name, each in found.items()}


def main() -> None:
    """Prints a table for each distance."""
    folder = Path(tempfile.mkdtemp(prefix="ssh-bench-"))
    folder.chmod(0o755)
    with World.booted(folder) as world:
        laptop = Laptop.unpacked(world, folder / "laptop")
        with world.laptop.entered(), mock.patch.dict(os.environ, laptop.environment, clear=True):
            for title, link, megabytes, repeats in TRIALS:
                with world.slow(*link) if link else nullcontext(22) as port:
                    laptop.configure(clifton_03(laptop.key, laptop.certificate, laptop.known_hosts, port))
                    laptop.known_hosts.write_text(world.known_hosts(port))
                    figures = measure(megabytes, repeats)
                ours, theirs = figures["paramiko"], figures["OpenSSH"]
                print(f"{title:<20}{'paramiko':>10}{'OpenSSH':>10}{'ratio':>8}")
                for what in ours:
                    print(f"  {what:<18}{ours[what]:>10.3f}{theirs[what]:>10.3f}{theirs[what] / ours[what]:>8.2f}")


if __name__ == "__main__":
    main()
