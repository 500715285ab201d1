"""A host reached with OpenSSH's own client: whatever it can log in to, and the quicker one for much data."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from isambard_serve import process
from isambard_serve.errors import ConnectionLostError, HostError
from isambard_serve.ssh import stream
from isambard_serve.ssh.stream import Done, Stream

if TYPE_CHECKING:
    import paramiko

CONNECT_S = 90.0
_LOOK_S = 0.005
LOST = 255
"""What ``ssh`` exits with when its connection fails. A program that itself ends so cannot be told apart from it."""

OPTIONS = ("-T", "-oBatchMode=yes", "-oStrictHostKeyChecking=yes", "-oConnectTimeout=15", "-oServerAliveInterval=15",
           "-oServerAliveCountMax=3", "-oClearAllForwardings=yes", "-oForwardX11=no", "-oForwardAgent=no",
           "-oPermitLocalCommand=no", "-oRemoteCommand=none", "-oControlPersist=no", "-oLogLevel=ERROR")


def environment() -> dict[str, str]:
    """The variables for OpenSSH's programs: the user's, and never a window that asks."""
    return {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}


class _Ending:
    """The end of an ``ssh`` process."""

    def __init__(self, child: subprocess.Popen[bytes], where: str) -> None:
        self._child = child
        self._where = where

    def wait(self) -> int:
        code = self._child.wait()
        if code == LOST or code < 0:
            raise ConnectionLostError("the connection was lost", where=self._where)
        return code

    def cut(self) -> None:
        process.stop(self._child, 1.0)


class _Pipes:
    """The pipes of an ``ssh`` process, as paramiko's SFTP client wants a channel."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        assert child.stdin and child.stdout  # noqa: S101, PT018 - they are pipes
        self._in, self._out = child.stdin, child.stdout

    def send(self, data: bytes) -> int:
        return os.write(self._in.fileno(), data)

    def recv(self, size: int) -> bytes:
        return os.read(self._out.fileno(), size)

    def get_name(self) -> str:
        return "sftp"

    def close(self) -> None:
        process.stop(self._child, 1.0)
        for file in (self._in, self._out):
            with contextlib.suppress(OSError):
                file.close()


class OpensshHost:
    """A host to which ``ssh ALIAS`` leads. One master connection, which ends with this object, carries everything.

    Args:
        ciphers: what to offer, in this order; none: as the configuration has it.

    Raises:
        HostError: ``ssh`` cannot log in without asking.
    """

    def __init__(self, alias: str, ciphers: Sequence[str] = ()) -> None:
        self.name = alias
        self._up = contextlib.ExitStack()
        with self._up as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="isambard-serve-"))
            self._socket = Path(folder) / "s"
            offered = [f"-oCiphers={','.join(ciphers)}"] if ciphers else []
            master = process.tethered([*self._ssh("-M", "-N", *offered), "--", alias])
            self._master = process.piped(master, env=environment())
            stack.callback(self._end_master)
            self._wait_for_master()
            self._up = stack.pop_all()

    def _ssh(self, *options: str) -> list[str]:
        return ["ssh", *OPTIONS, "-S", str(self._socket), *options]

    def _wait_for_master(self) -> None:
        """Waits until the master has logged in: then, and not before, its socket is there."""
        deadline = time.monotonic() + CONNECT_S
        while not self._socket.exists():
            if self._master.poll() is not None or time.monotonic() > deadline:
                process.stop(self._master, 1.0)
                assert self._master.stderr  # noqa: S101 - it is a pipe
                said = self._master.stderr.read().decode(errors="replace").strip()
                raise HostError(f"ssh cannot log in: {said or 'no answer'}", where=self.name,
                                remedy=f"see what `ssh {self.name}` says")
            time.sleep(_LOOK_S)

    def _end_master(self) -> None:
        process.stop(self._master, 2.0)
        for file in (self._master.stdin, self._master.stdout, self._master.stderr):
            if file:
                file.close()

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = None) -> Done:
        """Runs ``argv`` there to its end; see :func:`isambard_serve.ssh.stream.finish`."""
        return stream.finish(self.start(argv), stdin, timeout_s)

    def start(self, argv: Sequence[str]) -> Stream:
        """Starts ``argv`` there, in a login shell's environment."""
        mark = stream.new_mark()
        return self._stream("--", self.name, stream.command_line(argv, mark), mark=mark).begin()

    def _stream(self, *arguments: str, mark: str | None = None) -> Stream:
        child = process.piped([*self._ssh(), *arguments], env=environment())
        return Stream(cast(BinaryIO, child.stdin), cast(BinaryIO, child.stdout), cast(BinaryIO, child.stderr),
                      _Ending(child, self.name), where=self.name, mark=mark)

    def dial(self, address: str, port: int) -> Stream:
        """A connection from the host to ``address``: what is written to ``stdin`` goes there."""
        target = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        return self._stream("-W", target, "--", self.name)

    def sftp(self) -> paramiko.SFTPClient:
        """A new SFTP session: paramiko's client, over the pipes of ``ssh -s … sftp``."""
        import paramiko

        child = process.piped([*self._ssh("-s"), "--", self.name, "sftp"], env=environment(), stderr=subprocess.DEVNULL)
        pipes = _Pipes(child)
        try:
            return paramiko.SFTPClient(cast(paramiko.Channel, pipes))
        except (paramiko.SSHException, OSError, EOFError) as error:
            pipes.close()
            raise ConnectionLostError(f"no SFTP there: {error}", where=self.name) from error

    def close(self) -> None:
        """Ends the connection, and everything that runs over it."""
        self._up.close()
