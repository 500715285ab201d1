"""A far-side host over SSH, and the one rule that says which SSH is used.

paramiko is configured from ``ssh -G``. Commands go over it: it is there first. For bulk OpenSSH comes first, since it
does the cryptography several times as fast, and a jump doubles it (figures: docs/how-it-works.md, from
benchmarks/ssh.py). Where one cannot log in and the other can (a key that lies elsewhere, an encrypted key), the other
is used. Where paramiko could not check the host as the user's configuration wants it (revoked keys, authorities),
only OpenSSH is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from isambard_serve import process
from isambard_serve.errors import ConnectionLostError, HostError, NoProgramError
from isambard_serve.ssh import config, opensshhost
from isambard_serve.ssh.config import Hop
from isambard_serve.ssh.opensshhost import OpensshHost
from isambard_serve.ssh.stream import Done, Stream

if TYPE_CHECKING:
    import paramiko

__all__ = ["Done", "Host", "Stream", "connect", "connected", "persistently", "resolve"]

T = TypeVar("T")

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""How long to wait before each new attempt."""

RESOLVE_S = 20.0
"""How long ``ssh -G`` may take; it asks no other machine, unless the configuration has it do so."""

LASTING_S = 120.0
"""A connection that was kept so long was a good one: its loss is not one of a row of losses."""


class Host(Protocol):
    """A host that programs can be run on."""

    name: str

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = None) -> Done:
        """Runs ``argv`` there to its end.

        Raises:
            ConnectionLostError: the connection went away; the program may have run, and may still.
            HostError: it gave no answer within ``timeout_s``, or could not be begun.
        """

    def start(self, argv: Sequence[str]) -> Stream:
        """Starts ``argv`` there; it can be talked to while it runs."""

    def dial(self, address: str, port: int) -> Stream:
        """A connection from there to ``address``; nothing is on its stderr, and it has no exit code."""

    def sftp(self) -> paramiko.SFTPClient:
        """A new SFTP session over the same connection."""

    def close(self) -> None:
        """Ends the connection."""


def resolve(alias: str) -> list[Hop]:
    """The servers on the way to ``alias``, as OpenSSH's configuration has them.

    Raises:
        UsageError: the configuration cannot be used.
        HostError: there is no ``ssh`` here.
    """
    def ask(arguments: Sequence[str]) -> str:
        try:
            done = process.run(["ssh", "-G", *arguments], env=opensshhost.environment(), timeout_s=RESOLVE_S)
        except NoProgramError:
            raise
        except HostError as error:
            raise HostError("ssh -G does not answer", where=alias,
                            remedy="does a program hang that your ssh configuration names (Match exec)?") from error
        if done.returncode != 0:
            raise HostError(f"ssh -G says: {done.stderr.strip()}", where=alias, remedy="mend your ssh configuration")
        return done.stdout

    return config.route(alias, ask)


def connect(alias: str, *, bulk: bool = False) -> Host:
    """Connects to ``alias``, without a question but for a key's passphrase on a terminal.

    Args:
        bulk: whether much data is to be moved.

    Raises:
        HostError: it cannot be reached or logged in to.
    """
    hops = resolve(alias)
    if any(hop.only_openssh or _has_markers(hop) for hop in hops):
        try:
            return OpensshHost(alias)
        except HostError as error:
            from isambard_serve.ssh.keys import expired

            raise next((over for over in map(expired, hops) if over), error) from error
    if bulk:
        with contextlib.suppress(HostError):
            return OpensshHost(alias, ciphers=hops[-1].quick_ciphers)
    # Not before it is needed: it takes a fifth of a second to load.
    from isambard_serve.ssh.keys import Keyring
    from isambard_serve.ssh.paramikohost import ParamikoHost

    try:
        with contextlib.closing(Keyring()) as keys:
            return ParamikoHost(hops, keys)
    except ConnectionLostError:
        raise
    except HostError:
        if not bulk:
            with contextlib.suppress(HostError):
                return OpensshHost(alias)
        raise


def _has_markers(hop: Hop) -> bool:
    """Whether a known_hosts file has a line that paramiko does not understand: ``@revoked`` or ``@cert-authority``."""
    for file in hop.known_hosts:
        with contextlib.suppress(OSError), open(file, encoding="utf-8", errors="replace") as lines:
            if any(line.startswith("@") for line in lines):
                return True
    return False


@contextlib.contextmanager
def connected(alias: str, *, bulk: bool = False) -> Iterator[Host]:
    """A connection to ``alias`` for as long as the block lasts."""
    with contextlib.closing(connect(alias, bulk=bulk)) as host:
        yield host


def persistently(alias: str, work: Callable[[Host], T], *, bulk: bool = False,
                 pauses_s: Sequence[float] = PAUSES_S, lasting_s: float = LASTING_S) -> T:
    """Does ``work`` over a connection, and again over a new one when it is lost. Only for what is safe to repeat.

    There is a new attempt after each of ``pauses_s``; after a connection that lasted ``lasting_s`` they begin anew.

    A host that cannot be reached in the beginning, and one that cannot be logged in to (an expired certificate), is
    not tried again.

    Raises:
        HostError: it cannot be logged in to, or the connection was lost again and again.
    """
    host: Host | None = connect(alias, bulk=bulk)
    left = list(pauses_s)
    while True:
        began = time.monotonic()
        try:
            with contextlib.closing(host or connect(alias, bulk=bulk)) as there:
                return work(there)
        except ConnectionLostError:
            if time.monotonic() - began >= lasting_s:
                left = list(pauses_s)
            if not left:
                raise
            host = None
            time.sleep(left.pop(0))
