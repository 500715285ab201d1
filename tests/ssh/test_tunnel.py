"""From the laptop to an engine beyond the login node."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from isambard_serve import host
from isambard_serve.tunnel import Forwarder, Target
from tests.ssh import world as worlds
from tests.ssh.commands import SERVE, asks, does, waits
from tests.ssh.world import ALIAS, Laptop, World
from tests.support.waiting import wait_until

ASK = """
import json, os, urllib.request
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/completions",
    json.dumps({"model": "%s", "prompt": "Hello", "max_tokens": 3}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request))["usage"]["completion_tokens"])
"""


@pytest.fixture
def served(laptop: Laptop, installed: World) -> Iterator[dict[str, Any]]:
    """A server for people in the sandbox of the login node."""
    (run,) = asks(laptop, "submit", "dp4", "--serve", "--wait")["runs"]
    yield run
    does(laptop, "cancel", run["run_id"], check=False)


@contextmanager
def tunnelled(laptop: Laptop, run_id: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A tunnel that has been opened, and what it said of itself."""
    command = [*SERVE, "tunnel", run_id, "--host", ALIAS, "--site", "sandbox", "--json"]
    process = subprocess.Popen(laptop.world.laptop.command(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, env=laptop.environment, cwd=laptop.folder, start_new_session=True)
    try:
        assert process.stdout
        text = ""
        while not text.endswith("}\n") and (line := process.stdout.readline()):
            text += line
        yield process, json.loads(text)
    finally:
        process.kill()
        process.communicate()


def models(opened: dict[str, Any], key: str | None) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(opened["base_url"] + "/models", headers=headers)) as answer:
        return json.load(answer)


def test_a_command_reaches_the_engine_by_its_environment(laptop: Laptop, served: dict[str, Any]) -> None:
    model = json.loads((Path(served["directory"]) / "endpoint.json").read_text())["model"]
    done = does(laptop, "tunnel", served["run_id"], "--", sys.executable, "-c", ASK % model)
    assert done.stdout == "3\n"
    failed = does(laptop, "tunnel", served["run_id"], "--", "sh", "-c", "exit 9", check=False)
    assert failed.returncode == 9


def test_the_key_is_in_a_file_of_the_user_alone_and_in_no_command(laptop: Laptop, served: dict[str, Any]) -> None:
    with tunnelled(laptop, served["run_id"]) as (process, opened):
        path = Path(opened["key_file"])
        key = path.read_text()
        assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]
        assert models(opened, key)["data"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            models(opened, None)
        commands = [entry.read_bytes() for entry in Path("/proc").glob("[0-9]*/cmdline") if _readable(entry)]
        assert not [command for command in commands if key.encode() in command]
        process.send_signal(2)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 130
        assert key not in said
        assert not path.exists()
    assert asks(laptop, "status", served["run_id"])["runs"][0]["state"] == "ready"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_tunnel_that_is_told_to_end_leaves_no_key(laptop: Laptop, served: dict[str, Any],
                                                   number: signal.Signals) -> None:
    with tunnelled(laptop, served["run_id"]) as (process, opened):
        process.send_signal(number)
        process.communicate(timeout=30)
        assert not Path(opened["key_file"]).exists()


def _readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


def test_for_a_shell_it_prints_what_sets_both_variables(laptop: Laptop, served: dict[str, Any]) -> None:
    process = subprocess.Popen(
        laptop.world.laptop.command([*SERVE, "tunnel", served["run_id"], "--host", ALIAS, "--site", "sandbox"]),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=laptop.environment, start_new_session=True)
    assert process.stdout
    lines = process.stdout.readline() + process.stdout.readline()
    shown = subprocess.run(["sh", "-c", f'{lines} echo "$OPENAI_BASE_URL $OPENAI_API_KEY"'], capture_output=True,
                           text=True, check=True).stdout
    process.terminate()
    process.communicate()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1 \S{20,}\n", shown)


def test_a_cut_is_mended_and_the_runs_end_is_told(laptop: Laptop, served: dict[str, Any]) -> None:
    with tunnelled(laptop, served["run_id"]) as (process, opened):
        key = Path(opened["key_file"]).read_text()
        laptop.world.cut_sessions()

        def answers() -> bool:
            try:
                return bool(models(opened, key))
            except OSError:
                return False

        assert wait_until(answers, 60, "the tunnel to be mended", interval_s=0.5)
        does(laptop, "cancel", served["run_id"])
        waits(laptop, served["run_id"], "cancelled")
        answers()  # whose failure has it look at once
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "the run has ended, and the tunnel with it: cancelled" in said


def test_what_cannot_be_led_to_is_said_with_its_remedy(laptop: Laptop, installed: World) -> None:
    hang = ("--set", "engine.extra_args=[--sim-fault, hang]")
    (loading,) = asks(laptop, "submit", "dp4", "--serve", *hang)["runs"]
    early = does(laptop, "tunnel", loading["run_id"], check=False)
    assert early.returncode == 4
    assert "does not answer yet" in early.stderr
    does(laptop, "cancel", loading["run_id"])
    late = does(laptop, "tunnel", loading["run_id"], check=False)
    assert late.returncode == 1
    assert "has ended: cancelled" in late.stderr
    long = ("--set", "bench.concurrency=[64]", "--set", "bench.prompts_per_concurrency=200")
    (benchmark,) = asks(laptop, "submit", "dp4", *long)["runs"]
    waits(laptop, benchmark["run_id"], "ready", "measuring")
    refused = does(laptop, "tunnel", benchmark["run_id"], check=False)
    assert refused.returncode == 2
    assert "--serve" in refused.stderr
    does(laptop, "cancel", benchmark["run_id"])


def test_a_port_that_is_taken_is_named(laptop: Laptop) -> None:
    with laptop.world.laptop.entered(), socket.create_server(("127.0.0.1", 0)) as taken:
        done = does(laptop, "tunnel", "latest", "--port", str(taken.getsockname()[1]), check=False)
    assert done.returncode == 2
    assert "is taken" in done.stderr


@contextmanager
def http_on_compute_node(world: World) -> Iterator[int]:
    """An HTTP server on the compute node that sends back, in pieces, what it is sent."""
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            for start in range(0, len(data), 100_000):
                self.wfile.write(data[start:start + 100_000])

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with world.compute.entered():
        server = ThreadingHTTPServer((worlds.COMPUTE, 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("bulk", [False, True])
def test_many_connections_at_once_reach_a_node_that_the_laptop_does_not(laptop: Laptop, world: World,
                                                                       bulk: bool) -> None:
    with http_on_compute_node(world) as port, host.connected(ALIAS, bulk=bulk) as there, \
            closing(Forwarder()) as forwarder:
        with pytest.raises(OSError, match="unreachable"):
            socket.create_connection((worlds.COMPUTE, port), timeout=5)
        forwarder.lead(there, Target(run_id="x", address=worlds.COMPUTE, port=port, model="m", key="k"))
        came: list[bool] = []

        def ask() -> None:
            data = os.urandom(1 << 20)
            with urllib.request.urlopen(f"http://127.0.0.1:{forwarder.port}/", data, timeout=60) as answer:
                came.append(answer.read() == data)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert came == [True] * 8


def test_a_node_that_does_not_answer_is_noticed(laptop: Laptop) -> None:
    with host.connected(ALIAS) as there, closing(Forwarder()) as forwarder:
        forwarder.lead(there, Target(run_id="x", address=worlds.COMPUTE, port=9, model="m", key="k"))
        with socket.create_connection(("127.0.0.1", forwarder.port)) as connection:
            assert connection.recv(1) == b""
        assert forwarder.trouble.wait(10)
