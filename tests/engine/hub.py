"""A stand-in for the hub on loopback: a model's files over the paths that the hub's own client asks for."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Serves ``files`` of the model ``name``.

    ``cuts`` says how many bytes of a file are sent before the connection is cut, once for each number; ``token`` is
    demanded if there is one. ``got`` are the files that were asked for, with the range.
    """

    name: str
    files: Mapping[str, bytes]
    token: str | None = None
    cuts: dict[str, list[int]] = field(default_factory=dict)
    got: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""

    @contextmanager
    def serving(self) -> Iterator[Hub]:
        """Listen on a free port."""
        handler = type("Handler", (_Handler,), {"hub": self})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def etag(self, name: str) -> str:
        """What names the content of a file: as the hub does it for large files."""
        return hashlib.sha256(self.files[name]).hexdigest()

    def info(self) -> dict[str, Any]:
        """What the hub says of the model."""
        siblings = [{"rfilename": name, "size": len(data), "blobId": self.etag(name)[:40],
                     "lfs": {"sha256": self.etag(name), "size": len(data), "pointerSize": 134}}
                    for name, data in self.files.items()]
        return {"id": self.name, "modelId": self.name, "sha": COMMIT, "private": False, "tags": [], "downloads": 0,
                "likes": 0, "siblings": siblings}

    def tree(self) -> list[dict[str, Any]]:
        """The model's files, as the hub lists them."""
        return [{"type": "file", "path": name, "size": len(data), "oid": self.etag(name)[:40],
                 "lfs": {"oid": self.etag(name), "size": len(data), "pointerSize": 134}}
                for name, data in self.files.items()]


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub = self.hub
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._send(401, b"{}", {"X-Error-Code": "GatedRepo"}, body=body)
            return
        asked = re.match(rf"/api/models/{re.escape(hub.name)}/(tree|revision)/", self.path)
        if asked:
            said = hub.tree() if asked[1] == "tree" else hub.info()
            self._send(200, json.dumps(said).encode(), {"Content-Type": "application/json"}, body=body)
            return
        asked = re.fullmatch(rf"/{re.escape(hub.name)}/resolve/[^/]+/(.+)", self.path.split("?")[0])
        if asked is None or asked[1] not in hub.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body=body)
            return
        self._file(asked[1], body=body)

    def _file(self, name: str, *, body: bool) -> None:
        data, wanted = self.hub.files[name], self.headers.get("Range")
        first = int(re.findall(r"\d+", wanted)[0]) if wanted else 0
        headers = {"ETag": f'"{self.hub.etag(name)}"', "X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(data)),
                   "X-Linked-Etag": f'"{self.hub.etag(name)}"'}
        if wanted:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        if body:
            self.hub.got.append((name, wanted))
        cuts = self.hub.cuts.get(name, []) if body else []
        self._send(206 if wanted else 200, data[first:], headers, body=body, cut=cuts.pop(0) if cuts else None)

    def _send(self, status: int, data: bytes, headers: Mapping[str, str], *, body: bool,
              cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data[:cut])
        if cut is not None:
            self.close_connection = True
