"""What ``serve``'s command line asks of the simulated engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isambard_serve import inengine
from isambard_serve.errors import UsageError
from isambard_serve.sim import faults, fitted
from isambard_serve.sim.arguments import Arguments
from isambard_serve.sim.faults import Faults
from isambard_serve.sim.scheduler import Limits

VERSION = "0.33.0"
"""The vLLM version whose behaviour, defaults and names are simulated."""


def gpu(rank: int) -> str:
    """The UUID of a rank's simulated GPU."""
    return f"GPU-simulated-{rank}"


@dataclass(frozen=True)
class Settings:
    """The simulated engine, worked out in full.

    Attributes:
        served_name: the name that requests and metrics call the model by.
        api_key: the key that ``/v1`` demands; empty: none.
        max_model_len: tokens that a sequence may have.
        time_scale: virtual seconds per second of the wall's clock.
        expert_parallel: whether the experts are spread over the GPUs.
        humming_gemm: how Humming's kernels are told to see the experts' work.
        log_throughput: whether the log has throughput lines: vLLM writes them with one API server only.
        given: the flags as they were given, for the log.
        guarded: whether the key is demanded everywhere but at ``/health``: a middleware says so.
        environment: the variables that the engine was started with.
        profiles: the folder that the profiler writes to; None: there is no profiler.
    """

    model: str
    served_name: str
    host: str
    port: int
    api_key: str
    shape: fitted.Shape
    limits: Limits
    max_model_len: int
    time_scale: float
    expert_parallel: bool
    humming_gemm: str
    log_throughput: bool
    faults: Faults
    given: Mapping[str, str]
    guarded: bool
    environment: Mapping[str, str]
    profiles: str | None

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache of one DP rank holds."""
        return self.limits.kv_blocks * self.limits.block_size


def parse(words: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """The settings in the words after ``serve``; flags that mean nothing here are ignored.

    Raises:
        UsageError: no model, a bad value, or an unknown fault.
    """
    arguments = Arguments(words)
    name = arguments.positional[0] if arguments.positional else arguments.text("model")
    if not name:
        raise UsageError("names no model", where="serve", remedy="serve MODEL [--flags]")
    time_scale = arguments.number("sim-time-scale", 1.0)
    if not 0 < time_scale < float("inf"):
        raise UsageError("must be above 0", where="--sim-time-scale")
    planted = faults.parse(arguments.every("sim-fault"))
    shape = _shape(arguments, name, planted)
    block_size = arguments.whole("block-size", shape.model.block_size)
    kv_blocks = arguments.whole("num-gpu-blocks-override", fitted.kv_tokens(shape) // block_size)
    max_num_seqs = arguments.whole("max-num-seqs", 1024)
    return Settings(
        model=name,
        served_name=arguments.text("served-model-name", name),
        host=arguments.text("host", "127.0.0.1"),
        port=arguments.whole("port", 8000),
        api_key=arguments.text("api-key", environment.get("VLLM_API_KEY", "")),
        shape=shape,
        limits=Limits(
            ranks=shape.data_parallel, kv_blocks=kv_blocks, block_size=block_size, max_num_seqs=max_num_seqs,
            # Each running sequence must be able to decode in every step; vLLM refuses to start otherwise.
            max_num_batched_tokens=max(arguments.whole("max-num-batched-tokens", 8192), max_num_seqs),
            prefix_caching=arguments.on("enable-prefix-caching", default=True),
            warm_prefix=planted.warm_prefix_cache,
            preempt_every=planted.preempt,
        ),
        max_model_len=arguments.whole("max-model-len", shape.model.max_model_len),
        time_scale=time_scale,
        expert_parallel=arguments.on("enable-expert-parallel"),
        humming_gemm=_humming_gemm(arguments, environment),
        log_throughput=arguments.whole("api-server-count", shape.data_parallel) == 1,
        faults=planted,
        given={flag: " ".join(values) or "True" for flag, values in arguments.flags.items()
               if not flag.startswith("sim-") and flag != "api-key"},
        guarded=inengine.GUARD in arguments.every("middleware"),
        environment=environment,
        profiles=_profiles(arguments.text("profiler-config", "{}")),
    )


def _profiles(config: str) -> str | None:
    try:
        folder: str | None = json.loads(config).get("torch_profiler_dir")
    except (ValueError, AttributeError) as error:
        raise UsageError(f"is no JSON object: {error}", where="--profiler-config") from None
    return folder


def _shape(arguments: Arguments, name: str, planted: Faults) -> fitted.Shape:
    model = fitted.model_for(name)
    backend = arguments.text("moe-backend", "auto").lower()
    if backend == "auto":
        # vLLM 0.33's own choice for fp4 experts on Hopper.
        backend = "humming" if "humming" in model.expert_token_s else ""
    if planted.wrong_moe_backend is not None:
        backend = planted.wrong_moe_backend or ("marlin" if backend == "humming" else "humming")
    return fitted.Shape(
        model=model,
        tensor_parallel=arguments.whole("tensor-parallel-size", 1),
        data_parallel=arguments.whole("data-parallel-size", 1),
        moe_backend=backend,
        gpu_memory_utilization=arguments.number("gpu-memory-utilization", 0.92),
    )


def _humming_gemm(arguments: Arguments, environment: Mapping[str, str]) -> str:
    """vLLM 0.33's choice, which the environment can overrule."""
    wanted = environment.get("VLLM_HUMMING_MOE_GEMM_TYPE", "auto")
    if wanted == "indexed" or (wanted == "auto" and not arguments.on("enable-expert-parallel")):
        return "indexed"
    return "grouped_contiguous"
