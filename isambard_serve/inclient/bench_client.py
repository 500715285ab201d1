"""The load generator, kept alive: it measures one point after another with the engine's own benchmark.

``vllm bench serve`` imports for about 8 s before each point, while four GPUs wait. This imports once. It stands
alone, so that it runs wherever vLLM does::

    python3 bench_client.py MODULE

``MODULE`` has ``add_cli_args(parser)`` and ``async main_async(args)``, as ``vllm.benchmarks.serve`` has them.
Requests come in and answers go out as lines of JSON:

    → {"words": [what stands after `vllm bench serve`], "log": "PATH", "metrics": "URL"}
    → {"stop": true}                               ends the point that runs; none is no error
    ← {"ready": true} or {"unfit": "why"}          once, before anything else
    ← {"returncode": 0, "loop_lag_p99_ms": 0.4, …} after each point; a stopped one has returncode null

All else that is printed during a point goes to its log. When its input ends, so does this: nobody is there any more.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import contextlib
import http.client
import importlib
import json
import math
import os
import queue
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

TICK_S = 0.01
"""How often the event loop's lag is looked at: finer than most gaps between tokens, and cheap."""

RESOLUTION_S = 0.001
"""How much later a loop on epoll may wake without being late: it waits for whole milliseconds, rounded up."""

METRICS_S = 5.0
"""How long the engine may take to tell its counters."""

Benchmark = Callable[[argparse.Namespace], Awaitable[Any]]


class Requests:
    """What is asked for, and whether the point that runs shall end. A thread listens while the event loop is busy."""

    def __init__(self) -> None:
        self._points: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._stopped = False
        self._cancel: Callable[[], object] | None = None

    def listen(self) -> None:
        """Takes requests until the input ends, and then ends the process."""
        for line in sys.stdin:
            message = json.loads(line)
            if not message.get("stop"):
                self._stopped = False
                self._points.put(message)
                continue
            self._stopped = True
            cancel = self._cancel
            if cancel:
                with contextlib.suppress(RuntimeError):  # its loop has closed: the point has just ended
                    cancel()
        os._exit(0)  # at once, whatever is on its way: the engine sees the connections close

    def next(self) -> dict[str, Any]:
        """The next point, once there is one."""
        return self._points.get()

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Lets a request to stop cancel the current task, also one that came before."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None  # noqa: S101 - this runs inside one
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            if self._stopped:
                raise asyncio.CancelledError
            yield
        finally:
            self._cancel = None


class Pulse:
    """How late the event loop wakes, and how much CPU time the process takes: whether the client is the bottleneck."""

    def __init__(self) -> None:
        self._at = array.array("d")
        self._late = array.array("d")
        self._cpu = array.array("d")

    async def beat(self) -> None:
        """Looks until it is cancelled."""
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            self._at.append(now)
            self._late.append(max(0.0, now - due - RESOLUTION_S))
            self._cpu.append(time.process_time())

    def facts(self, duration_s: float) -> dict[str, float | None]:
        """The share of one core, and the 99th percentile of the lag, over the last ``duration_s``; None if unknown.

        The benchmark makes its prompts before its window, and adds up after it without letting the event loop run:
        the last look is at the window's end.
        """
        end = self._at[-1] if self._at else 0.0
        first = next((index for index, at in enumerate(self._at) if at >= end - duration_s), 0)
        late = sorted(self._late[first:])
        if len(late) < 2:
            return {"cpu_share": None, "loop_lag_p99_ms": None}
        return {"cpu_share": (self._cpu[-1] - self._cpu[first]) / (end - self._at[first]),
                "loop_lag_p99_ms": 1000 * late[math.ceil(0.99 * len(late)) - 1]}


async def watched(work: Awaitable[Any], requests: Requests) -> dict[str, float | None]:
    """Waits for the benchmark's ``work``, which may be stopped, and says how the client fared meanwhile."""
    with requests.stoppable():
        pulse = Pulse()
        beat = asyncio.create_task(pulse.beat())
        try:
            result = await work
        finally:
            beat.cancel()
    duration_s = result.get("duration") if isinstance(result, dict) else None
    return pulse.facts(duration_s or math.inf)


def measure(request: dict[str, Any], requests: Requests, parser: argparse.ArgumentParser,
            main_async: Benchmark) -> dict[str, Any]:
    """Measures one point and returns the answer."""
    answer: dict[str, Any] = {"returncode": 1, "cpu_share": None, "loop_lag_p99_ms": None}
    with output_to(request["log"]):
        answer["before"] = metrics(request["metrics"])
        try:
            answer |= asyncio.run(watched(main_async(parser.parse_args(request["words"])), requests))
            answer["returncode"] = 0
        except asyncio.CancelledError:
            answer["returncode"] = None
        except SystemExit as end:  # the parser's
            answer["returncode"] = end.code
        except Exception:  # noqa: BLE001 - whatever it is, the log has it
            traceback.print_exc()
        answer["after"] = metrics(request["metrics"])
    return answer


def metrics(url: str) -> dict[str, Any] | None:
    """The engine's metrics without their histograms, and when they were read; None if it does not tell."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    key = os.environ.get("OPENAI_API_KEY", "")
    began = time.monotonic()
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
        with opener.open(request, timeout=METRICS_S) as reply:
            text = reply.read().decode()
    except (OSError, ValueError, http.client.HTTPException):
        return None
    lines = [line for line in text.splitlines(keepends=True)
             if line.startswith(("vllm:", "sim:")) and "_bucket{" not in line]
    return {"time": time.time(), "scrape_ms": (time.monotonic() - began) * 1000, "text": "".join(lines)}


@contextlib.contextmanager
def output_to(path: str) -> Iterator[None]:
    """Appends to ``path`` everything that any part of the process prints."""
    kept = [(number, os.dup(number)) for number in (1, 2)]
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for number, _ in kept:
            os.dup2(log, number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.close(log)
        for number, before in kept:
            os.dup2(before, number)
            os.close(before)


def load(name: str) -> tuple[argparse.ArgumentParser, Benchmark]:
    """The parser of the benchmark's command line and the function that measures, of the module ``name``.

    Raises:
        Exception: this version has no such thing, or not in this environment.
    """
    module = importlib.import_module(name)
    if name.startswith("vllm."):
        if getattr(importlib.import_module("vllm.envs"), "VLLM_USE_RUST_BENCH", False):
            raise NotImplementedError("VLLM_USE_RUST_BENCH asks for another benchmark")
        platforms: Any = importlib.import_module("vllm.platforms")
        if platforms.current_platform.is_unspecified():
            # As the command does it: a load generator needs no GPU, and may see none.
            platforms.current_platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform()
    parser: argparse.ArgumentParser = getattr(module, "FlexibleArgumentParser", argparse.ArgumentParser)()
    module.add_cli_args(parser)
    return parser, module.main_async


def main(name: str) -> None:
    """Measures with the module ``name`` until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing that is printed gets between the answers
    requests = Requests()
    threading.Thread(target=requests.listen, daemon=True).start()
    try:
        parser, main_async = load(name)
    except Exception as error:  # noqa: BLE001 - each version may fail in a way of its own
        traceback.print_exc()
        answers.write(json.dumps({"unfit": f"{type(error).__name__}: {error}"}) + "\n")
        return
    answers.write(json.dumps({"ready": True}) + "\n")
    while True:
        answers.write(json.dumps(measure(requests.next(), requests, parser, main_async)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
