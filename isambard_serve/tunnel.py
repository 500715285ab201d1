"""From the laptop to an engine on a compute node: a local port, the login node, the engine's address.

The engine must be one for people (``submit --serve``). A benchmark's listens on its node's loopback only, where nobody
but its own load generator reaches it, and requests from outside would spoil its rows.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from io import BufferedReader
from typing import cast
from urllib.parse import urlsplit

import msgspec

from isambard_serve import host, remote
from isambard_serve.engine import EngineClient, EngineUnreachableError
from isambard_serve.errors import HostError, NotReadyError, ServeError, UsageError
from isambard_serve.host import Host, Stream
from isambard_serve.records import Endpoint, Record, Run
from isambard_serve.status import ENDS

POLL_S = 15.0
"""How often the run's files are asked whether it has ended. Slurm is asked no oftener than the site allows."""

PIECE = 1 << 16


class Target(Record, frozen=True):
    """What a tunnel leads to: where it answers, as the login node sees it, and what it wants to hear."""

    run_id: str
    address: str
    port: int
    model: str
    key: str


def find(there: Host, name: str, needed: str, site: str | None = None) -> Target:
    """The engine of the run ``name``.

    Raises:
        UsageError: its engine cannot be led to.
        NotReadyError: it does not answer yet.
        ServeError: it has ended.
    """
    run = status(there, name, needed, site)
    if run.state in ENDS:
        raise ServeError(f"has ended: {run.state}{f' ({run.reason})' if run.reason else ''}", where=run.run_id)
    endpoint = msgspec.json.decode(_read(there, f"{run.directory}/endpoint.json") or b"null", type=Endpoint | None)
    if endpoint is None:
        raise NotReadyError(f"does not answer yet: {run.state}", where=run.run_id,
                            remedy=f"isambard-serve logs -f {name} --host {there.name}")
    if run.url is None:
        raise UsageError("a benchmark's engine is not for people: requests would spoil its rows", where=run.run_id,
                         remedy="isambard-serve submit RECIPE --serve")
    url = urlsplit(run.url)
    if _is_loopback(url.hostname) and not run.jobs.get("serve", "").startswith("local-"):
        raise UsageError(f"it listens at {run.url}, which no login node reaches", where=run.run_id,
                         remedy="name the network that they share in the site file: serve: {interface: …}")
    key = _read(there, endpoint.key_file)
    if not key or not url.hostname or not url.port:
        raise HostError("its key or its address cannot be read", where=endpoint.key_file)
    return Target(run_id=run.run_id, address=url.hostname, port=url.port, model=endpoint.model,
                  key=key.decode().strip())


def status(there: Host, name: str, needed: str, site: str | None) -> Run:
    """The run ``name``, as the login node tells."""
    words = ["status", *([f"--site={site}"] if site else []), "--", name]
    (run,) = msgspec.convert(remote.ask(there, words, needed)["runs"], tuple[Run, ...])
    return run


def _read(there: Host, path: str) -> bytes | None:
    done = there.run(["cat", path], timeout_s=60)
    return done.stdout if done.returncode == 0 else None


def _is_loopback(address: str | None) -> bool:
    return address in ("localhost", "::1") or (address or "").startswith("127.")


class Forwarder:
    """A local port, each of whose connections is passed on.

    Args:
        port: the port on loopback; 0 is any that is free.

    Raises:
        UsageError: it is taken.
    """

    def __init__(self, port: int = 0) -> None:
        try:
            self._listener = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            raise UsageError(f"port {port} is taken: {error.strerror}", where="--port",
                             remedy="leave it out, and a free one is used") from error
        self.port: int = self._listener.getsockname()[1]
        self.trouble = threading.Event()
        """Set when a connection could not be passed on."""
        self._dial: Callable[[], Stream] | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def lead(self, there: Host, target: Target) -> None:
        """From now on connections go over ``there`` to ``target``."""
        self._dial = lambda: there.dial(target.address, target.port)

    def close(self) -> None:
        """Takes no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(connection,), daemon=True).start()

    def _pass_on(self, connection: socket.socket) -> None:
        with connection:
            try:
                assert self._dial  # noqa: S101 - nobody knows the port before
                stream = self._dial()
            except HostError:
                self.trouble.set()
                return
            with stream:
                threading.Thread(target=_send, args=(connection, stream), daemon=True).start()
                with contextlib.suppress(OSError):
                    while data := cast(BufferedReader, stream.stdout).read1(PIECE):
                        connection.sendall(data)
                    connection.shutdown(socket.SHUT_RDWR)


def _send(connection: socket.socket, stream: Stream) -> None:
    with contextlib.suppress(OSError, ValueError):  # either side has gone
        while data := connection.recv(PIECE):
            stream.stdin.write(data)
            stream.stdin.flush()
    with contextlib.suppress(OSError, ValueError):
        stream.stdin.close()


def keep(alias: str, name: str, forwarder: Forwarder, opened: Callable[[Target], bool], *, site: str | None = None,
         poll_s: float = POLL_S, pauses_s: Sequence[float] = host.PAUSES_S) -> Run | None:
    """Keeps the way to the engine of the run ``name`` open until the run has ended, and returns the run.

    A lost connection is made again; requests that were under way are lost with it.

    Args:
        opened: told once, after a completion came all the way; if it answers False, that is the end (None).

    Raises:
        ServeError: the engine cannot be led to, or does not answer.
    """
    needed = remote.version()
    told = False

    def work(there: Host) -> Run | None:
        nonlocal told
        target = find(there, name, needed, site)
        forwarder.lead(there, target)
        _check(forwarder, target)
        if not told:
            told = True
            if not opened(target):
                return None
        while True:
            forwarder.trouble.wait(poll_s)
            forwarder.trouble.clear()
            run = status(there, name, needed, site)
            if run.state in (*ENDS, "stopping"):
                return run

    return host.persistently(alias, work, pauses_s=pauses_s)


def _check(forwarder: Forwarder, target: Target) -> None:
    """Has the engine answer one completion, all the way through.

    Raises:
        HostError: it does not.
    """
    try:
        EngineClient(f"http://127.0.0.1:{forwarder.port}", target.key).complete(target.model)
    except EngineUnreachableError as error:
        raise HostError(f"the engine does not answer through the tunnel: {error}",
                        where=f"{target.address}:{target.port}",
                        remedy="does the login node reach it? its firewall, or serve.interface of the site") from error
