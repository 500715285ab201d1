"""The simulated engine and its load generator over loopback, and every fault that it can be told to have."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from isambard_serve import inengine
from isambard_serve.engine import EngineClient, EngineUnreachableError
from isambard_serve.evidence import Measured
from isambard_serve.plan import Point
from isambard_serve.sim import settings
from isambard_serve.sim.client import bench
from isambard_serve.sim.log import BANNER, Log
from isambard_serve.sim.server import SimServer
from isambard_serve.trace import read as trace
from isambard_serve.validity import judge
from tests.support.waiting import wait_until
from tests.unit.helpers import SAMPLES

KEY = "secret"
FLAGS = ["tiny", "--host", "127.0.0.1", "--port", "0", "--max-model-len", "2048"]


class Sim:
    """A served engine: what it logs, how it was told to die, and what a benchmark against it gives."""

    def __init__(self, server: SimServer, stream: io.StringIO, deaths: list[int]) -> None:
        self.server = server
        self.url = server.url
        self.deaths = deaths
        self.engine = EngineClient(server.url, KEY)
        self._stream = stream

    @property
    def log(self) -> str:
        """Everything logged so far."""
        return self._stream.getvalue()

    def bench(self, concurrency: int = 2, prompts: int = 4, *more: str, key: str = KEY,
              seed: int = 0) -> dict[str, Any]:
        """Measure one point of 16/8 tokens and return the result."""
        words = ["--backend", "openai", "--base-url", self.url, "--endpoint", "/v1/completions", "--model", "tiny",
                 "--dataset-name", "random", "--request-rate", "inf", "--random-input-len", "16",
                 "--random-output-len", "8", "--ignore-eos", "--percentile-metrics", "ttft,tpot,itl,e2el",
                 "--metric-percentiles", "50,90,95,99", "--save-result", "--num-prompts", str(prompts),
                 "--max-concurrency", str(concurrency), "--seed", str(seed), "--result-dir", "out",
                 "--result-filename", "bench.json", "--metadata", "toolkit=flintt", "note=x", *more]
        assert bench(words, {"OPENAI_API_KEY": key}) == 0
        document: dict[str, Any] = json.loads(Path("out/bench.json").read_text())
        return document

    def ask(self, path: str, body: object = None, key: str = KEY) -> tuple[int, bytes]:
        """Get ``path``, or post ``body`` to it, and return status and content."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {key}"},
                                         data=None if body is None else json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that stand in another folder import this checkout."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.fixture
def sim() -> Iterator[Callable[..., Sim]]:
    """Serve simulated engines that are gone after the test."""
    with ExitStack() as stack:

        def serve(*words: str) -> Sim:
            stream = io.StringIO()
            deaths: list[int] = []
            asked = settings.parse([*FLAGS, *words], {"VLLM_API_KEY": KEY})
            server = SimServer(asked, Log(stream), deaths.append)
            server.start()
            stack.callback(server.stop)
            return Sim(server, stream, deaths)

        yield serve


def fault(text: str) -> tuple[str, str]:
    return ("--sim-fault", text)


FAST = ("--sim-time-scale", "300")


def reasons(document: dict[str, Any], prompts: int = 4) -> tuple[str, ...]:
    point = Point(concurrency=2, repeat=1, prompts=prompts, seed=0)
    return judge(Measured(bench=document, returncode=0, point=point, isl=16, osl=8, min_window_s=0)).reasons


def test_in_real_time_every_token_is_streamed(sim: Callable[..., Sim]) -> None:
    served = sim()
    document = served.bench()
    assert reasons(document) == ()
    assert (document["simulated"], document["time_scale"], document["total_input_tokens"]) == (True, 1, 4 * 16)
    assert 1 < document["mean_itl_ms"] < 100
    assert 0.05 < document["duration"] < 5
    sample = served.engine.sample()
    assert (sample.generation_tokens_total, sample.prompt_tokens_total, sample.requests_total) == (32, 64, 4)


def test_faster_than_real_time_the_whole_load_is_handed_over(sim: Callable[..., Sim]) -> None:
    served = sim(*FAST)
    began = time.monotonic()
    document = served.bench(64, 512, "--random-output-len", "500")
    took_s = time.monotonic() - began
    assert (document["completed"], document["total_output_tokens"], document["time_scale"]) == (512, 512 * 500, 300)
    assert document["duration"] > 20
    assert took_s < document["duration"] / 10
    assert 64 <= document["max_concurrent_requests"] <= 128
    sample = served.engine.sample()
    assert (sample.requests_total, sample.running, sample.waiting) == (512, 0, 0)


def test_the_metrics_show_a_load_while_it_runs(sim: Callable[..., Sim]) -> None:
    served = sim(*FAST, "--max-num-seqs", "48")
    load = {"prompts": 640, "concurrency": 64, "input_tokens": 64, "output_tokens": 500, "model": "tiny"}
    body = json.dumps(load).encode()
    request = urllib.request.Request(f"{served.url}/sim/load", data=body, headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        answer.readline()
        sample = served.engine.sample()
        assert (sample.running, sample.waiting) == (48, 16)
        assert sample.kv_cache_usage
        assert int(served.ask("/load")[1][len('{"server_load": '):-1]) == 64
    # The client has gone: so has its load.
    wait_until(lambda: served.engine.sample().running == 0, 3, "an idle engine")


def test_a_virtual_clock_runs_as_fast_as_it_was_told_to(sim: Callable[..., Sim]) -> None:
    served = sim(*FAST)

    def virtual_s() -> tuple[float, float, float]:
        """The virtual time, and the real one just before and after it was read."""
        before = time.monotonic()
        found = re.search(r"^sim:virtual_time_seconds (.*)$", served.ask("/metrics")[1].decode(), re.MULTILINE)
        assert found
        return float(found[1]), before, time.monotonic()

    first, *began = virtual_s()
    time.sleep(0.1)
    second, *ended = virtual_s()
    assert 300 * (ended[0] - began[1] - 0.03) < second - first < 300 * (ended[1] - began[0] + 0.03)


def test_the_result_has_the_keys_of_a_real_one(sim: Callable[..., Sim]) -> None:
    real = json.loads((SAMPLES / "bench.json").read_text())
    document = sim(*FAST).bench()
    metadata = {"toolkit", "note"}
    assert [key for key in document if key not in {"simulated", "time_scale", *metadata}] == (
        [key for key in real if key not in metadata])
    assert (document["toolkit"], document["note"]) == ("flintt", "x")
    for key, value in real.items():
        kinds = (int, float) if isinstance(value, float) else type(value)
        assert isinstance(document[key], kinds), key


def test_the_metrics_have_the_names_and_labels_of_real_ones(sim: Callable[..., Sim]) -> None:
    def lines(text: str, pattern: str) -> set[str]:
        return set(re.findall(pattern, text, re.MULTILINE))

    real = (SAMPLES / "metrics-dp2.txt").read_text()
    served = sim(*FAST, "--data-parallel-size", "2", "--served-model-name", "tiny")
    ours = served.ask("/metrics")[1].decode()
    assert lines(real, r"^# TYPE (vllm:.*)$") <= lines(ours, r"^# TYPE (vllm:.*)$")
    # The configuration has more labels, and vLLM cuts the buckets at the longest sequence.
    series = r"^(vllm:(?!cache_config_info|\w+_bucket)\S+\{.*\}) "
    assert lines(real, series) <= lines(ours, series)
    assert 'cache_config_info{block_size="16",cache_dtype="auto"' in ours


def test_the_key_is_demanded_where_vllm_demands_it(sim: Callable[..., Sim]) -> None:
    served = sim(*FAST)
    for path, guarded in (("/health", False), ("/metrics", False), ("/version", False), ("/v1/models", True)):
        assert served.ask(path, key="wrong")[0] == (401 if guarded else 200)
        assert served.ask(path)[0] == 200
    assert json.loads(served.ask("/version")[1])["simulated"] is True
    assert json.loads(served.ask("/v1/models")[1])["data"][0]["max_model_len"] == 2048
    with pytest.raises(EngineUnreachableError, match="401"):
        EngineClient(served.url, "wrong").complete("tiny")


def test_the_guard_demands_the_key_everywhere_but_at_health(sim: Callable[..., Sim]) -> None:
    served = sim("--middleware", inengine.GUARD)
    assert {path: served.ask(path, key="wrong")[0] for path in ("/health", "/metrics", "/version", "/no/such")} == {
        "/health": 200, "/metrics": 401, "/version": 401, "/no/such": 401}
    assert served.ask("/metrics")[0] == 200
    assert reasons(served.bench()) == ()


def test_a_wrong_key_fails_every_request_and_not_the_benchmark(sim: Callable[..., Sim]) -> None:
    document = sim().bench(key="wrong")
    assert (document["completed"], document["failed"], document["mean_ttft_ms"]) == (0, 4, 0)
    assert reasons(document) == ("completed", "none_failed", "tokens_out", "in_flight")


def test_one_completion_is_answered_at_once(sim: Callable[..., Sim]) -> None:
    served = sim()
    served.engine.complete("tiny")
    status, answer = served.ask("/v1/completions", {"model": "tiny", "prompt": "one two three", "max_tokens": 5})
    content = json.loads(answer)
    assert (status, content["choices"][0]["finish_reason"]) == (200, "length")
    assert content["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    status, answer = served.ask("/tokenize", {"prompt": "one two three"})
    assert (status, json.loads(answer)["count"]) == (200, 3)


@pytest.mark.parametrize(("path", "body", "status"), [
    ("/v1/completions", {"model": "other", "prompt": "a"}, 404),
    ("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2048}, 400),
    ("/v1/completions", {"model": "tiny", "prompt": ""}, 400),
    ("/v1/completions", {"model": "tiny"}, 400),
    ("/v1/completions", [], 400),
    ("/sim/load", {"prompts": 1}, 400),
    ("/nowhere", {}, 404),
])
def test_a_request_that_cannot_be_answered_is_refused(sim: Callable[..., Sim], path: str, body: object,
                                                      status: int) -> None:
    assert sim(*FAST).ask(path, body)[0] == status


def test_the_same_seed_meets_a_warm_prefix_cache(sim: Callable[..., Sim]) -> None:
    served = sim(*FAST, "--block-size", "8")
    for seed in (1, 1, 2):
        served.bench(seed=seed)
    sample = served.engine.sample()
    assert (sample.prefix_cache_queries_total, sample.prefix_cache_hits_total) == (3 * 4 * 16, 4 * 8)


@pytest.mark.parametrize("scale", [(), FAST])
@pytest.mark.parametrize(("text", "refuted"), [
    ("fail-requests=0.5", ("completed", "none_failed", "tokens_out")),
    ("short-output", ("tokens_out",)),
])
def test_a_planted_fault_makes_the_row_invalid(sim: Callable[..., Sim], scale: tuple[str, ...], text: str,
                                               refuted: tuple[str, ...]) -> None:
    served = sim(*scale, *fault(text))
    served.engine.complete("tiny")
    document = served.bench()
    assert reasons(document) == refuted
    assert document["completed"] == (2 if "fail" in text else 4)


@pytest.mark.parametrize("scale", [(), FAST])
def test_a_slow_client_has_fewer_requests_in_flight(sim: Callable[..., Sim], scale: tuple[str, ...]) -> None:
    document = sim(*scale, *fault("slow-client=0.5")).bench(4, 8)
    assert (document["max_concurrency"], document["completed"]) == (4, 8)
    spans = [(sent_s, sent_s + latency_s)
             for sent_s, latency_s in zip(document["queue_times"], document["latencies"], strict=True)]
    assert max(sum(begin <= at < end - 1e-9 for begin, end in spans) for at, _ in spans) == 2


def test_a_warm_prefix_cache_shows_in_the_hits(sim: Callable[..., Sim]) -> None:
    served = sim(*FAST, *fault("warm-prefix-cache=0.25"))
    served.bench()
    assert served.engine.sample().prefix_cache_hits_total == 4 * 4


def test_preemptions_show_in_the_metrics_and_all_is_answered_all_the_same(sim: Callable[..., Sim]) -> None:
    served = sim(*FAST, *fault("preempt=4"))
    assert reasons(served.bench()) == ()
    assert served.engine.sample().preemptions_total


def test_a_kernel_compiled_in_the_window_shows_in_the_log_and_in_the_latency(sim: Callable[..., Sim]) -> None:
    served = sim(*FAST, *fault("compile-in-window=3"))
    document = served.bench()
    assert "JIT compilation during inference" in served.log
    assert document["duration"] > 3


@pytest.mark.parametrize("scale", [(), FAST])
def test_it_dies_in_the_middle_of_the_point_that_it_was_told(sim: Callable[..., Sim], scale: tuple[str, ...]) -> None:
    served = sim(*scale, *fault("die-in-point=2:0"))
    served.bench()
    assert served.deaths == []
    served.bench()
    assert served.deaths == [0]


def test_a_hanging_engine_is_healthy_and_answers_nothing(sim: Callable[..., Sim]) -> None:
    served = sim(*fault("hang"))
    assert served.engine.healthy()
    with pytest.raises(EngineUnreachableError):
        served.engine.complete("tiny", timeout_s=0.1)
    wait_until(lambda: served.engine.sample().waiting == 1, 3, "the request")


def test_an_engine_may_hang_later(sim: Callable[..., Sim]) -> None:
    served = sim(*fault("hang=1"))
    served.engine.complete("tiny")
    served.ask("/sim/point", {"prompts": 1, "concurrency": 1})
    with pytest.raises(EngineUnreachableError):
        served.engine.complete("tiny", timeout_s=0.1)


def test_a_stream_that_nobody_reads_any_more_is_aborted(sim: Callable[..., Sim]) -> None:
    served = sim()
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2000, "stream": True}).encode()
    request = urllib.request.Request(f"{served.url}/v1/completions", data=body,
                                     headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        assert answer.readline().startswith(b"data: ")
    wait_until(lambda: served.engine.sample().running == 0, 3, "an idle engine")
    assert 'finished_reason="abort",model_name="tiny"} 1.0' in served.ask("/metrics")[1].decode()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def started(child: Callable[..., subprocess.Popen[bytes]], port: int, *words: str) -> subprocess.Popen[bytes]:
    return child(sys.executable, "-m", "isambard_serve.sim", "serve", "tiny", "--port", str(port), *words)


def test_a_signal_ends_it_at_once_and_well(child: Callable[..., subprocess.Popen[bytes]],
                                           capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    process = started(child, port)
    wait_until(EngineClient(f"http://127.0.0.1:{port}", "").healthy, 10, "the engine")
    process.send_signal(signal.SIGTERM)
    assert process.wait(2) == 0
    out = capfd.readouterr().out
    assert out.startswith(f"{BANNER}\n")
    assert f"Starting vLLM server on http://127.0.0.1:{port}" in out


@pytest.mark.parametrize(("text", "code"), [("die-at-start", 1), ("die-at-start=0", 0), ("die-at-start=-9", -9),
                                            ("die-at-start=-15", -15)])
def test_it_dies_at_start_as_it_is_told(child: Callable[..., subprocess.Popen[bytes]], text: str, code: int) -> None:
    assert started(child, 0, *fault(text)).wait(10) == code


def test_it_is_not_there_before_it_has_loaded(child: Callable[..., subprocess.Popen[bytes]]) -> None:
    port = free_port()
    engine = EngineClient(f"http://127.0.0.1:{port}", "")
    began = time.monotonic()
    process = started(child, port, *fault("slow-start=0.3"))
    assert not engine.healthy()
    wait_until(engine.healthy, 10, "the engine")
    assert time.monotonic() - began > 0.3
    process.terminate()
    assert process.wait(2) == 0


def test_an_engine_without_room_for_one_sequence_does_not_start(child: Callable[..., subprocess.Popen[bytes]]) -> None:
    assert started(child, 0, "--num-gpu-blocks-override", "8").wait(10) == 1


def test_a_benchmark_without_an_engine_fails_every_request_and_ends_well(
        child: Callable[..., subprocess.Popen[bytes]], capfd: pytest.CaptureFixture[str]) -> None:
    process = child(sys.executable, "-m", "isambard_serve.sim", "bench", "serve", "--model", "tiny", "--num-prompts",
                    "3", "--base-url", f"http://127.0.0.1:{free_port()}")
    assert process.wait(10) == 0
    out = capfd.readouterr().out
    assert out.startswith(BANNER)
    assert "3 requests failed: [Errno 111] Connection refused" in out


def test_the_engine_s_death_leaves_the_benchmark_with_what_was_done(
        child: Callable[..., subprocess.Popen[bytes]]) -> None:
    port = free_port()
    process = started(child, port, *FAST, *fault("die-in-point=1:-9"))
    wait_until(EngineClient(f"http://127.0.0.1:{port}", "").healthy, 10, "the engine")
    words = ["--model", "tiny", "--num-prompts", "200", "--max-concurrency", "4", "--random-output-len", "200",
             "--base-url", f"http://127.0.0.1:{port}", "--save-result", "--result-filename", "b.json"]
    assert bench(words, {}) == 0
    assert process.wait(5) == -9
    document = json.loads(Path("b.json").read_text())
    assert 0 < document["completed"] <= 100
    assert document["completed"] + document["failed"] == 200


@pytest.mark.parametrize(("words", "code"), [([], 2), (["--help"], 0), (["serve"], 2), (["bench", "throughput"], 2),
                                             (["serve", "m", "--sim-fault", "explode"], 2)])
def test_the_command_line_says_how_it_is_used(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    from isambard_serve.sim.__main__ import main
    assert main(words) == code
    captured = capsys.readouterr()
    assert "die-in-point" in captured.out + captured.err or words == ["serve"]


def test_the_profiler_answers_where_there_is_one_and_leaves_a_trace_for_each_gpu(
        sim: Callable[..., Sim], tmp_path: Path) -> None:
    plain = sim()
    assert [plain.ask(path, {})[0] for path in ("/start_profile", "/stop_profile")] == [404, 404]
    folder = tmp_path / "profile"
    served = sim("--data-parallel-size", "2", "--profiler-config",
                 json.dumps({"profiler": "torch", "torch_profiler_dir": str(folder)}))
    served.engine.stop_profile()
    assert not folder.exists()  # nothing was recorded
    served.engine.start_profile()
    served.engine.stop_profile()
    read = [trace.read(path) for path in sorted(folder.glob("*.pt.trace.json.gz"))]
    assert [(recording.rank, recording.gpus) for recording in read] == [(0, {}), (1, {})]
