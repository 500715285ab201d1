"""The tiny model: its files, its words, and the real engine serving it."""

import json
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen

from tests.engine import make_tiny_model
from tests.support.processes import stop
from tests.support.waiting import wait_until

MODEL = make_tiny_model.FOLDER
ROUND_TRIP = """
import random, sys
from tokenizers import Tokenizer
words, size = Tokenizer.from_file(sys.argv[1]), int(sys.argv[2])
assert sorted(words.get_vocab().values()) == list(range(size))
assert words.encode("w1 w2").ids == [1, 2]
for length in range(300):
    tokens = random.choices(range(size), k=length)
    assert words.encode(words.decode(tokens, skip_special_tokens=False)).ids == tokens, tokens
"""


def test_the_files_are_what_the_generator_makes() -> None:
    assert {path.name: path.read_text() for path in MODEL.iterdir()} == make_tiny_model.files()


def test_any_tokens_survive_decoding_and_encoding(engine_venv: Path) -> None:
    tokenizer, size = MODEL / "tokenizer.json", str(make_tiny_model.VOCABULARY)
    subprocess.run([engine_venv / "bin/python", "-c", ROUND_TRIP, tokenizer, size], check=True, timeout=60)


def test_the_engine_serves_it_and_the_benchmark_counts_every_token(engine_venv: Path, tmp_path: Path) -> None:
    key = secrets.token_hex()
    with _serving(engine_venv, tmp_path, key) as url:
        answer = _complete(url, key, "nothing that it knows")
        assert answer["usage"] == answer["usage"] | {"prompt_tokens": 4, "completion_tokens": 3}
        result = _bench(engine_venv, tmp_path, key, url, prompts=8)
    assert (result["completed"], result["failed"]) == (8, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (8 * 64, 8 * 64)


@contextmanager
def _serving(venv: Path, folder: Path, key: str) -> Iterator[str]:
    """Run `vllm serve` on the model, writing nowhere but in `folder`; give its URL once it is ready."""
    port, log = _free_port(), folder / "serve.log"
    command = [str(venv / "bin/vllm"), "serve", str(MODEL), "--served-model-name", "tiny"]
    options = ["--load-format", "dummy", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]
    environment = _environment(folder) | {"VLLM_API_KEY": key, "VLLM_CPU_KVCACHE_SPACE": "1"}
    # The engine leaves its sockets behind, and their names must be short: `folder` would be too deep.
    with log.open("w") as output, TemporaryDirectory() as scratch:
        environment["TMPDIR"] = scratch
        server = subprocess.Popen(
            [*command, *options], env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: _healthy(server, url, log), 300, "vllm serve to be healthy", interval_s=0.2)
            yield url
        finally:
            stop(server, grace_s=30)
            wait_until(lambda: _group_is_gone(server.pid), 30, "the engine's processes to die")


def _bench(venv: Path, folder: Path, key: str, url: str, *, prompts: int) -> dict[str, Any]:
    """Run `vllm bench serve` with 64 tokens in, 64 out and 4 requests at a time; give what it saved."""
    what = ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "64"]
    how = ["--num-prompts", str(prompts), "--max-concurrency", "4", "--temperature", "0", "--ignore-eos"]
    where = ["--base-url", url, "--model", "tiny", "--tokenizer", str(MODEL)]
    save = ["--save-result", "--result-dir", str(folder), "--result-filename", "bench.json"]
    environment = _environment(folder) | {"OPENAI_API_KEY": key}
    command = [str(venv / "bin/vllm"), "bench", "serve", *where, *what, *how, *save]
    subprocess.run(command, env=environment, check=True, timeout=300)
    result: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    return result


def _complete(url: str, key: str, prompt: str) -> dict[str, Any]:
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 3, "ignore_eos": True}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{url}/v1/completions", body, headers), timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def _environment(folder: Path) -> dict[str, str]:
    inside = {"HOME": str(folder), "TMPDIR": str(folder)}
    return os.environ | inside | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def _healthy(server: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    assert server.poll() is None, f"vllm serve ended with {server.returncode}:\n{log.read_text()[-5000:]}"
    with suppress(OSError), urlopen(f"{url}/health", timeout=10) as response:
        return bool(response.status == 200)
    return False


def _group_is_gone(group: int) -> bool:
    """Kill what is left of a process group; the engine's children outlive a killed parent."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return True
    return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
