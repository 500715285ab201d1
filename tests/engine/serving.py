"""Serve the tiny model with the real engine, for the tests."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from isambard_serve import plan, recipe, run, site
from isambard_serve.plan import Plan
from tests.engine import make_tiny_model
from tests.support.processes import stop
from tests.support.waiting import wait_until

MODEL = make_tiny_model.FOLDER


@dataclass(frozen=True)
class Engine:
    """A served engine: where it answers, its key, its log, and the folder that it writes to."""

    url: str
    key: str
    folder: Path

    @property
    def log(self) -> str:
        """Everything logged so far."""
        return (self.folder / "serve.log").read_text()

    def ask(self, path: str, body: object = None, *, key: str | None = None, method: str | None = None,
            timeout_s: float = 60) -> tuple[int, bytes]:
        """Ask with the engine's own key, or with another ("": none); return status and content."""
        key = self.key if key is None else key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, headers | {"Content-Type": "application/json"}, method=method)
        try:
            with urlopen(request, timeout=timeout_s) as response:
                return response.status, response.read()
        except HTTPError as error:
            with error:
                return error.code, error.read()

    def complete(self, prompt: str) -> Any:
        """Have three tokens made."""
        status, answer = self.ask("/v1/completions",
                                  {"model": "tiny", "prompt": prompt, "max_tokens": 3, "ignore_eos": True})
        assert status == 200, answer
        return json.loads(answer)


@contextmanager
def serving(venv: Path, folder: Path, key: str, *options: str, **variables: str) -> Iterator[Engine]:
    """Run `vllm serve` on the model, writing nowhere but in `folder`, until the block ends."""
    port, log = _free_port(), folder / "serve.log"
    command = [str(venv / "bin/vllm"), "serve", str(MODEL), "--served-model-name", "tiny"]
    command += ["--load-format", "dummy", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port), *options]
    environ = environment(folder) | {"VLLM_API_KEY": key, "VLLM_CPU_KVCACHE_SPACE": "1"} | variables
    # The engine leaves its sockets behind, and their names must be short: `folder` would be too deep.
    with log.open("w") as output, TemporaryDirectory() as scratch:
        environ["TMPDIR"] = scratch
        server = subprocess.Popen(command, env=environ, stdout=output, stderr=output, start_new_session=True)
        try:
            engine = Engine(f"http://127.0.0.1:{port}", key, folder)
            wait_until(lambda: _healthy(server, engine), 300, "vllm serve to be healthy", interval_s=0.2)
            yield engine
        finally:
            stop(server, grace_s=30)
            wait_until(lambda: _group_is_gone(server.pid), 30, "the engine's processes to die")


def environment(folder: Path) -> dict[str, str]:
    """Our variables, changed so that the engine or its benchmark writes nowhere but in `folder`."""
    inside = {"HOME": str(folder), "TMPDIR": str(folder)}
    return os.environ | inside | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def tiny_plan(venv: Path, runs_dir: Path, *assignments: str) -> Plan:
    """The plan of the recipe `tiny` with the engine of `venv` on this machine."""
    chosen, _ = recipe.load("tiny", assignments)
    container = site.Container(runtime="none", command=(str(venv / "bin/vllm"),))
    here = site.Site(name="here", description="this machine", scheduler="local", node=site.Node(gpus=1, cpus=1),
                     runs_dir=str(runs_dir), container=container, sweep=site.Sweep(gpus=0, load_generator_cpus=1))
    return plan.make(chosen, here, run_id=run.new_id("tiny"), runs_dir=str(runs_dir), python=sys.executable)


def _healthy(server: subprocess.Popen[bytes], engine: Engine) -> bool:
    assert server.poll() is None, f"vllm serve ended with {server.returncode}:\n{engine.log[-5000:]}"
    with suppress(OSError):
        return engine.ask("/health", key="", timeout_s=10)[0] == 200
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
