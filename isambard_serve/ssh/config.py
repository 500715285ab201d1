"""What ``ssh -G`` says of a host, and of the hosts on the way to it. Pure: the asking is done by a function given.

``ssh -G`` leaves the tokens of ``ProxyJump`` and ``ProxyCommand`` as they stand and does not say how a jump host is
to be reached. Both are worked out here as OpenSSH does (ssh_config(5), TOKENS; ``parse_jump`` in its readconf.c).
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from isambard_serve.errors import UsageError
from isambard_serve.records import Record

MAX_HOPS = 8
"""More jump hosts than anybody has: a configuration that leads back to itself."""

_ONLY_OPENSSH = ("revokedhostkeys", "knownhostscommand", "pkcs11provider", "identityagent")
"""Settings that OpenSSH alone heeds."""

Ask = Callable[[Sequence[str]], str]
"""What ``ssh -G`` answers to these arguments."""


class Hop(Record, frozen=True):
    """One SSH server on the way, as ``ssh -G`` resolves it.

    ``certificate_files`` are those that the configuration names; more may lie beside the keys. ``only_openssh`` names
    the settings that paramiko cannot heed; ``ciphers`` are those that may be used, in order of preference.
    """

    alias: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[str, ...] = ()
    certificate_files: tuple[str, ...] = ()
    identities_only: bool = False
    known_hosts: tuple[str, ...] = ()
    host_key_alias: str | None = None
    proxy_jump: str | None = None
    proxy_command: str | None = None
    connect_timeout_s: float = 15.0
    only_openssh: tuple[str, ...] = ()
    ciphers: tuple[str, ...] = ()

    @property
    def quick_ciphers(self) -> tuple[str, ...]:
        """The ciphers that the configuration allows, AES-GCM first: quickest with a processor's AES instructions."""
        return tuple(sorted(self.ciphers, key=lambda name: "-gcm" not in name))

    @property
    def host_key_name(self) -> str:
        """The name that the server's key has in known_hosts."""
        if self.host_key_alias:
            return self.host_key_alias
        return self.hostname if self.port == 22 else f"[{self.hostname}]:{self.port}"


def parse(text: str, alias: str) -> Hop:
    """The answer of ``ssh -G ALIAS``."""
    said: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        said.setdefault(key.lower(), []).append(value.strip())

    def first(key: str) -> str | None:
        value = said.get(key, [""])[0]
        return value if value not in ("", "none") else None

    hop = Hop(alias=alias, hostname=first("hostname") or alias, port=int(first("port") or 22),
              user=first("user") or getpass.getuser(), host_key_alias=first("hostkeyalias"))  # what tokens stand for

    def files(key: str) -> tuple[str, ...]:
        return tuple(str(Path(expanded(value, hop)).expanduser()) for value in said.get(key, []) if value != "none")

    known_hosts = [name for key in ("userknownhostsfile", "globalknownhostsfile") for name in _paths(first(key) or "")]
    timeout = first("connecttimeout")
    return msgspec.structs.replace(
        hop,
        identity_files=files("identityfile"),
        certificate_files=files("certificatefile"),
        identities_only=first("identitiesonly") == "yes",
        known_hosts=tuple(str(Path(expanded(name, hop)).expanduser()) for name in known_hosts),
        proxy_jump=first("proxyjump"),
        proxy_command=first("proxycommand"),
        connect_timeout_s=float(timeout) if timeout and timeout.isdigit() and int(timeout) else 15.0,
        ciphers=tuple(name for name in (first("ciphers") or "").split(",") if name),
        only_openssh=tuple(key for key in _ONLY_OPENSSH if first(key) not in (None, "SSH_AUTH_SOCK")),
    )


def _paths(text: str) -> list[str]:
    """``ssh -G`` prints several paths in a line without quotes: a new one begins at ``/`` or ``~`` after a space."""
    return re.split(r" +(?=[/~])", text) if text else []


def expanded(text: str, hop: Hop) -> str:
    """``text`` with its tokens filled in.

    Raises:
        UsageError: it has a token that is not known.
    """
    values = {"%": "%", "h": hop.hostname, "n": hop.alias, "p": str(hop.port), "r": hop.user,
              "d": str(Path.home()), "u": getpass.getuser(), "k": hop.host_key_alias or hop.alias}

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise UsageError(f"the token {match[0]!r} in {text!r} is not known",
                             where=f"ssh configuration of {hop.alias}")
        return values[match[1]]

    return re.sub(r"%(.)", value, text)


def route(alias: str, ask: Ask) -> list[Hop]:
    """The servers on the way to ``alias``, in the order in which they are reached; the last one is ``alias`` itself.

    Raises:
        UsageError: the configuration cannot be used.
    """
    if not alias or alias.startswith("-") or re.search(r"\s", alias):
        raise UsageError(f"{alias!r} is no name of a host", where="--host")
    target = parse(ask(["--", alias]), alias)
    return [*_before(target, target.proxy_jump, ask, 1), target]


def _before(hop: Hop, jumps: str | None, ask: Ask, depth: int) -> list[Hop]:
    """The servers before ``hop``: those of ``jumps`` in order, the last of which connects to it."""
    if not jumps:
        return []
    if depth > MAX_HOPS:
        raise UsageError("ProxyJump leads back to itself", where=f"ssh configuration of {hop.alias}")
    *earlier, last = expanded(jumps, hop).split(",")
    user, host, port = _destination(last, hop)
    options = [*(["-l", user] if user else []), *(["-p", port] if port else [])]
    jump = parse(ask([*options, "--", host]), host)
    # As OpenSSH does: a list's own order holds, whatever the configuration says of its last host.
    return [*_before(jump, ",".join(earlier) or jump.proxy_jump, ask, depth + 1), jump]


def _destination(word: str, hop: Hop) -> tuple[str, str, str]:
    """User, host and port of ``[user@]host[:port]``, or of the ssh:// form of it."""
    match = re.fullmatch(r"(?:ssh://)?(?:(.*)@)?(?:\[(.+)\]|([^:]+))(?::(\d+))?/?", word.strip())
    if not match:
        raise UsageError(f"ProxyJump {word!r} cannot be understood", where=f"ssh configuration of {hop.alias}")
    return match[1] or "", match[2] or match[3], match[4] or ""
