"""The engine as seen over HTTP: is it healthy, does it answer, what do its metrics say."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

import msgspec

from isambard_serve.records import Answer, GpuSample, Record, Sample

_SUMS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions_total",
    "vllm:prompt_tokens_total": "prompt_tokens_total",
    "vllm:generation_tokens_total": "generation_tokens_total",
    "vllm:request_success_total": "requests_total",
    "vllm:prefix_cache_queries_total": "prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits_total",
    "sim:virtual_time_seconds": "engine_time_s",
}
_FULLEST = "vllm:kv_cache_usage_perc"


class _Choice(Record, frozen=True, forbid_unknown_fields=False):
    index: int
    text: str
    token_ids: tuple[int, ...] | None = None


class _Choices(Record, frozen=True, forbid_unknown_fields=False):
    choices: list[_Choice]


class EngineUnreachableError(Exception):
    """The engine gave no answer, or not the one that a working engine gives."""


class EngineClient:
    """Talks to one engine.

    Args:
        url: where it listens, such as ``http://127.0.0.1:8000``.
        key: the API key that it demands.
    """

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {key}"}
        # A proxy set for the outside world must not stand between two processes of one node.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def _ask(self, path: str, body: object = None, *, timeout_s: float) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": "application/json"} if data else {})
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                content: bytes = answer.read()
                return content
        except (OSError, http.client.HTTPException) as error:
            raise EngineUnreachableError(f"{path}: {error}") from error

    def healthy(self, timeout_s: float = 2.0) -> bool:
        """Whether ``/health`` answers 200: all engine processes have started. It does not prove that they work."""
        try:
            self._ask("/health", timeout_s=timeout_s)
        except EngineUnreachableError:
            return False
        return True

    def complete(self, model: str, timeout_s: float = 120.0) -> None:
        """Has the engine answer one short completion, since ``/health`` alone proves little.

        Raises:
            EngineUnreachableError: no answer, or one without a choice in it.
        """
        body = {"model": model, "prompt": "Isambard", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = self._ask("/v1/completions", body, timeout_s=timeout_s)
        try:
            good = bool(json.loads(answer)["choices"])
        except (ValueError, KeyError, TypeError):
            good = False
        if not good:
            raise EngineUnreachableError(f"/v1/completions: no completion in {answer[:200]!r}")

    def answers(self, model: str, prompts: Sequence[str], *, max_tokens: int, timeout_s: float = 300.0) -> list[Answer]:
        """The engine's greedy continuation of each prompt, all asked for at once.

        Raises:
            EngineUnreachableError: no answer, or one that cannot be understood.
        """
        body = {"model": model, "prompt": list(prompts), "max_tokens": max_tokens, "temperature": 0, "seed": 0,
                "ignore_eos": True, "return_token_ids": True}
        answer = self._ask("/v1/completions", body, timeout_s=timeout_s)
        try:
            choices = msgspec.json.decode(answer, type=_Choices).choices
        except msgspec.MsgspecError as error:
            raise EngineUnreachableError(f"/v1/completions: {error}") from error
        return [Answer(text=choice.text, tokens=choice.token_ids)
                for choice in sorted(choices, key=lambda choice: choice.index)]

    def start_profile(self, timeout_s: float = 120.0) -> None:
        """Has the engine's profiler begin to record.

        Raises:
            EngineUnreachableError: no answer, or the engine was started without a profiler.
        """
        self._ask("/start_profile", {}, timeout_s=timeout_s)

    def stop_profile(self, timeout_s: float = 600.0) -> None:
        """Has the engine's profiler end, and waits until its traces are written: that takes many times the recording.

        Raises:
            EngineUnreachableError: no answer.
        """
        self._ask("/stop_profile", {}, timeout_s=timeout_s)

    def simulated_gpus(self, timeout_s: float = 5.0) -> list[GpuSample]:
        """One look at each GPU of a simulated engine.

        Raises:
            EngineUnreachableError: no answer.
        """
        from prometheus_client.parser import text_string_to_metric_families

        lines = self._ask("/metrics", timeout_s=timeout_s).decode().splitlines(keepends=True)
        wanted = "".join(line for line in lines if line.startswith("sim:gpu_clock_reasons"))
        return [GpuSample(time=time.time(), gpu=labels["gpu"], sm_mhz=float(labels["sm_mhz"]),
                          power_w=float(labels["power_w"]), temperature_c=float(labels["temperature_c"]),
                          reasons=int(value))
                for family in text_string_to_metric_families(wanted) for _, labels, value, *_ in family.samples]

    def sample(self, timeout_s: float = 5.0) -> Sample:
        """One reading of ``/metrics``.

        Raises:
            EngineUnreachableError: no answer.
        """
        began = time.monotonic()
        text = self._ask("/metrics", timeout_s=timeout_s).decode()
        return parse_metrics(text, now=time.time(), scrape_ms=(time.monotonic() - began) * 1000)


def parse_metrics(text: str, *, now: float, scrape_ms: float) -> Sample:
    """The sample in Prometheus text, as vLLM 0.26 to 0.33 name their metrics.

    Counters and gauges are summed over the DP ranks; the KV cache is that of the fullest rank.
    """
    from prometheus_client.parser import text_string_to_metric_families

    names = (*_SUMS, _FULLEST)
    # Parsing all 70 KB each second would cost a core some percent; these few lines are what is read.
    wanted = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(names))
    sums: dict[str, float] = {}
    fullest: float | None = None
    for family in text_string_to_metric_families(wanted):
        for name, _, value, *_ in family.samples:
            if name in _SUMS:
                sums[_SUMS[name]] = sums.get(_SUMS[name], 0.0) + value
            elif name == _FULLEST:
                fullest = max(fullest or 0.0, value)
    return Sample(time=now, scrape_ms=scrape_ms, kv_cache_usage=fullest, **sums)
