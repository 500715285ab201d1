"""A host reached with paramiko: one connection, which every command, transfer and tunnel shares."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any, cast

import paramiko
from paramiko.common import cMSG_CHANNEL_CLOSE
from paramiko.hostkeys import HostKeyEntry, HostKeys, InvalidHostKey

from isambard_serve import process
from isambard_serve.errors import ConnectionLostError, HostError
from isambard_serve.ssh import stream
from isambard_serve.ssh.config import Hop, expanded
from isambard_serve.ssh.keys import Keyring
from isambard_serve.ssh.stream import Done, Stream

KEEPALIVE_S = 15
DEAD_AFTER_S = 45
"""How long a peer may leave keepalives unanswered before the connection counts as lost."""

HANDSHAKE_S = 60.0
WINDOW = 4 << 20
"""Bytes under way: 200 Mbit/s at a round trip of 100 ms are 2.5 MB. paramiko slows down where more lies unread."""

PIECE = 1 << 16


class HostKeyError(HostError):
    """The server's key is not the one that is known, or none is known."""


class _Inside:
    """A channel as the socket of the connection inside it. That the outer one has gone is no news when it closes."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self.recv = channel.recv
        self.send = channel.send
        self.settimeout = channel.settimeout
        self._channel = channel

    @property
    def _closed(self) -> bool:  # paramiko's name for it, of sockets and channels alike
        return bool(self._channel.closed)

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()


class _Orderly:
    """The connection as one channel sees it: nothing of the channel's goes out after its close.

    paramiko makes up a message under the channel's lock but sends it after that, so that what one thread sends can
    follow the close of another, or the answer to the server's. OpenSSH's server then ends the whole connection ("packet
    referred to nonexistent channel").
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _send_user_message(self, message: paramiko.Message) -> None:
        with self._lock:
            if not self._closed:
                self._closed = message.asbytes().startswith(cMSG_CHANNEL_CLOSE)
                self._transport._send_user_message(message)


def _orderly(channel: paramiko.Channel) -> paramiko.Channel:
    channel.transport = cast(paramiko.Transport, _Orderly(channel.transport))
    return channel


class _ChannelFile(io.RawIOBase):
    """One direction of a channel as a file."""

    def __init__(self, channel: paramiko.Channel, direction: str) -> None:
        self._channel = channel
        self._direction = direction

    def readable(self) -> bool:
        return self._direction != "in"

    def writable(self) -> bool:
        return self._direction == "in"

    def readinto(self, buffer: Any) -> int:
        read = self._channel.recv_stderr if self._direction == "err" else self._channel.recv
        data = read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        try:
            return self._channel.send(bytes(data[:PIECE]))
        except EOFError as error:  # how paramiko says that the connection has gone
            raise BrokenPipeError from error

    def close(self) -> None:
        if not self.closed and self.writable():
            with contextlib.suppress(OSError, EOFError):
                self._channel.shutdown_write()
        super().close()


class _Ending:
    """The end of what a channel runs."""

    def __init__(self, channel: paramiko.Channel, where: str) -> None:
        self._channel = channel
        self._where = where

    def wait(self) -> int:
        code = self._channel.recv_exit_status()
        if code < 0:
            raise ConnectionLostError("the connection was lost", where=self._where)
        return code

    def cut(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()


class ParamikoHost:
    """A host at the end of a chain of connections, each inside the one before.

    Args:
        route: the servers on the way; the last is the host.
        keys: what to log in with.

    Raises:
        ConnectionLostError: a server cannot be reached.
        HostKeyError: its key is not the one that is known.
        HostError: it cannot be logged in to.
    """

    def __init__(self, route: Sequence[Hop], keys: Keyring) -> None:
        self.name = route[-1].alias
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # what it logs, with tracebacks, it raises as well
        self._up = contextlib.ExitStack()
        transport: paramiko.Transport | None = None
        with self._up as stack:
            for hop in route:
                sock = self._socket(hop, transport, stack)
                transport = _connected(hop, sock)
                stack.callback(transport.close)
                keys.authenticate(transport, hop)
                transport.set_keepalive(KEEPALIVE_S)
            self._up = stack.pop_all()
        assert transport is not None  # noqa: S101 - a route has a last hop
        self._transport = transport

    def _socket(self, hop: Hop, before: paramiko.Transport | None, stack: contextlib.ExitStack) -> Any:
        where = f"{hop.alias} ({hop.hostname}:{hop.port})"
        try:
            if before:
                return _Inside(_channel(before, (hop.hostname, hop.port), where))
            if hop.proxy_command:
                return stack.enter_context(process.connected(f"exec {expanded(hop.proxy_command, hop)}"))
            sock = socket.create_connection((hop.hostname, hop.port), timeout=hop.connect_timeout_s)
        except (OSError, UnicodeError) as error:  # UnicodeError: no host can have that name
            raise ConnectionLostError(f"cannot be reached: {getattr(error, 'strerror', None) or error}", where=where,
                                      remedy=f"see what `ssh {self.name}` says") from error
        with contextlib.suppress(OSError, AttributeError):  # Linux: the kernel notices a silent peer
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)
        return sock

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = None) -> Done:
        """Runs ``argv`` there to its end; see :func:`isambard_serve.ssh.stream.finish`."""
        return stream.finish(self.start(argv), stdin, timeout_s)

    def start(self, argv: Sequence[str]) -> Stream:
        """Starts ``argv`` there, in a login shell's environment."""
        mark = stream.new_mark()
        try:
            channel = _orderly(self._transport.open_session(timeout=HANDSHAKE_S))
            channel.exec_command(stream.command_line(argv, mark))
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise ConnectionLostError(f"the connection was lost: {error}", where=self.name) from error
        return self._stream(channel, mark).begin()

    def _stream(self, channel: paramiko.Channel, mark: str | None = None) -> Stream:
        stdin, stdout, stderr = (_ChannelFile(channel, direction) for direction in ("in", "out", "err"))
        return Stream(io.BufferedWriter(stdin, PIECE), io.BufferedReader(stdout, PIECE),
                      io.BufferedReader(stderr, PIECE), _Ending(channel, self.name), where=self.name, mark=mark)

    def dial(self, address: str, port: int) -> Stream:
        """A connection from the host to ``address``: what is written to ``stdin`` goes there."""
        try:
            return self._stream(_channel(self._transport, (address, port), f"{address}:{port}, from {self.name}"))
        except OSError as error:
            raise HostError(f"cannot be reached: {error}", where=f"{address}:{port}, from {self.name}") from error

    def sftp(self) -> paramiko.SFTPClient:
        """A new SFTP session."""
        try:
            client = paramiko.SFTPClient.from_transport(self._transport, window_size=WINDOW)
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise ConnectionLostError(f"no SFTP there: {error}", where=self.name) from error
        assert client is not None  # noqa: S101 - its channel was opened
        _orderly(cast(paramiko.Channel, client.get_channel()))
        return client

    def close(self) -> None:
        """Ends the connection, and everything that runs over it."""
        self._up.close()


def _channel(transport: paramiko.Transport, to: tuple[str, int], where: str) -> paramiko.Channel:
    try:
        return _orderly(transport.open_channel("direct-tcpip", to, ("127.0.0.1", 0), timeout=HANDSHAKE_S))
    except paramiko.ChannelException as error:
        raise ConnectionRefusedError(0, error.text) from error
    except (paramiko.SSHException, EOFError) as error:
        raise ConnectionLostError(f"the connection was lost: {error}", where=where) from error


def _connected(hop: Hop, sock: Any) -> paramiko.Transport:
    """A connection to ``hop`` whose key is the known one."""
    where = f"{hop.alias} ({hop.hostname}:{hop.port})"
    known = _known_keys(hop)
    transport = paramiko.Transport(sock, default_window_size=WINDOW)
    try:
        # Keys of the kinds that are known are asked for first: a server has several.
        security = transport.get_security_options()
        security.key_types = sorted(security.key_types, key=lambda kind: not _is_kind(kind, known))
        transport.banner_timeout = HANDSHAKE_S
        transport.start_client(timeout=HANDSHAKE_S)
        theirs = transport.get_remote_server_key()
        if not known:
            raise HostKeyError("its host key is not known", where=where, remedy=_how_to_know(hop))
        if (theirs.get_name(), theirs.asbytes()) not in known:
            raise HostKeyError("ITS HOST KEY IS NOT THE KNOWN ONE: somebody may be listening in, or the site has "
                               "changed it", where=where,
                               remedy=f"ask the site; if it has, `ssh-keygen -R '{hop.host_key_name}'` forgets the "
                                      "old one")
    except (paramiko.SSHException, OSError, EOFError) as error:
        transport.close()
        raise ConnectionLostError(f"no SSH server answers: {str(error) or 'the connection was closed'}", where=where,
                                  remedy=f"see what `ssh {hop.alias}` says") from error
    except BaseException:
        transport.close()
        raise
    return transport


def _how_to_know(hop: Hop) -> str:
    remembered = [file for file in hop.known_hosts if file != os.devnull]
    if not remembered:
        return "your ssh configuration has host keys forgotten (UserKnownHostsFile): name a file there"
    return (f"log in once with `ssh {hop.alias}`, and compare the fingerprint that it shows with the one that the site "
            "publishes")


def _known_keys(hop: Hop) -> set[tuple[str, bytes]]:
    """The host keys that are known for ``hop``, with their kinds. A name may have several: any of them will do."""
    keys = set()
    for file in hop.known_hosts:
        with contextlib.suppress(OSError), open(file, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                entry = _entry(line.strip())
                if entry and entry.key and any(_names(name, hop) for name in entry.hostnames or ()):
                    keys.add((entry.key.get_name(), entry.key.asbytes()))
    return keys


def _entry(line: str) -> HostKeyEntry | None:
    """A line of a known_hosts file; None for comments and for what is not understood."""
    with contextlib.suppress(InvalidHostKey, paramiko.SSHException, ValueError):
        return HostKeyEntry.from_line(line) if line and not line.startswith(("#", "@")) else None
    return None


def _names(name: str, hop: Hop) -> bool:
    """Whether ``name``, as it stands in a known_hosts file, is the name of ``hop``; it may be hashed."""
    ours = hop.host_key_name
    with contextlib.suppress(ValueError, AssertionError):
        return name == (HostKeys.hash_host(ours, name) if name.startswith("|1|") else ours)
    return False


def _is_kind(algorithm: str, known: set[tuple[str, bytes]]) -> bool:
    """Whether ``algorithm`` proves a key of a known kind; RSA keys have several."""
    return ("ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm) in {kind for kind, _ in known}
