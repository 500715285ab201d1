"""A host that is this machine: programs start without SSH, and their connection can be cut at will."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import BinaryIO, cast

import paramiko

from isambard_serve import process
from isambard_serve.errors import ConnectionLostError
from isambard_serve.ssh import stream
from isambard_serve.ssh.stream import Done, Stream


class _Cut:
    """The output of a program that is ended after so many bytes."""

    def __init__(self, program: subprocess.Popen[bytes], after: int | None) -> None:
        self._program = program
        self._left = after
        self.done = False

    def read(self, count: int) -> bytes:
        assert self._program.stdout
        data = self._program.stdout.read(count if self._left is None else min(count, self._left))
        if self._left is not None:
            self._left -= len(data)
            if not self._left:
                self.done = True
                self._program.kill()
        return data

    def close(self) -> None:
        assert self._program.stdout
        self._program.stdout.close()


class _Ending:
    def __init__(self, program: subprocess.Popen[bytes], output: _Cut) -> None:
        self._program = program
        self._output = output

    def wait(self) -> int:
        code = self._program.wait()
        if self._output.done:
            raise ConnectionLostError("the connection was lost", where="here")
        return code

    def cut(self) -> None:
        process.stop(self._program, 1.0)


class LocalHost:
    """This machine. ``python3`` is the interpreter that runs the tests.

    Args:
        cuts: after how many bytes the connections are cut, one after another; None, and what comes after: never.
    """

    def __init__(self, cuts: Iterable[int | None] = ()) -> None:
        self.name = "here"
        self._cuts = iter(cuts)
        self.started: list[Sequence[str]] = []

    def start(self, argv: Sequence[str]) -> Stream:
        """Start a program."""
        self.started.append(argv)
        program = process.piped([sys.executable if argv[0] == "python3" else argv[0], *argv[1:]], env=os.environ)
        output = _Cut(program, next(self._cuts, None))
        stdin, stdout, stderr = (cast(BinaryIO, file) for file in (program.stdin, output, program.stderr))
        return Stream(stdin, stdout, stderr, _Ending(program, output), where=self.name)

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = None) -> Done:
        """Run a program to its end."""
        return stream.finish(self.start(argv), stdin, timeout_s)

    def dial(self, address: str, port: int) -> Stream:
        """Nobody dials from here."""
        raise NotImplementedError

    def sftp(self) -> paramiko.SFTPClient:
        """There is no SFTP here."""
        raise NotImplementedError

    def close(self) -> None:
        """There is nothing to close."""
