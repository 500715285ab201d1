"""What a registry says of an image: the digest of a reference, for one platform.

The OCI distribution specification (https://github.com/opencontainers/distribution-spec), and the bearer tokens that
registries hand out to anybody for public images.
"""

from __future__ import annotations

import hashlib
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from isambard_serve import image
from isambard_serve.errors import HostError, UsageError

TIMEOUT_S = 30.0

_HOSTS = {"docker.io": "registry-1.docker.io"}
"""Where a registry answers, if not under its name."""

_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")


def digest(reference: str, platform: str) -> str:
    """The digest of the image ``reference`` for ``platform`` (``linux/arm64``).

    Raises:
        UsageError: there is no such image, or none for that platform.
        HostError: the registry cannot be reached, or refuses.
    """
    host, repository, tag = image.parts(reference)
    registry = _Registry(_HOSTS.get(host, host), repository, reference)
    kind, body = registry.get(f"manifests/{tag}", _INDEXES + _MANIFESTS)
    described = json.loads(body)
    if kind in _INDEXES:
        offered = {_platform(each.get("platform", {})): str(each["digest"]) for each in described["manifests"]}
    else:
        _, config = registry.get(f"blobs/{described['config']['digest']}", ("*/*",))
        offered = {_platform(json.loads(config)): f"sha256:{hashlib.sha256(body).hexdigest()}"}
    if platform not in offered:
        there = ", ".join(sorted(name for name in offered if "unknown" not in name))
        raise UsageError(f"is not made for {platform}, but for {there or 'nothing that we know'}", where=reference)
    return offered[platform]


def _platform(described: dict[str, Any]) -> str:
    return f"{described.get('os', 'unknown')}/{described.get('architecture', 'unknown')}"


class _Registry:
    """One repository of one registry."""

    def __init__(self, host: str, repository: str, reference: str) -> None:
        # As docker does it: only a registry on this machine may go without TLS.
        scheme = "http" if host.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
        self._base = f"{scheme}://{host}/v2/{repository}"
        self._reference = reference
        self._token: str | None = None

    def get(self, path: str, accepted: tuple[str, ...]) -> tuple[str, bytes]:
        """The media type and the content of ``path``."""
        try:
            return self._ask(path, accepted)
        except urllib.error.HTTPError as error:
            challenge = error.headers.get("WWW-Authenticate", "")
            if error.code != 401 or self._token or not challenge.startswith("Bearer "):
                raise self._refused(error) from error
        self._token = self._granted(challenge)
        try:
            return self._ask(path, accepted)
        except urllib.error.HTTPError as error:
            raise self._refused(error) from error

    def _ask(self, path: str, accepted: tuple[str, ...]) -> tuple[str, bytes]:
        request = urllib.request.Request(f"{self._base}/{path}", headers={"Accept": ", ".join(accepted)})
        if self._token:
            # Not for where the registry sends us to: stores of blobs refuse a request with two ways to sign in.
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        return self._open(request)

    def _granted(self, challenge: str) -> str:
        """The token that a registry's ``challenge`` says how to get."""
        fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
        query = urllib.parse.urlencode({key: fields[key] for key in ("service", "scope") if key in fields})
        try:
            if not fields["realm"].startswith(("https://", "http://127.0.0.1", "http://localhost")):
                raise ValueError("a realm that is no address")
            answer = json.loads(self._open(urllib.request.Request(f"{fields['realm']}?{query}"))[1])
            return str(answer.get("token") or answer["access_token"])
        except urllib.error.HTTPError as error:
            raise self._refused(error) from error
        except (KeyError, ValueError) as error:
            raise HostError(f"the registry gives no token: {challenge}", where=self._reference) from error

    def _open(self, request: urllib.request.Request) -> tuple[str, bytes]:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return answer.headers.get_content_type(), answer.read()
        except urllib.error.HTTPError:
            raise
        except OSError as error:
            raise HostError(f"{request.host} cannot be reached: {error}", where=self._reference,
                            remedy="is there a network here? A proxy goes into https_proxy") from error

    def _refused(self, error: urllib.error.HTTPError) -> Exception:
        error.close()
        if error.code == 404:
            return UsageError("the registry has no such image", where=self._reference)
        return HostError(f"the registry answers {error.code} {error.reason}", where=self._reference)
