"""What an engine process can say of itself, written as JSON: ``$ISAMBARD_SERVE_FACTS/<pid>.json``.

vLLM runs :func:`register` in each EngineCore and worker while it is being made; a thread then looks on until the
model is loaded, rewrites the file whenever it knows more, and ends. Nothing is patched, and nothing that goes wrong
here reaches the engine: what cannot be read is null, and why stands in ``errors``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from types import FrameType
from typing import Any

from . import model

SCHEMA = "isambard-serve/facts/1"

TICK_S = 1.0
LIMIT_S = 3 * 3600.0
"""How long to wait for the model to be loaded."""
AFTER_S = 600.0
"""How long to look on after the model was loaded, if its KV cache is never seen."""

_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
_ERRORS = 5

Facts = dict[str, Any]


def register() -> None:
    """What vLLM calls. Processes that are neither EngineCore nor worker are passed over."""
    with contextlib.suppress(Exception):
        owner = _owner(sys._getframe(1))
        if owner is not None and os.environ.get("ISAMBARD_SERVE_FACTS"):
            threading.Thread(target=_look_on, args=owner, name="isambard-serve-facts", daemon=True).start()


def report_api_server() -> None:
    """Writes the facts of an API server; its guard calls this."""
    if os.environ.get("ISAMBARD_SERVE_FACTS"):
        with contextlib.suppress(Exception):
            _write(_gathered(["api_server"], None, None, []))


def _owner(frame: FrameType | None) -> tuple[Any, Any] | None:
    """The EngineCore, or the worker's wrapper, in whose making the plugin is called; one of the two is None."""
    while frame is not None:
        made = frame.f_locals.get("self")
        names = {kind.__name__ for kind in type(made).__mro__}
        if "WorkerWrapperBase" in names:
            return None, made
        if "EngineCore" in names:
            return made, None
        frame = frame.f_back
    return None


def _look_on(core: Any, wrapper: Any) -> None:
    """Writes the facts of this process, again whenever they change, until nothing more is to be expected."""
    errors: list[str] = []
    written: Facts = {}
    began = time.monotonic()
    loaded_at: float | None = None
    while time.monotonic() - began < LIMIT_S:
        try:
            worker = _worker(wrapper if core is None else _wrapper_inside(core))
            roles = ["engine_core"] * (core is not None) + ["worker"] * (wrapper is not None or worker is not None)
            facts = _gathered(roles, core if worker is None else None, worker, errors)
            if {**facts, "time": None} != {**written, "time": None}:
                _write(facts)
                written = facts
            if core is not None and worker is None and getattr(core, "scheduler", None) is not None:
                return  # its workers are processes of their own
            if worker is not None and model.loaded(worker):
                loaded_at = loaded_at or time.monotonic()
                if model.has_kv_cache(worker) or time.monotonic() - loaded_at > AFTER_S:
                    return
        except Exception:  # noqa: BLE001
            _note(errors)
        time.sleep(TICK_S)


def _wrapper_inside(core: Any) -> Any:
    """The wrapper of the worker that runs in the EngineCore's own process, as it does with one GPU a rank."""
    return getattr(getattr(core, "model_executor", None), "driver_worker", None)


def _worker(wrapper: Any) -> Any:
    """The worker, once its wrapper has it. Asked for what it lacks, the wrapper asks its worker, and so on for ever."""
    return None if wrapper is None else vars(wrapper).get("worker")


def _gathered(roles: list[str], core: Any, worker: Any, errors: list[str]) -> Facts:
    """All facts, as they are now."""
    facts: Facts = {
        "schema": SCHEMA,
        "time": time.time(),
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "roles": roles,
        "engine_version": getattr(sys.modules.get("vllm"), "__version__", None),
        "environment": environment(os.environ),
        **status(errors),
        **dict.fromkeys(model.FIELDS),
    }
    config = getattr(worker if worker is not None else core, "vllm_config", None)
    for read, given in ((model.ranks, (config, worker)), (model.device, (worker,)), (model.backends, (worker,))):
        try:
            facts.update(read(*given))
        except Exception:  # noqa: BLE001
            _note(errors)
    return {**facts, "errors": list(errors)}


def status(errors: list[str]) -> Facts:
    """What the kernel says of this process: pids from the outermost visible namespace in, CPUs, memory nodes."""
    lines: dict[str, str] = {}
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            lines = dict(line.rstrip("\n").split(":", 1) for line in file if ":" in line)
    except OSError:
        _note(errors)
    return {
        "ns_pids": [int(pid) for pid in lines.get("NSpid", "").split()],
        "cpus_allowed": lines.get("Cpus_allowed_list", "").strip() or None,
        "mems_allowed": lines.get("Mems_allowed_list", "").strip() or None,
    }


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a reader may want, without any that could be a secret."""
    shown = set(environ.get("ISAMBARD_SERVE_SHOWN", "").split()) | {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
    return {name: value for name, value in sorted(environ.items())
            if (name in shown or name.startswith("VLLM_")) and not any(part in name.upper() for part in _SECRET)}


def _note(errors: list[str]) -> None:
    """Keeps the error that is being handled, once, and not too many of them."""
    error = traceback.format_exc(limit=-2)[-1000:]
    if error not in errors and len(errors) < _ERRORS:
        errors.append(error)


def _write(facts: Facts) -> None:
    folder = os.environ["ISAMBARD_SERVE_FACTS"]
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, f"{facts['pid']}.json")
    temporary = f"{path}.{threading.get_native_id()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(facts, file, indent=1)
    os.replace(temporary, path)
