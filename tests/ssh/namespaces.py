"""Network namespaces: machines of their own as far as the network can tell, on this one."""

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.waiting import wait_until

CLONE_NEWNET = 0x40000000  # linux/sched.h
IP, TC = "/usr/sbin/ip", "/usr/sbin/tc"  # not on the PATH of an ordinary user
NETNS = Path("/var/run/netns")


@dataclass(frozen=True)
class Namespace:
    """One namespace. Its names and links are its own, so that several worlds can stand side by side."""

    name: str

    @classmethod
    @contextmanager
    def created(cls, role: str, hosts: Mapping[str, str] | None = None) -> Iterator["Namespace"]:
        """Makes a namespace without any way out; ``hosts`` maps names to addresses in its /etc/hosts.

        On leaving, every process in it is killed.
        """
        _clear_dead()
        space = cls(f"serve-{os.getpid()}-{secrets.token_hex(2)}-{role}")
        etc = Path("/etc/netns") / space.name
        etc.mkdir(parents=True)
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {os.uname().nodename}"]
        lines += [f"{address} {name}" for name, address in (hosts or {}).items()]
        (etc / "hosts").write_text("\n".join(lines) + "\n")
        _ip("netns", "add", space.name)
        try:
            space.ip("link", "set", "lo", "up")
            yield space
        finally:
            space._delete()

    def ip(self, *arguments: str) -> None:
        """Run ``ip`` on this namespace's links."""
        _ip("-n", self.name, *arguments)

    def join(self, other: "Namespace", address: str, others: str) -> None:
        """Lay a cable to ``other``: this end gets ``address``, that one ``others``."""
        here, there = f"to-{other.role}", f"to-{self.role}"
        self.ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", other.name)
        for space, link, own in ((self, here, address), (other, there, others)):
            space.ip("address", "add", f"{own}/30", "dev", link)
            space.ip("link", "set", link, "up")

    @property
    def role(self) -> str:
        """What it is: ``laptop``, ``jump`` …"""
        return self.name.rpartition("-")[2]

    def limit(self, link: str, mbit_s: float) -> None:
        """Let no more than ``mbit_s`` leave by ``link``."""
        tc = (TC, "-n", self.name)
        subprocess.run([*tc, "qdisc", "add", "dev", link, "root", "handle", "1:", "htb", "default", "1"], check=True)
        subprocess.run([*tc, "class", "add", "dev", link, "parent", "1:", "classid", "1:1", "htb",
                        "rate", f"{mbit_s}mbit", "quantum", "60000"], check=True)

    def unlimit(self, link: str) -> None:
        """Take a limit away."""
        subprocess.run([TC, "-n", self.name, "qdisc", "delete", "dev", link, "root"], check=True)

    def command(self, argv: Sequence[str | Path]) -> list[str]:
        """``argv`` as it is to be run in here; it sees this namespace's /etc/hosts."""
        return [IP, "netns", "exec", self.name, *map(str, argv)]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and all threads and processes that it starts, are in here for as long as the block lasts."""
        with open("/proc/thread-self/ns/net") as before:
            _enter(NETNS / self.name)
            try:
                yield
            finally:
                _set(before.fileno())

    def processes(self, name: str = "") -> list[int]:
        """The processes in here, or those of them that are called ``name``."""
        answer = subprocess.run([IP, "netns", "pids", self.name], capture_output=True, text=True, check=True).stdout
        return [int(pid) for pid in answer.split() if int(pid) != os.getpid() and name in ("", _name(pid))]

    def kill(self, name: str = "") -> None:
        """Kill those processes."""
        for pid in self.processes(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _delete(self) -> None:
        with suppress(TimeoutError):
            wait_until(self._kill_all, 10, f"the processes of {self.role} to end")
        _ip("netns", "delete", self.name)
        shutil.rmtree(f"/etc/netns/{self.name}", ignore_errors=True)

    def _kill_all(self) -> bool:
        self.kill()
        return not [pid for pid in self.processes() if _name(str(pid)) is not None and not _is_zombie(pid)]


def _clear_dead() -> None:
    """Delete the namespaces of tests that were killed."""
    for path in NETNS.glob("serve-*-*-*"):
        if not Path("/proc", path.name.split("-")[1]).exists():
            with suppress(subprocess.CalledProcessError):  # another test is at it
                Namespace(path.name)._delete()


def _enter(path: Path) -> None:
    with open(path) as space:
        _set(space.fileno())


def _set(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _name(pid: str) -> str | None:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    return None


def _is_zombie(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def _ip(*arguments: str) -> None:
    subprocess.run([IP, *arguments], check=True)
