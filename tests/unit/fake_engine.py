"""An engine that is none: an HTTP server on the loopback interface that answers as told.

By itself (``python fake_engine.py PORT``) it is a process that serves until it is ended.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from types import TracebackType
from typing import Any, ClassVar

METRICS = 'vllm:request_success_total{engine="0"} 1\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'


class FakeEngine:
    """Serves from the moment that it is entered until it is left.

    Args:
        health: the status of ``/health``; the others have ``status``.
        completion: the body that answers a completion.
        hang: accept connections and never answer.
        garbage: answer with something that is no HTTP.
    """

    def __init__(self, *, port: int = 0, health: int = 200, status: int = 200, metrics: str = METRICS,
                 completion: bytes = b'{"choices": [{"index": 0, "text": "x"}]}', hang: bool = False,
                 garbage: bool = False) -> None:
        self.health = health
        self.status = status
        self.metrics = metrics
        self.completion = completion
        self.hang = hang
        self.garbage = garbage
        self.asked: list[tuple[str, str | None, Any]] = []
        self.go_on = threading.Event()
        self._server = _Server(self, port)

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._server.server_address[1]
        return port

    def client(self, key: str = "key") -> Any:
        """A client of this engine."""
        from isambard_serve.engine import EngineClient

        return EngineClient(f"http://127.0.0.1:{self.port}", key)

    def serve(self) -> None:
        """Serve until the process ends."""
        self._server.serve_forever()

    def __enter__(self) -> FakeEngine:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, engine: FakeEngine, port: int) -> None:
        self.engine = engine
        super().__init__(("127.0.0.1", port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking any name server who 127.0.0.1 is."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]


class _Handler(BaseHTTPRequestHandler):
    answers: ClassVar[dict[str, str]] = {
        "/health": "health", "/v1/completions": "status", "/metrics": "status", "/start_profile": "status",
        "/stop_profile": "status"}

    def do_GET(self) -> None:
        """Answer ``/health`` and ``/metrics``."""
        self._answer(None)

    def do_POST(self) -> None:
        """Answer a completion."""
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        assert isinstance(self.server, _Server)
        engine = self.server.engine
        engine.asked.append((self.path, self.headers["Authorization"], body))
        if engine.hang:
            engine.go_on.wait()
            return
        if engine.garbage:
            self.wfile.write(b"\x00\x01 nonsense\r\n\r\n")
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        content = {"/v1/completions": engine.completion, "/metrics": engine.metrics.encode()}.get(self.path, b"")
        self.send_response(getattr(engine, self.answers[self.path]))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the parent's name
        """Print nothing."""


if __name__ == "__main__":
    FakeEngine(port=int(sys.argv[1])).serve()
