"""The world of a user of Isambard-AI: laptop — jump host — login node — compute node, each reaching only the next.

Every server is a real sshd that takes user certificates of one authority, and nothing else. Everything lies in one
folder; the machines are network namespaces, so that each sshd has port 22 and nothing leads to the world outside.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.ssh.namespaces import Namespace
from tests.support import packages, processes, users
from tests.support.waiting import wait_until

PROJECT = "project"
ALIAS = f"{PROJECT}.aip2.isambard"
JUMP = "10.81.1.2"
JUMP_TO_LOGIN, LOGIN = "10.81.2.1", "10.81.2.2"
LOGIN_TO_COMPUTE, COMPUTE = "10.81.3.1", "10.81.3.2"
LOGIN_NAME = "ai-p2.access.isambard.ac.uk"
"""A name that the jump host knows and the laptop does not."""

INNER_PORT = 2022
"""A second sshd on the login node, to jump through."""

RELAY_PORT = 2200
ROOT = Path(__file__).parents[2]

SSHD = """\
ListenAddress 0.0.0.0:{port}
HostKey {folder}/host-{role}
TrustedUserCAKeys {folder}/ca.pub
AuthorizedKeysFile none
UsePAM no
StrictModes no
PidFile none
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 200
Subsystem sftp internal-sftp
SetEnv {variables}
{more}
"""


@dataclass
class World:
    """The machines, as they run."""

    folder: Path
    laptop: Namespace
    jump: Namespace
    login: Namespace
    compute: Namespace
    _sshds: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _started: dict[str, tuple[Namespace, int, Mapping[str, str]]] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def booted(cls, folder: Path, variables: Mapping[str, str] | None = None) -> Iterator["World"]:
        """Boots the world in ``folder``, which every user must be able to enter.

        Args:
            variables: what the login node's shells have in their environment beside `HOME`.
        """
        packages.need("openssh-server", "openssh-client", "iproute2")
        packages.need_root("network namespaces and sshd")
        user = users.ordinary_user()
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as down:
            world = cls(
                folder,
                laptop=down.enter_context(Namespace.created("laptop")),
                jump=down.enter_context(Namespace.created("jump", {LOGIN_NAME: LOGIN})),
                login=down.enter_context(Namespace.created("login", {"nid001": COMPUTE})),
                compute=down.enter_context(Namespace.created("compute")),
            )
            world.laptop.join(world.jump, "10.81.1.1", JUMP)
            world.jump.join(world.login, JUMP_TO_LOGIN, LOGIN)
            world.login.join(world.compute, LOGIN_TO_COMPUTE, COMPUTE)
            world.home.mkdir(parents=True, exist_ok=True)
            os.chown(world.home, user.pw_uid, user.pw_gid)
            _keygen("-f", folder / "ca")
            home = {"HOME": str(world.home), **(variables or {})}
            down.callback(world._stop)
            world.start("jump", world.jump)
            world.start("login", world.login, variables=home)
            world.start("inner", world.login, INNER_PORT)
            yield world

    @property
    def home(self) -> Path:
        """The user's home on the login node."""
        return self.folder / "home"

    def start(self, role: str, space: Namespace, port: int = 22, variables: Mapping[str, str] | None = None,
              more: str = "") -> None:
        """Starts the sshd ``role``; its host key stays the same from start to start."""
        if not (self.folder / f"host-{role}").exists():
            _keygen("-f", self.folder / f"host-{role}")
        self._started[role] = (space, port, variables or {})
        settings = " ".join(f'"{name}={value}"' for name, value in ({"A": "b"} | dict(variables or {})).items())
        config = self.folder / f"sshd-{role}"
        config.write_text(SSHD.format(port=port, folder=self.folder, role=role, variables=settings, more=more))
        with open(self.folder / f"sshd-{role}.log", "ab") as log:
            self._sshds[role] = subprocess.Popen(
                space.command(["/usr/sbin/sshd", "-D", "-e", "-f", config]), stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True)
        listening = space.command(["ss", "-Hltn", f"sport = :{port}"])
        wait_until(lambda: subprocess.run(listening, capture_output=True, check=True).stdout, 10, f"{role}'s sshd")

    def restart(self, role: str, more: str = "") -> None:
        """Starts the sshd ``role`` again, with ``more`` in its configuration. Its sessions go on."""
        space, port, variables = self._started[role]
        processes.stop(self._sshds[role])
        self.start(role, space, port, variables, more)

    def cut_sessions(self) -> None:
        """Kills the servers of all sessions on the login node; new ones can be begun."""
        listeners = {sshd.pid for sshd in self._sshds.values()}
        for pid in set(self.login.processes("sshd")) - listeners:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @contextmanager
    def slow(self, delay_s: float, mbit_s: float, to: int = 22) -> Iterator[int]:
        """A long way between laptop and jump host: the port of the jump host that leads to its port ``to``.

        Each byte takes ``delay_s`` in each direction, and no more than ``mbit_s`` go either way.
        """
        relay = [sys.executable, "-m", "tests.ssh.relay", f"{JUMP}:{RELAY_PORT}", f"127.0.0.1:{to}", str(delay_s)]
        ends = ((self.laptop, "to-jump"), (self.jump, "to-laptop"))
        with subprocess.Popen(self.jump.command(relay), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=ROOT,
                              start_new_session=True) as process, ExitStack() as down:
            down.callback(processes.stop, process)
            assert process.stdout
            assert process.stdout.readline() == b"ready\n"
            for space, link in ends:
                space.limit(link, mbit_s)
                down.callback(space.unlimit, link)
            yield RELAY_PORT

    def _stop(self) -> None:
        for sshd in self._sshds.values():
            processes.stop(sshd)

    def host_key(self, role: str) -> str:
        """The public host key of the sshd ``role``, without its comment."""
        return " ".join((self.folder / f"host-{role}.pub").read_text().split()[:2])

    def known_hosts(self, port: int = 22) -> str:
        """What somebody who has been everywhere knows. ``port``: where the jump host was met."""
        jump = JUMP if port == 22 else f"[{JUMP}]:{port}"
        return (f"{jump} {self.host_key('jump')}\n{LOGIN_NAME} {self.host_key('login')}\n"
                f"[{LOGIN}]:{INNER_PORT} {self.host_key('inner')}\nhidden {self.host_key('login')}\n")


@dataclass(frozen=True)
class Laptop:
    """A user's laptop: a folder with keys, certificates and an ssh configuration, in the namespace ``laptop``."""

    world: World
    folder: Path

    @classmethod
    def unpacked(cls, world: World, folder: Path) -> "Laptop":
        """A new laptop: a key, a certificate that is good for 12 hours, and every host key known."""
        laptop = cls(world, folder)
        (folder / "bin").mkdir(parents=True)
        _keygen("-f", laptop.key)
        laptop.certify(laptop.key)
        laptop.known_hosts.write_text(world.known_hosts())
        # OpenSSH reads the configuration of the passwd entry's home, whatever $HOME says.
        stub = folder / "bin" / "ssh"
        stub.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/ssh_config "$@"\n')
        stub.chmod(0o755)
        laptop.configure(clifton_03(laptop.key, laptop.certificate, laptop.known_hosts))
        return laptop

    @property
    def key(self) -> Path:
        """The user's key."""
        return self.folder / "id_ed25519"

    @property
    def certificate(self) -> Path:
        """The certificate of it, where clifton 0.3 puts it: not beside the key."""
        return self.folder / f"{ALIAS}-cert.pub"

    @property
    def known_hosts(self) -> Path:
        """The known_hosts file."""
        return self.folder / "known_hosts"

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment of the user's commands."""
        path = f"{self.folder / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        measured = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
        return {"HOME": str(self.folder), "PATH": path, "LANG": "C.UTF-8", **measured}

    def configure(self, text: str) -> None:
        """Writes the ssh configuration."""
        (self.folder / "ssh_config").write_text(text)

    def certify(self, key: Path, valid: str = "-1m:+12h", to: Path | None = None) -> None:
        """Has ``key`` certified, as `clifton auth` does; ``valid`` as ``ssh-keygen -V`` wants it."""
        subprocess.run(["ssh-keygen", "-q", "-s", self.world.folder / "ca", "-I", "test", "-n", users.USER, "-V", valid,
                        "-z", str(secrets.randbits(32)), f"{key}.pub"], check=True, capture_output=True)
        shutil.move(f"{key}-cert.pub", to or self.certificate)

    def run(self, argv: Sequence[str | Path], *, typed: str = "", timeout: float = 60, check: bool = True,
            env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command on the laptop, without a terminal."""
        done = subprocess.run(self.world.laptop.command(argv), input=typed, capture_output=True, text=True,
                              timeout=timeout, check=False, env={**self.environment, **(env or {})},
                              cwd=self.folder, start_new_session=True)
        if check and done.returncode:
            raise AssertionError(f"{argv} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done


def clifton_03(key: Path, certificate: Path, known_hosts: Path, jump_port: int = 22) -> str:
    """What clifton 0.3 and later write, with this world's addresses."""
    return f"""\
# CLIFTON MANAGED
Host jump.*.aip2.isambard
\tHostname {JUMP}
\tIdentityFile "{key}"
Host *.aip2.isambard !jump.*.aip2.isambard
\tHostname {LOGIN_NAME}
\tProxyJump %r@jump.%n
\tIdentityFile "{key}"
\tAddKeysToAgent yes

Host jump.{ALIAS}
\tCertificateFile "{certificate}"
Host {ALIAS}
\tUser {users.USER}
\tCertificateFile "{certificate}"

Host jump.*
\tPort {jump_port}
Host *
\tUserKnownHostsFile {known_hosts}
\tGlobalKnownHostsFile none
"""


def clifton_02(key: Path, known_hosts: Path) -> str:
    """What clifton 0.2 writes, with this world's addresses: one jump host for all, the certificate beside the key."""
    return f"""\
Host jump.aip2.isambard
\tHostname {JUMP}
\tIdentityFile "{key}"
\tCertificateFile "{key}-cert.pub"
Host *.aip2.isambard !jump.aip2.isambard
\tHostname {LOGIN_NAME}
\tProxyJump %r@jump.aip2.isambard
\tIdentityFile "{key}"
\tCertificateFile "{key}-cert.pub"
\tServerAliveInterval 60
Host {ALIAS}
\tUser {users.USER}

Host *
\tUserKnownHostsFile {known_hosts}
\tGlobalKnownHostsFile none
"""


def two_jumps(laptop: Laptop) -> str:
    """A host that only the login node itself reaches, through the jump host and the login node's second sshd."""
    return f"""\
Host outer
\tHostname {JUMP}
Host inner
\tHostname {LOGIN}
\tPort {INNER_PORT}
Host hidden
\tHostname 127.0.0.1
\tHostKeyAlias hidden
\tProxyJump {users.USER}@outer,inner
Host *
\tUser {users.USER}
\tIdentityFile {laptop.key}
\tCertificateFile {laptop.certificate}
\tUserKnownHostsFile {laptop.known_hosts}
\tGlobalKnownHostsFile none
"""


def _keygen(*arguments: str | Path) -> None:
    words = [str(argument) for argument in arguments]
    passphrase = [] if "-N" in words else ["-N", ""]
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", *passphrase, *words], check=True)
