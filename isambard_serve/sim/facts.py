"""The facts that vLLM's processes would write with our plugin in them; here one process pretends to be all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from isambard_serve.inengine.isambard_serve_inengine import facts as plugin
from isambard_serve.records import Device, EngineFacts
from isambard_serve.sim.settings import VERSION, Settings, gpu

_LOADED = {"moe_backend": (), "input_quant": (), "attention_backend": ("FLASH_ATTN",), "kv_cache_dtype": ("auto",)}


def write(settings: Settings) -> None:
    """Writes the facts of an API server and of every worker, if ``$ISAMBARD_SERVE_FACTS`` says where to."""
    where = settings.environment.get("ISAMBARD_SERVE_FACTS")
    if not where or settings.faults.no_facts:
        return
    folder = Path(where)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.json").write_bytes(msgspec.json.encode(_facts(settings, "api_server")))
    for rank in range(settings.shape.gpus):
        data_parallel, tensor_parallel = divmod(rank, settings.shape.tensor_parallel)
        worker = msgspec.structs.replace(
            _facts(settings, "worker"), data_parallel_rank=data_parallel, tensor_parallel_rank=tensor_parallel,
            rank=tensor_parallel, local_rank=rank, device_type="cuda", device=_device(rank), **_kernels(settings, rank))
        (folder / f"{os.getpid()}.rank{rank}.json").write_bytes(msgspec.json.encode(worker))


def _facts(settings: Settings, role: Literal["api_server", "worker"]) -> EngineFacts:
    variables = plugin.environment(settings.environment)
    if role == "worker":
        variables.pop(settings.faults.lost_variable, None)
    errors: list[str] = []
    return EngineFacts(
        schema=plugin.SCHEMA, time=time.time(), pid=os.getpid(), ppid=os.getppid(), roles=(role,),
        engine_version=VERSION, data_parallel_rank=None, tensor_parallel_rank=None, rank=None, local_rank=None,
        device_type=None, device=None, environment=variables, moe_backend=None, attention_backend=None,
        kv_cache_dtype=None, input_quant=None, **plugin.status(errors), errors=tuple(errors))


def _device(rank: int) -> Device:
    return Device(name="simulated GPU", uuid=gpu(rank), pci_bus_id=f"00000000:{rank + 1:02X}:00.0")


def _kernels(settings: Settings, rank: int) -> Mapping[str, Any]:
    backend = settings.shape.moe_backend
    if not backend:
        return {**_LOADED, "kv_cache_dtype": (settings.given.get("kv-cache-dtype", "auto"),)}
    if rank == settings.faults.odd_rank:
        backend = "marlin" if backend == "humming" else "humming"
    return {"moe_backend": (backend,), "input_quant": (_input_quant(settings, backend),),
            "attention_backend": ("FLASHMLA_SPARSE_DSV4",), "kv_cache_dtype": ("fp8_ds_mla",)}


def _input_quant(settings: Settings, backend: str) -> str:
    """What a worker makes of the variable; without it the input stays as it is, as in vLLM 0.26."""
    name = "VLLM_HUMMING_INPUT_QUANT_CONFIG"
    if backend != "humming" or name == settings.faults.lost_variable or name not in settings.environment:
        return "none"
    wanted = json.loads(settings.environment[name])
    return f"{wanted['dtype']} group {wanted['input_scale_group_size']}"
