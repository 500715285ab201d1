"""Models from their configs: as many weights as are published of them, on as many GPUs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from isambard_serve import cost, modelconfig, shipped, site
from isambard_serve.errors import UsageError
from isambard_serve.modelconfig import BF16, FP8, ModelConfig
from tests.unit.helpers import SAMPLES, loaded

GIB = 2**30


def model(name: str) -> ModelConfig:
    """The model whose config lies in the samples."""
    found = modelconfig.parse(name, json.loads((SAMPLES / "models" / f"{name}.json").read_text()))
    assert found
    return found


def flash(layers: int = 43) -> ModelConfig:
    """DeepSeek-V4-Flash, cut to its first layers."""
    config = json.loads((shipped.folder("models") / "DeepSeek-V4-Flash.json").read_text())
    found = modelconfig.parse("flash", {**config, "num_hidden_layers": layers})
    assert found
    return found


def weights(found: ModelConfig) -> float:
    """Parameters, the embedding's and the experts' among them."""
    experts = found.experts
    routed = 3 * experts.layers * experts.experts * found.hidden * experts.intermediate if experts else 0
    return sum(each.weights for each in found.matrices) + found.vocabulary * found.hidden + routed


@pytest.mark.parametrize(("name", "billions"), [("qwen3-32b", 32.8), ("qwen3-30b-a3b", 30.5), ("deepseek-v3", 671.0)])
def test_a_model_has_as_many_parameters_as_its_makers_say(name: str, billions: float) -> None:
    assert weights(model(name)) / 1e9 == pytest.approx(billions, rel=0.005)


def test_deepseek_v4_flash_has_284_billion_parameters_and_three_kinds_of_attention_layers() -> None:
    found = flash()
    assert weights(found) / 1e9 == pytest.approx(284, rel=0.005)
    assert [(each.layers, each.ratio) for each in found.attention] == [(2, 0), (21, 4), (20, 128)]


def test_the_weights_of_a_gpu_are_what_the_engine_loaded() -> None:
    # vLLM 0.26 on two H200s, tensor parallel with expert parallelism, 11 of the 43 layers:
    # "Model loading took 20.27 GiB memory".
    assert flash(layers=11).weight_bytes(tensor_parallel=2, expert_ranks=2) / GIB == pytest.approx(20.27, rel=0.01)


@pytest.mark.parametrize("name", ["qwen3-32b", "qwen3-30b-a3b", "deepseek-v3"])
def test_weights_are_shared_out_and_what_is_replicated_is_held_by_all(name: str) -> None:
    found = model(name)
    alone, of_four = found.weight_bytes(1, 1), found.weight_bytes(4, 4)
    replicated = sum(each.weights * each.weight_bytes for each in found.matrices if not each.sharded)
    assert of_four == pytest.approx((alone - replicated) / 4 + replicated)


def test_precision_is_the_configs() -> None:
    assert {each.weight_bytes for each in model("qwen3-32b").matrices} == {BF16}
    experts = model("deepseek-v3").experts
    assert experts
    assert experts.weight_bytes == FP8


def test_an_mla_model_without_a_low_rank_query_is_understood() -> None:
    config = json.loads((SAMPLES / "models/deepseek-v3.json").read_text())
    found = modelconfig.parse("lite", {**config, "q_lora_rank": None})
    assert found
    assert (192 * 128, 7168) in {(each.n, each.k) for each in found.matrices}


@pytest.mark.parametrize(("context", "entries"), [(64, 64 + 16), (1024, 128 + 256), (100_000, 128 + 512)])
def test_a_token_looks_at_a_window_and_the_best_of_what_is_compressed(context: int, entries: float) -> None:
    fine = flash().attention[1]
    assert fine.entries(context) == entries
    assert model("qwen3-32b").attention[0].entries(context) == context


def test_a_model_is_found_by_path_in_the_hubs_cache_or_among_those_shipped(tmp_path: Path) -> None:
    config = (SAMPLES / "models/qwen3-32b.json").read_text()
    snapshot = tmp_path / "hub/models--Qwen--Qwen3-32B/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(config)
    in_cache = modelconfig.find("Qwen/Qwen3-32B", {"HF_HOME": str(tmp_path)})
    by_path = modelconfig.find(str(snapshot), {})
    assert in_cache
    assert by_path
    assert in_cache.matrices == by_path.matrices
    assert modelconfig.find("deepseek-ai/DeepSeek-V4-Flash", {}) is not None
    assert modelconfig.find("nobody/knows-it", {"HF_HOME": str(tmp_path)}) is None
    assert modelconfig.parse("odd", {"model_type": "mamba"}) is None


@pytest.mark.parametrize("text", [
    "no json", '{"kv_lora_rank": 1}', '{"model_type": "deepseek_v4"}', "[]", "null", "\ud800", "[" * 5000 + "]" * 5000])
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(UsageError, match="cannot be read as a model's config"):
        modelconfig.find(str(tmp_path), {})


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b", "DeepSeek-V4-Flash"])
@pytest.mark.parametrize("value", [0, -1, "8", 1.5, [8], True, 10**30, None, float("inf")])
def test_a_size_that_is_none_is_an_error_or_is_not_needed_and_nothing_is_reckoned_with_it(
        name: str, value: object, tmp_path: Path) -> None:
    place = SAMPLES / "models" / f"{name}.json"
    config = json.loads((place if place.is_file() else shipped.folder("models") / place.name).read_text())
    model_of = loaded("dp4"), site.load("isambard-ai")
    for key in config:
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        with contextlib.suppress(UsageError):
            forecast = cost.forecast(*model_of, modelconfig.find(str(tmp_path), {}))
            assert forecast is None or 0 < forecast.output_tok_s < 1e6
