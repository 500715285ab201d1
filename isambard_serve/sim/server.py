"""The simulated engine over HTTP, at vLLM's endpoints and two private ones for the simulated client."""

from __future__ import annotations

import contextlib
import http.client
import json
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import msgspec

from isambard_serve.sim import words
from isambard_serve.sim.driver import Driver
from isambard_serve.sim.load import Load
from isambard_serve.sim.log import Log
from isambard_serve.sim.profiler import Profiler
from isambard_serve.sim.settings import VERSION, Settings

GUARDED = ("/v1", "/v2", "/inference", "/cohere", "/sim")
"""Where the API key is demanded: vLLM's own list and the simulation's private endpoints."""

_POLL_S = 0.02
"""How long :meth:`SimServer.stop` may have to wait, in seconds."""


class SimServer(ThreadingHTTPServer):
    """Listens from its creation on (port 0: any free one). ``log`` gets an access line for each request."""

    daemon_threads = True
    request_queue_size = 4096

    def __init__(self, settings: Settings, log: Log, die: Callable[[int], None]) -> None:
        self.settings = settings
        self.log = log
        self.driver = Driver(settings, log, die)
        gpus = settings.shape.gpus
        self.profiler = Profiler(settings.profiles, gpus) if settings.profiles else None
        super().__init__((settings.host, settings.port), _Handler)
        self.url = f"http://{settings.host}:{self.server_address[1]}"

    def start(self) -> None:
        """Begins to answer, in threads of its own."""
        threading.Thread(target=self.driver.run, daemon=True).start()
        threading.Thread(target=self.serve_forever, args=(_POLL_S,), daemon=True).start()

    def stop(self) -> None:
        """Ends what :meth:`start` began."""
        self.driver.stop()
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Binds without asking the name service who we are, as the base class does: that can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.settings.host, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: SimServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_version = "isambard-serve-sim"

    def do_GET(self) -> None:
        self._answer(self.GETS)

    def do_POST(self) -> None:
        self._answer(self.POSTS)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        self.server.log.plain(f'INFO:     {self.client_address[0]}:{self.client_address[1]} - {format % args}')

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:  # noqa: ARG002
        reason = http.client.responses.get(int(code), "")
        self.log_message('"%s" %s %s', self.requestline, int(code), reason)

    def _answer(self, routes: Mapping[str, Callable[[_Handler, Any], None]]) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        try:
            key = self.server.settings.api_key
            guarded = path != "/health" if self.server.settings.guarded else path.startswith(GUARDED)
            if key and guarded and self.headers.get("Authorization") != f"Bearer {key}":
                self._json({"error": "Unauthorized"}, 401)
                return
            if path not in routes:
                raise _RefusedError(404, "Not Found")
            try:
                body = json.loads(raw) if raw else {}
            except ValueError:
                raise _RefusedError(400, "the body is no JSON") from None
            try:
                routes[path](self, body)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise _RefusedError(400, f"the body is not as it should be: {error}") from error
        except _RefusedError as error:
            self._json({"error": {"message": str(error), "code": error.status}}, error.status)

    def _send(self, content: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _json(self, content: Any, status: int = 200) -> None:
        self._send(json.dumps(content).encode(), "application/json", status)

    def _stream(self, kind: str, pieces: Generator[bytes]) -> None:
        """Sends pieces as they come; if the client goes away, ``pieces`` is closed."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for piece in pieces:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
        finally:
            pieces.close()

    def _health(self, _: Any) -> None:
        self._send(b"", "text/plain")

    def _metrics(self, _: Any) -> None:
        self._send(self.server.driver.metrics().encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _version(self, _: Any) -> None:
        self._json({"version": VERSION, "simulated": True, "time_scale": self.server.settings.time_scale})

    def _load(self, _: Any) -> None:
        self._json({"server_load": self.server.driver.in_flight()})

    def _models(self, _: Any) -> None:
        settings = self.server.settings
        self._json({"object": "list", "data": [
            {"id": settings.served_name, "object": "model", "created": int(time.time()), "owned_by": "vllm",
             "root": settings.model, "parent": None, "max_model_len": settings.max_model_len, "permission": []}]})

    def _tokenize(self, body: Any) -> None:
        count = prompt_length(body.get("prompt", ""))
        self._json({"count": count, "max_model_len": self.server.settings.max_model_len, "tokens": [1] * count,
                    "token_strs": None})

    def _completions(self, body: Any) -> None:
        driver = self.server.driver
        prompt = body["prompt"]
        if isinstance(prompt, list) and not all(isinstance(part, int) for part in prompt):
            self._several(body, prompt)
            return
        length, wanted = prompt_length(prompt), int(body.get("max_tokens") or 16)
        self._accept(body.get("model"), length, wanted)
        if driver.refuses():
            raise _RefusedError(500, "Internal Server Error")
        time.sleep(self.server.settings.faults.hidden_queue)
        answer = driver.answer(length, wanted, prompt if isinstance(prompt, str) else tuple(prompt))
        if body.get("stream"):
            include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            self._stream("text/event-stream", self._events(answer, length, wanted, include_usage))
        else:
            made = sum(answer)
            self._json(self._completion(made, driver.given(wanted)[1]) | {"usage": _usage(length, made)})

    def _several(self, body: Any, prompts: Sequence[Any]) -> None:
        """Answers several prompts at once, in words."""
        settings, wanted = self.server.settings, int(body.get("max_tokens") or 16)
        for prompt in prompts:
            self._accept(body.get("model"), prompt_length(prompt), wanted)

        def made(prompt: Any) -> dict[str, Any]:
            count = sum(self.server.driver.answer(prompt_length(prompt), wanted, str(prompt)))
            text, tokens = words.answer(prompt, count, settings.shape.moe_backend, settings.faults.broken_output)
            return {"text": text, "finish_reason": "length"} | (
                {"token_ids": tokens} if body.get("return_token_ids") else {})

        with ThreadPoolExecutor(len(prompts)) as pool:
            choices = [{"index": index, **choice} for index, choice in enumerate(pool.map(made, prompts))]
        self._json(self._completion(0, None) | {"choices": choices})

    def _events(self, answer: Generator[int], length: int, wanted: int, include_usage: bool) -> Generator[bytes]:
        """Server-sent events: one for each token, as vLLM sends them."""
        given, reason = self.server.driver.given(wanted)
        token, last = _event(self._completion(1, None)), _event(self._completion(1, reason))
        made = 0
        with contextlib.closing(answer):
            for new in answer:
                made += new
                yield token * new if made < given else token * (new - 1) + last
        if include_usage:
            yield _event(self._completion(0, None) | {"choices": [], "usage": _usage(length, made)})
        yield b"data: [DONE]\n\n"

    def _completion(self, tokens: int, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": " x" * tokens, "logprobs": None, "finish_reason": finish_reason,
                  "stop_reason": None}
        return {"id": "cmpl-simulated", "object": "text_completion", "created": int(time.time()),
                "model": self.server.settings.served_name, "choices": [choice]}

    def _accept(self, model: Any, length: int, wanted: int) -> None:
        settings = self.server.settings
        if model != settings.served_name:
            raise _RefusedError(404, f"The model `{model}` does not exist.")
        longest = min(settings.max_model_len, settings.kv_tokens)
        if length < 1 or length + wanted > longest:
            raise _RefusedError(400, f"This model's maximum context length is {longest} tokens; {length} of input and "
                                     f"{wanted} of output were asked for.")

    def _start_profile(self, _: Any) -> None:
        self._profiler().start()
        self._send(b"", "text/plain")

    def _stop_profile(self, _: Any) -> None:
        self._profiler().stop()
        self._send(b"", "text/plain")

    def _profiler(self) -> Profiler:
        if self.server.profiler is None:
            raise _RefusedError(404, "Not Found")
        return self.server.profiler

    def _sim_point(self, body: Any) -> None:
        """A benchmark begins: answers how it shall run. One whose result is not kept (a warm-up) is no point."""
        settings = self.server.settings
        number = self.server.driver.begin_point(int(body["prompts"])) if body.get("kept", True) else None
        concurrency = max(1, int(int(body["concurrency"]) * settings.faults.slow_client))
        self._json({"point": number, "time_scale": settings.time_scale, "concurrency": concurrency,
                    "busy": settings.faults.busy_client})

    def _sim_load(self, body: Any) -> None:
        """A whole load, run in virtual time: one line of JSON for each outcome, at last one for the pace."""
        load = msgspec.convert(body, Load)
        self._accept(load.model, load.input_tokens, load.output_tokens)
        self._stream("application/jsonl", self._lines(load))

    def _lines(self, load: Load) -> Generator[bytes]:
        with contextlib.closing(self.server.driver.load(load)) as news:
            for new in news:
                records = new if isinstance(new, Sequence) else (new,)
                # An empty line now and then shows whether the client is still there.
                yield b"".join(msgspec.json.encode(record) + b"\n" for record in records) or b"\n"

    GETS: ClassVar[Mapping[str, Callable[[_Handler, Any], None]]] = {
        "/health": _health, "/ping": _health, "/metrics": _metrics, "/version": _version, "/load": _load,
        "/v1/models": _models,
    }
    POSTS: ClassVar[Mapping[str, Callable[[_Handler, Any], None]]] = {
        "/v1/completions": _completions, "/tokenize": _tokenize, "/sim/point": _sim_point, "/sim/load": _sim_load,
        "/start_profile": _start_profile, "/stop_profile": _stop_profile,
    }


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens}


def prompt_length(prompt: Any) -> int:
    """Tokens of a prompt: its words, or its ids if it is a list of them."""
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)
