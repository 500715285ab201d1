"""Keys and certificates: what this user can log in with, in the order in which it is tried."""

from __future__ import annotations

import base64
import getpass
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import ssh
from paramiko.pkey import PublicBlob

from isambard_serve.errors import HostError
from isambard_serve.records import Record
from isambard_serve.ssh.config import Hop

RENEW = "run `clifton auth` (or what else renews your certificate), then try again"

Prompt = Callable[[str], str | None]
"""Asks for a passphrase; None where nobody can be asked."""


class Certificate(Record, frozen=True):
    """A user certificate: the file, the public key in it (as SSH sends it), and when it is good (epoch seconds)."""

    file: str
    key: bytes
    valid_after: float
    valid_before: float

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        return time.time() >= self.valid_before


def read_certificate(path: Path) -> Certificate | None:
    """The certificate in ``path``; None if there is no such file or no certificate in it."""
    try:
        identity = ssh.load_ssh_public_identity(path.read_bytes())
    except (OSError, ValueError, TypeError):
        return None
    if not isinstance(identity, ssh.SSHCertificate):
        return None
    public = identity.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return Certificate(file=str(path), key=base64.b64decode(public.split()[1]), valid_after=identity.valid_after,
                       valid_before=identity.valid_before)


def certificates(hop: Hop) -> list[Certificate]:
    """The certificates for ``hop``: those that its configuration names, then those beside its keys."""
    files = [*hop.certificate_files, *(f"{key}-cert.pub" for key in hop.identity_files)]
    found = {file: read_certificate(Path(file)) for file in files}
    return [certificate for certificate in found.values() if certificate]


def expired(hop: Hop) -> HostError | None:
    """The error that a certificate for ``hop`` has had its time, if it has."""
    for certificate in certificates(hop):
        if certificate.expired:
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(certificate.valid_before))
            return HostError(f"the certificate {certificate.file} expired at {when}", where=_where(hop), remedy=RENEW)
    return None


def _where(hop: Hop) -> str:
    return f"{hop.alias} ({hop.user}@{hop.hostname})"


def ask_on_terminal(question: str) -> str | None:
    """Asks on the terminal; None where there is none."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return None
    return getpass.getpass(question)


class Keyring:
    """The user's keys, for all hops of a connection: a passphrase is asked for once.

    Args:
        prompt: asks for a passphrase.
    """

    def __init__(self, prompt: Prompt = ask_on_terminal) -> None:
        self._prompt = prompt
        self._loaded: dict[str, paramiko.PKey | str] = {}
        self._agent: paramiko.Agent | None = None

    def close(self) -> None:
        """Lets go of the agent."""
        if self._agent:
            self._agent.close()

    def authenticate(self, transport: paramiko.Transport, hop: Hop) -> None:
        """Logs in at ``hop`` with the first key that it takes.

        Raises:
            HostError: it takes none; a certificate whose time is over is named, with what renews it.
        """
        tried = 0
        for key in self._candidates(hop):
            tried += 1
            try:
                if not transport.auth_publickey(hop.user, key):
                    return
            except paramiko.AuthenticationException:
                continue
            except paramiko.SSHException as error:  # too many failures end the connection
                if not transport.is_active():
                    raise self._refusal(hop, tried) from error
        raise self._refusal(hop, tried)

    def _candidates(self, hop: Hop) -> Iterator[paramiko.PKey]:
        """The keys to try: with certificates first, those in the agent before those in files, which may need asking."""
        known = [certificate for certificate in certificates(hop) if not certificate.expired]
        held = self._held(hop, known)
        for key in held:
            if "-cert-v01@" in key.get_name():
                yield key
            for certificate in known:
                if certificate.key == key.asbytes():
                    yield _certified(paramiko.AgentKey(key.agent, key.blob, key.comment), certificate)
        here = {key.asbytes() for key in held}
        files = [file for file in hop.identity_files if Path(file).is_file() and _public(file) not in here]
        for file in files:
            key_of_file = self._load(file)
            for certificate in known:
                if isinstance(key_of_file, paramiko.PKey) and certificate.key == key_of_file.asbytes():
                    yield _certified(key_of_file, certificate)
        yield from (key for key in held if "-cert-v01@" not in key.get_name())
        for file in files:
            key_of_file = self._load(file)
            if isinstance(key_of_file, paramiko.PKey):
                key_of_file.public_blob = None
                yield key_of_file

    def _held(self, hop: Hop, known: list[Certificate]) -> list[paramiko.AgentKey]:
        """The agent's keys that may be used for ``hop``, those of its configuration first."""
        if self._agent is None:
            self._agent = paramiko.Agent()
        meant = {_public(file) for file in hop.identity_files} | {certificate.key for certificate in known}
        keys = sorted(self._agent.get_keys(), key=lambda key: key.asbytes() not in meant)
        return [key for key in keys if key.asbytes() in meant or not hop.identities_only]

    def _load(self, file: str) -> paramiko.PKey | str:
        """The key in ``file``, or why it cannot be used. A passphrase is asked for once."""
        if file not in self._loaded:
            self._loaded[file] = self._read(file)
        return self._loaded[file]

    def _read(self, file: str) -> paramiko.PKey | str:
        try:
            return paramiko.PKey.from_path(file)
        except TypeError:  # how cryptography says that it is encrypted
            passphrase = self._prompt(f"Passphrase for {file}: ")
        except (OSError, ValueError, paramiko.SSHException) as error:
            return f"{file} cannot be read: {error}"
        if passphrase is None:
            return f"{file} is encrypted, and there is no terminal to ask for its passphrase"
        try:
            secret: Any = passphrase.encode()
            return paramiko.PKey.from_path(file, secret)
        except (OSError, ValueError, paramiko.SSHException):
            return f"that is not the passphrase of {file}"

    def _refusal(self, hop: Hop, tried: int) -> HostError:
        """Why nothing helped, with the likeliest cause first."""
        over = expired(hop)
        if over:
            return over
        where, known = _where(hop), certificates(hop)
        unusable = [problem for problem in self._loaded.values() if isinstance(problem, str)]
        if unusable:
            return HostError(unusable[0], where=where, remedy="ssh-add it first, and its passphrase is asked for once")
        if not tried:
            return HostError("there is no key to log in with", where=where,
                             remedy="run `clifton auth`, or name a key in your ssh configuration")
        return HostError(f"none of {tried} keys and certificates is accepted", where=where,
                         remedy=RENEW if known else f"see what `ssh -v {hop.alias}` says")


def _certified(key: Any, certificate: Certificate) -> paramiko.PKey:
    key.public_blob = PublicBlob.from_file(certificate.file)
    result: paramiko.PKey = key
    return result


def _public(file: str) -> bytes | None:
    """The public key beside the private key ``file``, as SSH sends it."""
    try:
        return base64.b64decode(Path(f"{file}.pub").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
