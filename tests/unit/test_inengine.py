"""What goes into the engine: the guard, and the facts, with objects that stand for vLLM's own."""

from __future__ import annotations

import asyncio
import enum
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from isambard_serve import inengine
from isambard_serve.inengine.isambard_serve_inengine import facts, guard, model
from isambard_serve.records import EngineFacts
from tests.support.waiting import wait_until

KEY = "secret"


def asked(scope: dict[str, Any], key: str = KEY) -> list[Any]:
    """What a guarded application sends in answer to ``scope``; "through" if it was let through."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send("through")

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", key)
        patch.delenv("ISAMBARD_SERVE_FACTS", raising=False)
        asyncio.run(guard.Guard(app)(scope, receive, send))
    return sent


def http(path: str, *authorizations: str, kind: str = "http") -> dict[str, Any]:
    return {"type": kind, "path": path, "headers": [(b"host", b"x")] + [
        (b"Authorization", word.encode()) for word in authorizations]}


@pytest.mark.parametrize("scope", [
    http("/v1/completions", f"Bearer {KEY}"), http("/metrics", f"Bearer {KEY}"), http("/health"),
    {"type": "lifespan"}, http("/v1/realtime", f"Bearer {KEY}", kind="websocket"),
])
def test_the_key_opens_everything_and_health_is_open(scope: dict[str, Any]) -> None:
    assert asked(scope) == ["through"]


@pytest.mark.parametrize("scope", [
    http("/metrics"), http("/invocations", "Bearer wrong"), http("/invocations", f"bearer{KEY}"),
    http("/health/more"), http("/healthz"), http("//health"), http("/", f"Bearer {KEY}", f"Bearer {KEY}"),
    http("/v1/models", "Bearer "), http("/v1/models", f"Bearer {KEY} "), http("/v1/models", KEY),
])
def test_all_else_is_401_as_json(scope: dict[str, Any]) -> None:
    start, body = asked(scope)
    assert start["status"] == 401
    assert (b"content-type", b"application/json") in start["headers"]
    assert json.loads(body["body"]) == {"error": "Unauthorized"}


def test_a_websocket_without_the_key_is_closed() -> None:
    assert [message["type"] for message in asked(http("/v1/realtime", kind="websocket"))] == ["websocket.close"]


@pytest.mark.parametrize("header", [(), ("Bearer ",), ("Bearer None",)])
def test_without_a_key_nothing_is_open_but_health(header: tuple[str, ...]) -> None:
    assert asked(http("/v1/models", *header), key="")[0]["status"] == 401
    assert asked(http("/health"), key="") == ["through"]


def test_it_runs_where_nothing_of_this_package_is_installed(tmp_path: Path) -> None:
    inengine.install(tmp_path / "put" / "there")
    script = ("import importlib.metadata as m, sys\n"
              "(point,) = m.entry_points(group='vllm.general_plugins')\n"
              "point.load()()\n"
              "import isambard_serve_inengine.guard\n"
              "print(sorted(name for name in sys.modules if name.startswith('isambard')))")
    given = inengine.variables(str(tmp_path / "put/there"), str(tmp_path / "facts"), [], None)
    done = subprocess.run([sys.executable, "-S", "-c", script], env=given, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str([f"isambard_serve_inengine{part}" for part in ("", ".facts", ".guard", ".model")])
    assert not (tmp_path / "facts").exists()  # a process that is neither EngineCore nor worker has nothing to say


class Mxfp4MoeBackend(enum.Enum):
    """Two of vLLM's."""

    MARLIN = "MARLIN"
    HUMMING = "HUMMING"


class FusedMoEMethodBase:
    """How a layer of experts computes; in vLLM a subclass keeps the backend."""

    def __init__(self, backend: Mxfp4MoeBackend | None, quant: Any = None) -> None:
        self.mxfp4_backend = backend
        self.moe_quant_config = quant


class Layer:
    """A layer, or a model that is made of layers."""

    def __init__(self, *layers: Layer, **attributes: Any) -> None:
        self.layers = layers
        vars(self).update(attributes)

    def modules(self) -> Iterator[Layer]:
        """All layers, this one first, as torch gives them."""
        return iter((self, *self.layers))


def attention(name: str, dtype: str) -> Layer:
    return Layer(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: name), kv_cache_dtype=dtype)


def experts(backend: str, **attributes: Any) -> Layer:
    quant = SimpleNamespace(quant_dtype=None, block_shape=None)
    return Layer(quant_method=FusedMoEMethodBase(Mxfp4MoeBackend[backend], quant), **attributes)


def worker(*layers: Layer, **attributes: Any) -> Any:
    parallel = SimpleNamespace(data_parallel_rank=1, tensor_parallel_size=2)
    return SimpleNamespace(rank=3, local_rank=3, vllm_config=SimpleNamespace(parallel_config=parallel),
                           model_runner=SimpleNamespace(model=Layer(*layers), kv_caches=[1]), **attributes)


class BFloat16:
    """As Humming writes its types: in small letters, by ``str``."""

    def __str__(self) -> str:
        return "bfloat16"


def test_the_kernels_are_those_of_all_layers() -> None:
    quantised = {"w13": SimpleNamespace(a_dtype="float8e4m3", input_scale_group_size=128)}
    layers = (attention("FLASHMLA", "fp8_ds_mla"), experts("HUMMING", humming_configs=quantised),
              attention("INDEXER", "fp8_ds_mla"), experts("HUMMING", humming_configs=quantised))
    assert model.backends(worker(*layers)) == {
        "moe_backend": ["humming"], "input_quant": ["float8e4m3 group 128"],
        "attention_backend": ["FLASHMLA", "INDEXER"], "kv_cache_dtype": ["fp8_ds_mla"]}


def test_a_layer_that_differs_shows() -> None:
    plain = {"w13": SimpleNamespace(a_dtype=BFloat16(), input_scale_group_size=0)}
    found = model.backends(worker(experts("HUMMING", humming_metas=plain), experts("MARLIN")))
    assert (found["moe_backend"], found["input_quant"]) == (["humming", "marlin"], ["none"])


def test_what_cannot_be_seen_of_one_layer_is_not_known() -> None:
    hidden = Layer(quant_method=FusedMoEMethodBase(None))
    found = model.backends(worker(experts("MARLIN"), hidden, experts("HUMMING")))
    assert (found["moe_backend"], found["input_quant"], found["attention_backend"]) == (None, None, [])
    assert found["kv_cache_dtype"] is None


@pytest.mark.parametrize(("dtype", "block", "text"), [
    (None, None, "none"), ("torch.float8_e4m3fn", [1, 128], "float8e4m3 group 128"),
    ("torch.float8_e4m3fn", None, "float8e4m3"), ("mxfp8", None, "mxfp8"),
])
def test_the_experts_input_is_read_off_vllms_own_description_too(dtype: object, block: object, text: str) -> None:
    method = FusedMoEMethodBase(Mxfp4MoeBackend.MARLIN, SimpleNamespace(quant_dtype=dtype, block_shape=block))
    wrapped = SimpleNamespace(old_quant_method=method)
    assert model.backends(worker(Layer(quant_method=wrapped)))["input_quant"] == [text]


def test_replicas_of_a_dense_model_are_told_apart_by_their_index() -> None:
    parallel = SimpleNamespace(data_parallel_rank=0, data_parallel_index=3, tensor_parallel_size=1)
    assert model.ranks(SimpleNamespace(parallel_config=parallel), None)["data_parallel_rank"] == 3


def test_nothing_is_said_of_a_model_that_is_not_loaded() -> None:
    assert model.backends(SimpleNamespace(model_runner=None)) == {}
    assert not model.loaded(None)


def test_a_gpu_is_named_by_its_pci_address_once_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(name="NVIDIA GH200 120GB", uuid="1-2", pci_domain_id=9, pci_bus_id=1, pci_device_id=0)
    cuda = SimpleNamespace(is_initialized=lambda: True, get_device_properties=lambda place: about)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert model.device(worker(device=SimpleNamespace(type="cuda"))) == {"device_type": "cuda", "device": {
        "name": "NVIDIA GH200 120GB", "uuid": "GPU-1-2", "pci_bus_id": "00000009:01:00.0"}}
    assert model.device(worker(device=SimpleNamespace(type="cpu"))) == {"device_type": "cpu"}
    cuda.is_initialized = lambda: False
    assert model.device(worker(device=SimpleNamespace(type="cuda"))) == {"device_type": "cuda"}
    assert model.device(worker()) == {"device_type": None}


class WorkerWrapperBase:
    """vLLM's wrapper, which has the plugins loaded and then makes its worker."""

    def __init__(self) -> None:
        facts.register()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)  # as vLLM has it: without a worker it never ends


class EngineCore:
    """vLLM's core: with one GPU a rank its worker runs in its own process."""

    def __init__(self) -> None:
        facts.register()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where facts go, soon."""
    monkeypatch.setenv("ISAMBARD_SERVE_FACTS", str(tmp_path / "facts"))
    monkeypatch.setenv("ISAMBARD_SERVE_SHOWN", "RECIPES RECIPES_PASSWORD")
    monkeypatch.setattr(facts, "TICK_S", 0.01)
    for name in ("RECIPES", "RECIPES_PASSWORD", "VLLM_X", "VLLM_API_KEY", "OTHER"):
        monkeypatch.setenv(name, "1")
    return tmp_path / "facts"


def said(folder: Path) -> EngineFacts | None:
    path = folder / f"{os.getpid()}.json"
    return msgspec.json.decode(path.read_bytes(), type=EngineFacts) if path.exists() else None


def waited_for(folder: Path, what: str, found: Any) -> EngineFacts:
    wait_until(lambda: (each := said(folder)) is not None and found(each), 10, what)
    each = said(folder)
    assert each is not None
    return each


def test_a_worker_says_at_once_who_it_is_and_later_what_it_runs(folder: Path) -> None:
    wrapper: Any = WorkerWrapperBase()
    first = waited_for(folder, "the first facts", lambda each: True)
    assert (first.roles, first.rank, first.moe_backend, first.errors) == (("worker",), None, None, ())
    assert first.environment == first.environment | {"RECIPES": "1", "VLLM_X": "1"}
    assert not {"RECIPES_PASSWORD", "VLLM_API_KEY", "OTHER"} & set(first.environment)
    wrapper.worker = worker(experts("MARLIN"))
    last = waited_for(folder, "its kernels", lambda each: each.moe_backend is not None)
    assert (last.moe_backend, last.data_parallel_rank, last.rank, last.tensor_parallel_rank) == (("marlin",), 1, 3, 1)
    assert not list(folder.glob("*.tmp"))


def test_a_core_with_its_worker_inside_is_both(folder: Path) -> None:
    core: Any = EngineCore()
    assert waited_for(folder, "the first facts", lambda each: True).roles == ("engine_core",)
    core.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker(experts("HUMMING"))))
    both = waited_for(folder, "its worker", lambda each: len(each.roles) == 2)
    assert (both.roles, both.moe_backend, both.input_quant) == (("engine_core", "worker"), ("humming",), None)


def test_what_goes_wrong_is_said_and_harms_nobody(folder: Path) -> None:
    wrapper: Any = WorkerWrapperBase()

    def modules() -> Any:
        raise RuntimeError("this vLLM is another one")

    wrapper.worker = worker()
    wrapper.worker.model_runner.model.modules = modules
    wrong = waited_for(folder, "the error", lambda each: each.errors)
    assert "this vLLM is another one" in wrong.errors[0]
    assert (wrong.moe_backend, wrong.rank) == (None, 3)


def test_nothing_is_written_where_nobody_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISAMBARD_SERVE_FACTS")
    facts.report_api_server()
    WorkerWrapperBase()
    monkeypatch.setenv("ISAMBARD_SERVE_FACTS", "/dev/null/no/folder")
    facts.report_api_server()
    assert not folder.exists()
