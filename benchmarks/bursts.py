"""How late the load generator is where all its streams get their tokens at once, and what that does to its figures.

    python -m benchmarks.bursts [STREAMS...]      # 256, 1024 and 2048 unless given: some minutes

Ranks that decode in step send a token of every sequence at the same moment. A server that does nothing else sends one
to each stream every 150 ms; vLLM's own benchmark (its CPU build's) reads them. Printed are the client's share of a
core, how late its event loop was, and the TPOT that it read beside the true one.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from isambard_serve.prepare import free_port
from tests.engine import environment, make_tiny_model

CLIENT = Path(__file__).parents[1] / "isambard_serve" / "inclient" / "bench_client.py"
STEP_S = 0.15
OSL = 60


def _chunk(content: object) -> bytes:
    """One event, as a chunk of HTTP."""
    text = content if isinstance(content, str) else json.dumps(content)
    body = f"data: {text}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(body), body)


TOKEN = _chunk({"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [
    {"index": 0, "text": " w7", "logprobs": None, "finish_reason": None}]})
END = _chunk({"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [],
              "usage": {"prompt_tokens": 16, "total_tokens": 16 + OSL, "completion_tokens": OSL}}
             ) + _chunk("[DONE]") + b"0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def serve(port: int) -> None:
    """Answers completions, one token to all of them at each step, until it is ended."""
    left: dict[asyncio.StreamWriter, int] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                lengths = [int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length:")]
                await reader.readexactly(sum(lengths))
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            if head.startswith("post"):
                writer.write(HEAD)
                left[writer] = OSL
            else:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    await asyncio.start_server(answer, "127.0.0.1", port, backlog=4096)
    due = asyncio.get_running_loop().time()
    while True:
        due += STEP_S
        await asyncio.sleep(due - asyncio.get_running_loop().time())
        for writer in list(left):
            left[writer] -= 1
            writer.write(TOKEN if left[writer] else TOKEN + END)
            if not left[writer]:
                del left[writer]


def measure(python: Path, streams: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the client says of itself, and the benchmark's result."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ["--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model",
             str(make_tiny_model.FOLDER), "--dataset-name", "random", "--random-input-len", "16", "--random-output-len",
             str(OSL), "--ignore-eos", "--num-prompts", str(2 * streams), "--max-concurrency", str(streams),
             "--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--result-dir", str(folder),
             "--result-filename", f"{streams}.json"]
    server = subprocess.Popen([sys.executable, "-m", "benchmarks.bursts", "--serve", str(port)])
    try:
        with subprocess.Popen([python, CLIENT, "vllm.benchmarks.serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True,
                              env=os.environ | {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"}) as client:
            assert client.stdin is not None  # noqa: S101 - they are pipes
            assert client.stdout is not None  # noqa: S101
            client.stdout.readline()    # it is ready
            client.stdin.write(json.dumps({"words": words, "log": str(folder / "log"), "metrics": f"{url}/m"}) + "\n")
            client.stdin.flush()
            said = json.loads(client.stdout.readline())
            client.stdin.close()
    finally:
        server.kill()
        server.wait()
    return said, json.loads((folder / f"{streams}.json").read_text())


def main() -> None:
    """Measures and prints a table."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    python = environment.ensure() / "bin" / "python"
    print("streams  a core  late (p99)  of a step  of a request  TPOT over the true one")
    with tempfile.TemporaryDirectory() as folder:
        for streams in map(int, sys.argv[1:] or ("256", "1024", "2048")):
            said, result = measure(python, streams, Path(folder))
            late_ms = said["loop_lag_p99_ms"]
            print(f"{streams:7} {said['cpu_share']:7.0%} {late_ms:8.1f} ms {late_ms / STEP_S / 1000:10.0%} "
                  f"{late_ms / result['median_e2el_ms']:13.2%} {result['median_tpot_ms'] / STEP_S / 1000:15.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        asyncio.run(serve(int(sys.argv[2])))
    else:
        main()
