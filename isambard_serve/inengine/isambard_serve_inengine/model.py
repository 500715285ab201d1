"""What can be read off a worker's own objects, as vLLM 0.26 to 0.33 make them; null where it cannot be seen."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable
from typing import Any

FIELDS = ("data_parallel_rank", "tensor_parallel_rank", "rank", "local_rank", "device_type", "device",
          "moe_backend", "attention_backend", "kv_cache_dtype", "input_quant")


def loaded(worker: Any) -> bool:
    """Whether the worker has its model: vLLM sets it once its weights are loaded and processed."""
    return _model(worker) is not None


def has_kv_cache(worker: Any) -> bool:
    """Whether the worker has its KV cache, which comes after the profiling run: all kernels are chosen by then."""
    return bool(getattr(getattr(worker, "model_runner", None), "kv_caches", None))


def ranks(config: Any, worker: Any) -> dict[str, Any]:
    """Which rank this process is. ``rank`` counts within the DP replica, ``local_rank`` is the device's number."""
    parallel = getattr(config, "parallel_config", None)
    if parallel is None:
        return {}
    rank = getattr(worker, "rank", None)
    # Replicas of a dense model know nothing of each other, and each has the rank 0; the index still tells them apart.
    own = getattr(parallel, "data_parallel_rank", None)
    return {
        "data_parallel_rank": getattr(parallel, "data_parallel_index", own),
        "tensor_parallel_rank": None if rank is None else rank % parallel.tensor_parallel_size,
        "rank": rank,
        "local_rank": getattr(worker, "local_rank", None),
    }


def device(worker: Any) -> dict[str, Any]:
    """What the worker computes on, ``cuda`` or ``cpu``; a GPU by PCI address and UUID, once CUDA is in use there."""
    torch = sys.modules.get("torch")
    place = getattr(worker, "device", None)
    found = {"device_type": getattr(place, "type", None)}
    if torch is None or found["device_type"] != "cuda" or not torch.cuda.is_initialized():
        return found
    about = torch.cuda.get_device_properties(place)
    return {**found, "device": {
        "name": about.name,
        "uuid": f"GPU-{about.uuid}",
        "pci_bus_id": f"{about.pci_domain_id:08X}:{about.pci_bus_id:02X}:{about.pci_device_id:02X}.0",
    }}


def backends(worker: Any) -> dict[str, Any]:
    """The kernels that the layers run with: each field lists what its layers have, without repetition.

    An empty list: the model has no such layers. None: there are such layers, and it cannot be seen.
    """
    model = _model(worker)
    if model is None:
        return {}
    experts = [(layer, method) for layer in model.modules() if (method := _moe_method(layer)) is not None]
    attention = [layer for layer in model.modules() if callable(getattr(layer, "get_attn_backend", None))]
    return {
        "moe_backend": _distinct(_moe_backend(method) for _, method in experts),
        "input_quant": _distinct(_input_quant(layer, method) for layer, method in experts),
        "attention_backend": _distinct(layer.get_attn_backend().get_name() for layer in attention),
        "kv_cache_dtype": _kv_cache_dtype(worker, attention),
    }


def _model(worker: Any) -> Any:
    return getattr(getattr(worker, "model_runner", None), "model", None)


def _distinct(values: Iterable[str | None]) -> list[str] | None:
    seen = set(values)
    known = {value for value in seen if value is not None}
    return sorted(known) if known == seen else None


def _moe_method(layer: Any) -> Any:
    """How a layer of routed experts computes; None for any other layer."""
    method = getattr(layer, "quant_method", None)
    method = getattr(method, "old_quant_method", method)  # one that was put around it
    is_moe = any(kind.__name__ == "FusedMoEMethodBase" for kind in type(method).__mro__)
    return method if is_moe else None


def _moe_backend(method: Any) -> str | None:
    """The backend that vLLM chose: each method keeps it as ``<weights>_backend``, a member of an enumeration."""
    chosen = [value for name, value in vars(method).items()
              if name.endswith("backend") and isinstance(value, enum.Enum)]
    return str(chosen[0].value).lower() if len(chosen) == 1 else None


def _input_quant(layer: Any, method: Any) -> str | None:
    """What the experts' input is quantised to: ``float8e4m3 group 128``; ``none`` if it stays as it is."""
    # Humming's own description of the kernel (0.26: metas, later: configs), as it was built for this layer.
    for name in ("humming_configs", "humming_metas"):
        described = getattr(layer, name, None) or getattr(method, name, None)
        if described:
            return _quantised(described["w13"].a_dtype, described["w13"].input_scale_group_size)
    config = getattr(method, "moe_quant_config", None)
    if config is None or "humming" in (_moe_backend(method) or ""):
        return None
    block = config.block_shape
    return _quantised(config.quant_dtype, block[-1] if block else 0)


def _quantised(dtype: Any, group_size: int) -> str:
    """``float8e4m3 group 128`` of Humming's or torch's type; 16 bits are not quantised."""
    name = str(dtype).lower()
    name = {"torch.float8_e4m3fn": "float8e4m3", "torch.float8_e5m2": "float8e5m2"}.get(name, name)
    if name.endswith("float16") or name == "none":
        return "none"
    return f"{name} group {group_size}" if group_size else name


def _kv_cache_dtype(worker: Any, attention: list[Any]) -> list[str] | None:
    chosen = {getattr(layer, "kv_cache_dtype", None) for layer in attention} - {None}
    if not chosen:
        chosen = {getattr(getattr(worker, "cache_config", None), "cache_dtype", None)}
    return _distinct(value if value is None else str(value) for value in chosen)
