"""``bench serve``: the simulated load generator, with the flags and the JSON of ``vllm bench serve``.

At a time scale of 1 it sends real streaming requests, a thread for each in flight. At a higher one no client could
take all those tokens: it hands the whole load to the engine and gets each request's virtual times back. Only
``--request-rate inf`` is simulated: other rates are taken for it.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from isambard_serve.sim import report
from isambard_serve.sim.arguments import Arguments
from isambard_serve.sim.load import Load, Outcome, Pace
from isambard_serve.sim.log import BANNER

_TIMEOUT_S = 6 * 3600
"""How long a request may take: vLLM's own limit."""

_Failure = (OSError, http.client.HTTPException, ValueError, msgspec.ValidationError)


class _Target:
    """Where requests go, and how they prove who sends them."""

    def __init__(self, base_url: str, endpoint: str, key: str) -> None:
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self.endpoint = endpoint
        self.stopped = threading.Event()
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._connections: list[http.client.HTTPConnection] = []

    def connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        self._connections.append(connection)
        return connection

    def stop(self) -> None:
        """Breaks off everything; called from another thread."""
        self.stopped.set()
        for connection in tuple(self._connections):
            with contextlib.suppress(OSError):
                if connection.sock:
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def post(self, connection: http.client.HTTPConnection, path: str, body: Any) -> http.client.HTTPResponse:
        if connection.sock is None:
            connection.connect()
        if self.stopped.is_set():
            raise ConnectionAbortedError("stopped")
        connection.request("POST", path, json.dumps(body), self._headers)
        response = connection.getresponse()
        if response.status != 200:
            raise http.client.HTTPException(f"{response.status} {response.read().decode(errors='replace')}")
        return response


def bench(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Measures, writes and prints the result, and returns 0: also when every request failed, as vLLM does.

    Args:
        words: the command line after ``bench serve``.

    Raises:
        UsageError: a number that is none.
    """
    Benchmark(words, environment).run()
    return 0


class Benchmark:
    """One ``bench serve``.

    Args:
        words: the command line after ``bench serve``.

    Raises:
        UsageError: a number that is none.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        arguments = self._arguments = Arguments(words)
        prompts = arguments.whole("num-prompts", 1000)
        self._load = Load(
            prompts=prompts, concurrency=min(prompts, arguments.whole("max-concurrency", prompts)),
            input_tokens=arguments.whole("random-input-len", 1024),
            output_tokens=arguments.whole("random-output-len", 128),
            seed=arguments.whole("seed", 0), model=arguments.text("model"),
        )
        address = f"http://{arguments.text('host', '127.0.0.1')}:{arguments.whole('port', 8000)}"
        self._target = _Target(arguments.text("base-url", address), arguments.text("endpoint", "/v1/completions"),
                               environment.get("OPENAI_API_KEY", ""))

    def stop(self) -> None:
        """Breaks off :meth:`run`, which then writes no result. Called from another thread."""
        self._target.stop()

    def run(self) -> dict[str, Any]:
        """Measures, writes and prints the result, and returns it."""
        sys.stdout.write(f"{BANNER}\n")
        arguments, load = self._arguments, self._load
        asked = _asked(arguments, load)
        kept = arguments.on("save-result")
        began = time.monotonic()
        outcomes, pace, time_scale = _measure(self._target, load, kept=kept)
        duration_s = max((outcome.end_s for outcome in outcomes), default=0.0) or time.monotonic() - began
        document = report.result(
            asked, outcomes, pace, duration_s=duration_s, input_tokens=load.input_tokens, time_scale=time_scale,
            metrics=arguments.text("percentile-metrics", "ttft,tpot,itl").split(","),
            percentiles=[float(percent) for percent in arguments.text("metric-percentiles", "99").split(",")],
        )
        errors = Counter(outcome.error for outcome in outcomes if outcome.error)
        for error, count in errors.most_common(5):
            sys.stdout.write(f"{count} requests failed: {error}\n")
        sys.stdout.write(f"{report.table(document)}\n")
        if kept and not self._target.stopped.is_set():
            _save(arguments, document)
        return document


def _asked(arguments: Arguments, load: Load) -> dict[str, Any]:
    """What the result begins with."""
    backend = arguments.text("backend", "openai")
    rate = arguments.text("request-rate", "inf")
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": arguments.text("label") or None,
        "model_id": load.model,
        "tokenizer_id": arguments.text("tokenizer", load.model),
        "num_prompts": load.prompts,
        **dict(item.partition("=")[::2] for item in arguments.every("metadata")),
        "request_rate": rate if rate == "inf" else float(rate),
        "burstiness": arguments.number("burstiness", 1.0),
        "max_concurrency": arguments.whole("max-concurrency", 0) or None,
    }


def _save(arguments: Arguments, document: Mapping[str, Any]) -> None:
    folder = Path(arguments.text("result-dir", "."))
    folder.mkdir(parents=True, exist_ok=True)
    name = arguments.text("result-filename", f"openai-{document['request_rate']}qps-{document['date']}.json")
    (folder / name).write_text(json.dumps(document), encoding="utf-8")


def _measure(target: _Target, load: Load, *, kept: bool) -> tuple[list[Outcome], Pace, float]:
    """Runs the load the way that the engine's time scale asks for; returns outcomes, pace and time scale.

    Args:
        kept: whether its result is, so that it counts as a point where a fault is planted in one.
    """
    try:
        with closing(target.connect()) as connection:
            terms = json.load(target.post(connection, "/sim/point",
                                          {"prompts": load.prompts, "concurrency": load.concurrency, "kept": kept}))
        time_scale, concurrency = float(terms["time_scale"]), int(terms["concurrency"])
    except _Failure as error:
        return _missing(load, {}, error), Pace(gaps=[], peak_tok_s=0.0), 1.0
    load = msgspec.structs.replace(load, concurrency=concurrency)
    if time_scale != 1:
        return *_hand_over(target, load), time_scale
    with _busy() if terms["busy"] else contextlib.nullcontext():
        return *_stream(target, load), time_scale


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    """Keeps one core of this process busy, and its other threads waiting."""
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(1_000_000))

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _missing(load: Load, have: Mapping[int, Outcome], error: object) -> list[Outcome]:
    """What is there, and a failure with ``error`` for each prompt that nothing is known of."""
    end_s = max((outcome.end_s for outcome in have.values()), default=0.0)
    return [have.get(index) or Outcome(index=index, sent_s=end_s, first_token_s=end_s, end_s=end_s, output_tokens=0,
                                       error=str(error) or type(error).__name__)
            for index in range(load.prompts)]


def _hand_over(target: _Target, load: Load) -> tuple[list[Outcome], Pace]:
    """Has the engine run the whole load in virtual time."""
    outcomes: dict[int, Outcome] = {}
    pace = Pace(gaps=[], peak_tok_s=0.0)
    error: object = "the engine's answer ended early"
    try:
        with closing(target.connect()) as connection:
            for line in target.post(connection, "/sim/load", msgspec.to_builtins(load)):
                if b'"index"' in line:
                    outcome = msgspec.json.decode(line, type=Outcome)
                    outcomes[outcome.index] = outcome
                elif line.strip():
                    pace = msgspec.json.decode(line, type=Pace)
    except _Failure as failure:
        error = failure
    return _missing(load, outcomes, error), pace


def _stream(target: _Target, load: Load) -> tuple[list[Outcome], Pace]:
    """Sends every request by itself, ``load.concurrency`` at a time."""
    began = time.monotonic()
    indices = itertools.count()
    outcomes: list[Outcome] = []
    arrivals: list[list[float]] = []

    def work() -> None:
        connection = target.connect()
        while (index := next(indices)) < load.prompts and not target.stopped.is_set():
            sent_s = time.monotonic() - began
            came: list[float] = []
            error = None
            try:
                came += (moment - began for moment in _tokens(target, connection, load, index))
            except _Failure as failure:
                error = str(failure) or type(failure).__name__
                connection.close()
            end_s = time.monotonic() - began
            outcomes.append(Outcome(index=index, sent_s=sent_s, first_token_s=came[0] if came else end_s,
                                    end_s=came[-1] if came else end_s, output_tokens=len(came), error=error))
            arrivals.append(came)
        connection.close()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(load.concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gaps = Counter(round(later - earlier, 6) for came in arrivals for earlier, later in itertools.pairwise(came))
    per_second = Counter(int(moment) for came in arrivals for moment in came)
    return outcomes, Pace(gaps=list(gaps.items()), peak_tok_s=float(max(per_second.values(), default=0)))


def _tokens(target: _Target, connection: http.client.HTTPConnection, load: Load, index: int) -> Iterator[float]:
    """When each token of one request comes, by the monotonic clock."""
    # The engine counts words. The first differs from prompt to prompt, so that no two share a prefix.
    prompt = f"{load.seed}-{index}" + " x" * (load.input_tokens - 1)
    response = target.post(connection, target.endpoint, {
        "model": load.model, "prompt": prompt, "max_tokens": load.output_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}})
    finished = False
    for line in response:
        if line.startswith(b"data: [DONE]"):
            finished = True
        elif line.startswith(b"data: ") and b'"choices": []' not in line:
            yield time.monotonic()
    if not finished:
        raise http.client.IncompleteRead(b"")
