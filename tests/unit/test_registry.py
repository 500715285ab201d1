"""The registry: the digest of the platform that was asked for, tokens for anybody, and refusals in words."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from isambard_serve import registry
from isambard_serve.errors import HostError, UsageError

ARM = "sha256:" + "a" * 64
AMD = "sha256:" + "b" * 64
INDEX = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [
    {"digest": AMD, "platform": {"os": "linux", "architecture": "amd64"}},
    {"digest": ARM, "platform": {"os": "linux", "architecture": "arm64"}},
    {"digest": "sha256:" + "c" * 64, "platform": {"os": "unknown", "architecture": "unknown"}}]}
CONFIG = json.dumps({"os": "linux", "architecture": "arm64"}).encode()
SINGLE = {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
          "config": {"digest": "sha256:cfg"}}


class _Registry(http.server.BaseHTTPRequestHandler):
    """Serves one repository, a/b, with an index, a single image, and a token that anybody can have."""

    guarded = False
    at = ""
    asked: list[tuple[str, str | None]] = []

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        type(self).asked.append((self.path, self.headers.get("Authorization")))
        if path == "/token":
            self._say(200, json.dumps({"token": "t0k"}).encode())
        elif path == "/elsewhere":
            self._say(400 if self.headers.get("Authorization") else 200, CONFIG)
        elif self.guarded and self.headers.get("Authorization") != "Bearer t0k":
            self._say(401, b"", {"WWW-Authenticate": f'Bearer realm="http://{self.at}/token",service="s",'
                                                     'scope="repository:a/b:pull"'})
        elif path == "/v2/a/b/manifests/index":
            self._say(200, json.dumps(INDEX).encode(), {"Content-Type": str(INDEX["mediaType"])})
        elif path == "/v2/a/b/manifests/single":
            self._say(200, json.dumps(SINGLE).encode(), {"Content-Type": str(SINGLE["mediaType"])})
        elif path == "/v2/a/b/blobs/sha256:cfg":
            self._say(307, b"", {"Location": f"http://{self.at}/elsewhere"})
        else:
            self._say(503 if path.endswith("/broken") else 404, b"")

    def _say(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def handler() -> Iterator[Any]:
    """The registry's settings; ``handler.at`` is where it listens."""
    made: Any = type("Own", (_Registry,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), made)
    made.at = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


def test_of_an_image_for_several_platforms_the_one_that_was_asked_for_is_taken(handler: Any) -> None:
    assert registry.digest(f"{handler.at}/a/b:index", "linux/arm64") == ARM
    assert registry.digest(f"{handler.at}/a/b:index", "linux/amd64") == AMD


def test_a_single_image_is_named_by_its_own_content_if_it_is_for_the_platform(handler: Any) -> None:
    own = f"sha256:{hashlib.sha256(json.dumps(SINGLE).encode()).hexdigest()}"
    assert registry.digest(f"{handler.at}/a/b:single", "linux/arm64") == own
    with pytest.raises(UsageError, match=r"b:single: is not made for linux/amd64, but for linux/arm64"):
        registry.digest(f"{handler.at}/a/b:single", "linux/amd64")


def test_an_image_that_is_not_made_for_the_platform_says_what_it_is_made_for(handler: Any) -> None:
    with pytest.raises(UsageError, match=r"is not made for linux/riscv64, but for linux/amd64, linux/arm64$"):
        registry.digest(f"{handler.at}/a/b:index", "linux/riscv64")


def test_a_token_is_fetched_where_the_registry_says_and_shown_to_nobody_else(handler: Any) -> None:
    handler.guarded = True
    registry.digest(f"{handler.at}/a/b:single", "linux/arm64")
    assert handler.asked == [
        ("/v2/a/b/manifests/single", None), ("/token?service=s&scope=repository%3Aa%2Fb%3Apull", None),
        ("/v2/a/b/manifests/single", "Bearer t0k"), ("/v2/a/b/blobs/sha256:cfg", "Bearer t0k"), ("/elsewhere", None)]


def test_an_image_that_is_not_there_is_a_usage_error(handler: Any) -> None:
    with pytest.raises(UsageError, match=r"a/b:none: the registry has no such image"):
        registry.digest(f"{handler.at}/a/b:none", "linux/arm64")


def test_a_registry_that_refuses_or_is_not_there_is_a_host_error(handler: Any) -> None:
    with pytest.raises(HostError, match="the registry answers 503"):
        registry.digest(f"{handler.at}/a/b:broken", "linux/arm64")
    with pytest.raises(HostError, match=r"cannot be reached: .*refused"):
        registry.digest("127.0.0.1:1/a/b:c", "linux/arm64")


def test_a_realm_that_is_no_address_of_the_network_is_not_opened(handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostError, match="gives no token"):
        registry._Registry("127.0.0.1:1", "a/b", "x")._granted('Bearer realm="file:///etc/passwd",service="s"')
