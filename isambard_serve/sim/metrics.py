"""The text of ``/metrics``: vLLM 0.32's names, labels and order of labels, and two gauges of the simulation's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from isambard_serve.sim.counters import Histogram, RankStatistics
from isambard_serve.sim.scheduler import Engine, Rank
from isambard_serve.sim.settings import Settings, gpu

_COUNTERS: tuple[tuple[str, str, Callable[[RankStatistics], float]], ...] = (
    ("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.",
     lambda s: s.prefix_queries),
    ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", lambda s: s.prefix_hits),
    ("num_preemptions", "Cumulative number of preemption from the engine.", lambda s: s.preemptions),
    ("prompt_tokens", "Number of prefill tokens processed.", lambda s: s.prompt_tokens),
    ("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", lambda s: s.prompt_tokens_cached),
    ("generation_tokens", "Number of generation tokens processed.", lambda s: s.generation_tokens),
    ("external_prefix_cache_queries", "External prefix cache queries.", lambda _: 0),
    ("external_prefix_cache_hits", "External prefix cache hits.", lambda _: 0),
    ("mm_cache_queries", "Multi-modal cache queries.", lambda _: 0),
    ("mm_cache_hits", "Multi-modal cache hits.", lambda _: 0),
    ("estimated_flops_per_gpu", "Estimated number of floating point operations per GPU.", lambda _: 0),
    ("estimated_read_bytes_per_gpu", "Estimated number of bytes read from memory per GPU.", lambda _: 0),
    ("estimated_write_bytes_per_gpu", "Estimated number of bytes written to memory per GPU.", lambda _: 0),
)

_BY_SOURCE: tuple[tuple[str, str, Mapping[str, Callable[[RankStatistics], float]]], ...] = (
    ("prompt_tokens_by_source", "Number of prompt tokens by source.", {
        "local_compute": lambda s: s.prompt_tokens - s.prompt_tokens_cached,
        "local_cache_hit": lambda s: s.prompt_tokens_cached,
        "external_kv_transfer": lambda _: 0,
    }),
    ("prompt_tokens_cached_by_source", "Prefix-cache hit tokens by the cache tier that supplied them.", {
        "device": lambda s: s.prefix_hits,
        **dict.fromkeys(("host", "p2p", "disk", "external_unspecified"), lambda _: 0),
    }),
)

_HISTOGRAMS: tuple[tuple[str, str, Callable[[RankStatistics], Histogram]], ...] = (
    ("request_prompt_tokens", "Number of prefill tokens processed.", lambda s: s.prompt_length),
    ("request_generation_tokens", "Number of generation tokens processed.", lambda s: s.generation_length),
    ("iteration_tokens_total", "Histogram of number of tokens per engine_step.", lambda s: s.iteration_tokens),
    ("request_max_num_generation_tokens", "Histogram of maximum number of requested generation tokens.",
     lambda s: s.max_tokens),
    ("request_params_n", "Histogram of the n request parameter.", lambda s: s.choices),
    ("request_params_max_tokens", "Histogram of the max_tokens request parameter.", lambda s: s.max_tokens),
    ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", lambda s: s.time_to_first_token),
    ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", lambda s: s.inter_token_latency),
    ("request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request.",
     lambda s: s.time_per_output_token),
    ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", lambda s: s.e2e_latency),
    ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", lambda s: s.queue_time),
    ("request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.",
     lambda s: s.inference_time),
    ("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.",
     lambda s: s.prefill_time),
    ("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", lambda s: s.decode_time),
    ("request_num_preemptions", "Histogram of the number of times a request was preempted.",
     lambda s: s.request_preemptions),
    ("request_prefill_kv_computed_tokens", "Histogram of new KV tokens computed during prefill.",
     lambda s: s.prefill_computed),
)

_POWER_CAP, _HEAT = 0x4, 0x20 | 0x4
"""NVML's bits: GH200s under load run at their power cap."""

_FINISHED = ("stop", "length", "abort", "error", "repetition")


class _Page:
    def __init__(self, model_name: str) -> None:
        self.lines: list[str] = []
        self._model_name = model_name

    def family(self, name: str, kind: str, help_text: str) -> None:
        self.lines += (f"# HELP {name} {help_text}", f"# TYPE {name} {kind}")

    def value(self, name: str, value: float, **labels: str) -> None:
        # vLLM's exporter sorts the labels by name.
        inside = ",".join(f'{key}="{_escaped(labels[key])}"' for key in sorted(labels))
        self.lines.append(f"{name}{{{inside}}} {float(value)}" if inside else f"{name} {float(value)}")

    def ranks(self, name: str, values: Iterable[float], **labels: str) -> None:
        """One value for each rank."""
        for index, value in enumerate(values):
            self.value(name, value, engine=str(index), model_name=self._model_name, **labels)

    def histogram(self, name: str, histograms: Iterable[Histogram]) -> None:
        """One histogram for each rank."""
        for index, histogram in enumerate(histograms):
            labels = {"engine": str(index), "model_name": self._model_name}
            counts = histogram.cumulated()
            self.value(f"{name}_sum", histogram.sum, **labels)
            for bound, count in zip((*histogram.bounds, float("inf")), counts, strict=True):
                self.value(f"{name}_bucket", count, le="+Inf" if bound == float("inf") else str(float(bound)), **labels)
            self.value(f"{name}_count", counts[-1], **labels)


def text(settings: Settings, engine: Engine, virtual_time_s: float) -> str:
    """The whole page, as of now."""
    page = _Page(settings.served_name)
    statistics = [rank.statistics for rank in engine.ranks]
    for name, words, count in _COUNTERS:
        page.family(f"vllm:{name}_total", "counter", words)
        page.ranks(f"vllm:{name}_total", map(count, statistics))
    for name, words, sources in _BY_SOURCE:
        page.family(f"vllm:{name}_total", "counter", words)
        for source, count in sources.items():
            page.ranks(f"vllm:{name}_total", map(count, statistics), source=source)
    page.family("vllm:request_success_total", "counter", "Count of successfully processed requests.")
    for reason in _FINISHED:
        page.ranks("vllm:request_success_total", [rank.requests[reason] for rank in statistics], finished_reason=reason)
    page.family("vllm:admission_rejections_total", "counter", "Number of admission attempts rejected by a queue limit.")
    for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
        page.value("vllm:admission_rejections_total", 0, model_name=settings.served_name, reason=reason)
    _gauges(page, engine.ranks)
    _cache_config(page, settings)
    for name, words, histogram in _HISTOGRAMS:
        page.family(f"vllm:{name}", "histogram", words)
        page.histogram(f"vllm:{name}", map(histogram, statistics))
    page.family("sim:virtual_time_seconds", "gauge", "Virtual seconds since the simulated engine was ready.")
    page.value("sim:virtual_time_seconds", virtual_time_s)
    page.family("sim:time_scale", "gauge", "Virtual seconds per real second.")
    page.value("sim:time_scale", settings.time_scale)
    page.family("sim:gpu_clock_reasons", "gauge", "Why a simulated GPU's clock is low, in NVML's bits.")
    for rank in range(settings.shape.gpus):
        hot = rank == settings.faults.throttle
        page.value("sim:gpu_clock_reasons", _HEAT if hot else _POWER_CAP, gpu=gpu(rank),
                   power_w="400" if hot else "570", sm_mhz="1200" if hot else "1600",
                   temperature_c="92" if hot else "60")
    return "\n".join(page.lines) + "\n"


def _gauges(page: _Page, ranks: list[Rank]) -> None:
    waiting = [len(rank.waiting) for rank in ranks]
    none = [0] * len(ranks)
    page.family("vllm:num_requests_running", "gauge", "Number of requests in model execution batches.")
    page.ranks("vllm:num_requests_running", [len(rank.running) for rank in ranks])
    page.family("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.")
    page.ranks("vllm:num_requests_waiting", waiting)
    page.family("vllm:num_requests_waiting_by_reason", "gauge", "Number of waiting requests by reason.")
    page.ranks("vllm:num_requests_waiting_by_reason", waiting, reason="capacity")
    page.ranks("vllm:num_requests_waiting_by_reason", none, reason="deferred")
    page.family("vllm:engine_sleep_state", "gauge", "Engine sleep state; awake = 1 means engine is awake.")
    for state, values in (("awake", [1] * len(ranks)), ("weights_offloaded", none), ("discard_all", none)):
        page.ranks("vllm:engine_sleep_state", values, sleep_state=state)
    page.family("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.")
    page.ranks("vllm:kv_cache_usage_perc", [rank.kv_usage for rank in ranks])


def _cache_config(page: _Page, settings: Settings) -> None:
    limits = settings.limits
    page.family("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
    for index in range(limits.ranks):
        page.value(
            "vllm:cache_config_info", 1, engine=str(index),
            block_size=str(limits.block_size),
            cache_dtype=settings.given.get("kv-cache-dtype", "auto"),
            enable_prefix_caching=str(limits.prefix_caching),
            gpu_memory_utilization=str(settings.shape.gpu_memory_utilization),
            kv_cache_max_concurrency=str(settings.kv_tokens / settings.max_model_len),
            kv_cache_size_tokens=str(settings.kv_tokens),
            num_gpu_blocks=str(limits.kv_blocks),
            num_gpu_blocks_override=settings.given.get("num-gpu-blocks-override", "None"),
        )


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
