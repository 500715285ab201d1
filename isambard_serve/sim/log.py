"""The simulated engine's log: vLLM's lines (formats read off vLLM 0.32 and 0.33) after one that says what this is."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TextIO

from isambard_serve.sim.settings import VERSION, Settings

BANNER = "This is isambard-serve's simulated engine, not vLLM: no model runs, and its numbers are not measurements."


class Log:
    """Writes whole lines to ``stream`` (standard output unless said otherwise); threads may share it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._lock = threading.Lock()

    def plain(self, text: str) -> None:
        """``text`` as a line of its own."""
        with self._lock:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def line(self, text: str, source: str, *, who: str = "APIServer", level: str = "INFO") -> None:
        """``text`` as vLLM's logger writes it, by the process ``who`` from its file and line ``source``."""
        self.plain(f"({who} pid={os.getpid()}) {level} {time.strftime('%m-%d %H:%M:%S')} [{source}] {text}")

    def begin(self, settings: Settings) -> None:
        """What vLLM says before it loads the model."""
        self.plain(BANNER)
        self.line(f"version {VERSION}  model {settings.model}", "api_utils.py:347")
        given = {name.replace("-", "_"): value == "True" or value for name, value in settings.given.items()}
        self.line(f"non-default args: {{'model_tag': {settings.model!r}, {str(given)[1:]}", "api_utils.py:286")
        self.line(f"Resolved architecture: {settings.shape.model.name}", "model.py:733")
        self.line(f"Using max model len {settings.max_model_len}", "model.py:2152")
        self.line(f"Chunked prefill is enabled with max_num_batched_tokens={settings.limits.max_num_batched_tokens}.",
                  "scheduler.py:252")
        self.line(f"Initializing a V1 LLM engine (v{VERSION}) with config: model={settings.model!r}, "
                  f"tensor_parallel_size={settings.shape.tensor_parallel}, "
                  f"data_parallel_size={settings.shape.data_parallel}", "core.py:133", who=_core(settings, 0))

    def loaded(self, settings: Settings, took_s: float) -> None:
        """What vLLM says while it loads the model, and when it is done."""
        shape = settings.shape
        model = shape.model
        for rank in range(shape.gpus):
            dp, tp = divmod(rank, shape.tensor_parallel)
            self.line(f"rank {rank} in world size {shape.gpus} is assigned as DP rank {dp}, PP rank 0, PCP rank 0, "
                      f"TP rank {tp}, EP rank {rank if settings.expert_parallel else 'N/A'}, EPLB rank N/A",
                      "parallel_state.py:2350", who=f"Worker_{rank}")
        if model.expert_token_s:
            self.line("DeepSeek V4 expert_dtype resolved to 'fp4'", "quant_config.py:107", who="Worker_0")
            self.line("Using DeepSeek's fp8_ds_mla KV cache format.", "attention.py:122", who="Worker_0")
        if shape.moe_backend:
            # vLLM's first local rank alone says so.
            self.line(f"Using '{shape.moe_backend.upper()}' Mxfp4 MoE backend.", "mxfp4.py:539", who="Worker_0")
        if shape.moe_backend == "humming":
            self.line(f"Using {settings.humming_gemm} gemm for humming moe", "fused_humming_moe.py:125", who="Worker_0")
        weights_gib = model.expert_gib / shape.gpus + model.dense_gib / shape.tensor_parallel
        self.line(f"Model loading took {weights_gib:.2f} GiB memory and {took_s:.6f} seconds",
                  "gpu_model_runner.py:5089", who="Worker_0")
        kv_gib = settings.kv_tokens * model.kv_bytes_per_token / 2**30
        for rank in range(shape.data_parallel):
            who = _core(settings, rank)
            self.line(f"Available KV cache memory: {kv_gib:.2f} GiB", "gpu_worker.py:773", who=who)
            self.line(f"GPU KV cache size: {settings.kv_tokens:,} tokens, Maximum concurrency for "
                      f"{settings.max_model_len:,} tokens per request: "
                      f"{settings.kv_tokens / settings.max_model_len:.2f}x", "kv_cache_utils.py:1147", who=who)
            self.line(f"init engine (profile, create kv cache, warmup model) took {took_s:.2f} s (compilation: 0.00 s)",
                      "core.py:402", who=who)
        self.line("Kernel JIT monitor activated; monitored JIT compilations during inference will use mode=warn.",
                  "jit_monitor.py:79", who="Worker_0")

    def listening(self, url: str) -> None:
        """What vLLM says once it takes requests."""
        self.line(f"Starting vLLM server on {url}", "entry.py:140")
        self.plain("INFO:     Application startup complete.")

    def compiled(self) -> None:
        """What vLLM's monitor says when a kernel is compiled while requests are served."""
        self.line("Triton kernel JIT compilation during inference: _compute_slot_mapping_kernel. This causes a latency "
                  "spike; consider extending warmup to cover this shape/config.", "jit_monitor.py:135",
                  who="Worker_0", level="WARNING")

    def throughput(self, *, prompt_tok_s: float, generation_tok_s: float, running: int, waiting: int,
                   kv_usage: float, hit_rate: float) -> None:
        """vLLM's periodic line; tokens per virtual second."""
        self.line(f"Engine 000: Avg prompt throughput: {prompt_tok_s:.1f} tokens/s, Avg generation throughput: "
                  f"{generation_tok_s:.1f} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, "
                  f"GPU KV cache usage: {kv_usage * 100:.1f}%, Prefix cache hit rate: {hit_rate * 100:.1f}%",
                  "loggers.py:335")

    def died(self, why: str) -> None:
        """The last words of an engine that dies."""
        self.line(f"EngineCore encountered a fatal error: {why}", "core.py:1240", who="EngineCore", level="ERROR")


def _core(settings: Settings, rank: int) -> str:
    return "EngineCore" if settings.shape.data_parallel == 1 else f"EngineCore_DP{rank}"
