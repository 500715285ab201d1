"""A model's configuration (``config.json``) as what a step of it multiplies, moves and keeps.

Four families are understood: DeepSeek-V4 (three kinds of attention layers over one latent KV head, hyper-connections,
fp4 experts), DeepSeek-V3 (multi-head latent attention), and models of grouped-query attention, dense or with experts.
Sizes are the config's own; which matrices there are, and which of them tensor parallelism shards, is vLLM's
(``models/deepseek_v4/attention.py`` and ``nvidia/model.py``, ``model_executor/models/deepseek_v2.py``, ``qwen3.py``,
``qwen3_moe.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from isambard_serve import shipped
from isambard_serve.errors import UsageError

BF16 = 2.0
FP8 = 1.0
FP4 = 0.5 + 1 / 32
"""Bytes of a weight: an fp4 code, and an 8-bit scale for every 32 (OCP Microscaling Formats 1.0: MXFP4)."""

Arithmetic = Literal["bf16", "fp8"]

_LARGEST = 10**8
_SIZES = {
    **dict.fromkeys((
        "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "intermediate_size", "num_experts_per_tok", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
        "v_head_dim", "o_lora_rank", "o_groups", "index_n_heads", "index_head_dim", "index_topk", "hc_mult",
        "sliding_window", "max_position_embeddings", "moe_intermediate_size"), 1),
    **dict.fromkeys(("q_lora_rank", "n_routed_experts", "num_experts", "num_local_experts", "n_shared_experts",
                     "first_k_dense_replace"), 0),
}
"""The sizes that are read, and the least that each can be."""


@dataclass(frozen=True)
class Matrix:
    """``count`` matrices of n × k weights that every token meets.

    Attributes:
        sharded: whether tensor parallelism gives each GPU a part; otherwise each has it whole.
        weight_bytes: of one weight, its scales included.
        arithmetic: what it is multiplied in.
        every_token: whether each token of a step meets it; otherwise only those that give a token (the last layer).
    """

    n: int
    k: int
    count: int
    sharded: bool
    weight_bytes: float = BF16
    arithmetic: Arithmetic = "bf16"
    every_token: bool = True

    @property
    def weights(self) -> int:
        """How many there are."""
        return self.n * self.k * self.count


@dataclass(frozen=True)
class Experts:
    """The routed experts of ``layers`` layers: three matrices of hidden × intermediate each."""

    layers: int
    experts: int
    top_k: int
    intermediate: int
    weight_bytes: float


@dataclass(frozen=True)
class Attention:
    """``layers`` layers of attention that look at the same entries.

    Attributes:
        heads: query heads; ``least_heads`` of them are computed on each GPU, however few tensor parallelism leaves it.
        qk, v: width of a query's product with an entry, and of what is summed.
        entry_bytes: what reading one entry costs: of all KV heads, or of the one that they share.
        shared: whether all heads share one KV head, which every GPU of a tensor-parallel group then holds whole.
        window: the most recent tokens that are looked at; None: all.
        ratio: tokens of an entry beyond the window (0: there are none); ``top``: the most entries looked at.
        index_heads, index_dim, index_bytes: the indexer that chooses the ``top``, where there is one.
    """

    layers: int
    heads: int
    qk: int
    v: int
    entry_bytes: float
    shared: bool
    least_heads: int = 1
    window: int | None = None
    ratio: int = 0
    top: int | None = None
    index_heads: int = 0
    index_dim: int = 0
    index_bytes: float = 0.0

    def entries(self, context: float) -> float:
        """Entries that one token looks at behind ``context`` tokens."""
        if self.window is None:
            return context
        near = min(context, self.window)
        if not self.ratio:
            return near
        far = context / self.ratio
        return near + (far if self.top is None else min(far, self.top))


@dataclass(frozen=True)
class ModelConfig:
    """A model, as far as time and memory go.

    Attributes:
        streams: residual streams (hyper-connections have several).
        head_width: query heads × their width, over all GPUs: what attention reads and writes for a token.
        tables_bytes: tables of positions that each GPU holds.
        family: ``deepseek_v4`` has page accounting of its own.
    """

    name: str
    family: Literal["deepseek_v4", "mla", "gqa"]
    layers: int
    hidden: int
    vocabulary: int
    matrices: tuple[Matrix, ...]
    attention: tuple[Attention, ...]
    experts: Experts | None
    head_width: int
    streams: int = 1
    tables_bytes: float = 0.0

    def weight_bytes(self, tensor_parallel: int, expert_ranks: int) -> float:
        """Bytes of weights on each GPU, with the experts shared by ``expert_ranks``."""
        experts = self.experts
        routed = 0.0 if experts is None else (
            experts.layers * experts.experts * 3 * self.hidden * experts.intermediate * experts.weight_bytes)
        return (routed / expert_ranks + self.tables_bytes
                + sum(each.weights * each.weight_bytes / (tensor_parallel if each.sharded else 1)
                      for each in self.matrices)
                + self.vocabulary * self.hidden * BF16 / tensor_parallel)       # the embedding


def find(model: str, environment: Mapping[str, str]) -> ModelConfig | None:
    """The config of ``model``, a path or a hub's name; None where nothing here knows it.

    Args:
        environment: says where the hub's cache is (``HF_HOME``).

    Raises:
        UsageError: a config was found that cannot be read.
    """
    places = [Path(model) / "config.json"] if model.startswith("/") else [
        *sorted((Path(environment.get("HF_HOME", "/nonexistent")) / "hub" / f"models--{model.replace('/', '--')}"
                 / "snapshots").glob("*/config.json")),
        shipped.folder("models") / f"{model.rsplit('/', 1)[-1]}.json",
    ]
    for place in places:
        if place.is_file():
            try:
                return parse(model, _checked(json.loads(place.read_text())))
            except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
                raise UsageError(f"cannot be read as a model's config: {error!r}", where=str(place),
                                 remedy="mend it, or take it away, and nothing is foretold") from error
    return None


def _checked(config: Any) -> dict[str, Any]:
    """``config``, whose sizes are sizes; what is null is left out. Raises ValueError otherwise."""
    if not isinstance(config, dict):
        raise ValueError(f"{type(config).__name__} instead of a map")
    for key, least in _SIZES.items():
        size = config.get(key)
        if size is not None and not (type(size) is int and least <= size <= _LARGEST):
            raise ValueError(f"{key}: {size!r} instead of a whole number from {least} to {_LARGEST}")
    ratios = config.get("compress_ratios", [])
    if not isinstance(ratios, list) or not all(type(ratio) is int and 0 <= ratio <= _LARGEST for ratio in ratios):
        raise ValueError(f"compress_ratios: {ratios!r} instead of whole numbers")
    return {key: value for key, value in config.items() if value is not None}


def parse(name: str, config: Mapping[str, Any]) -> ModelConfig | None:
    """The model that ``config.json`` describes; None if its family is not understood.

    Raises:
        KeyError: the config lacks a size.
    """
    kind = config.get("model_type", "")
    if kind == "deepseek_v4":
        return _deepseek_v4(name, config)
    if "kv_lora_rank" in config:
        return _mla(name, config)
    if "num_key_value_heads" in config and "intermediate_size" in config:
        return _gqa(name, config)
    return None


def _precision(config: Mapping[str, Any]) -> tuple[float, Arithmetic]:
    """Bytes of a linear layer's weight, and what it is multiplied in."""
    quantization = config.get("quantization_config")
    method = str(quantization.get("quant_method", "")) if isinstance(quantization, dict) else ""
    return (FP8, "fp8") if "fp8" in method else (BF16, "bf16")


def _last(config: Mapping[str, Any]) -> Matrix:
    return Matrix(config["vocab_size"], config["hidden_size"], 1, sharded=True, every_token=False)


def _deepseek_v4(name: str, config: Mapping[str, Any]) -> ModelConfig:
    layers, hidden, heads, width = (config[key] for key in (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim"))
    ratios = [max(ratio, 1) for ratio in config["compress_ratios"][:layers]]
    fine, coarse = ratios.count(4), ratios.count(128)
    if len(ratios) < layers or not fine or not coarse or not config["n_routed_experts"]:
        raise ValueError("compress_ratios has not all kinds of layers, or there are no experts")
    query, output, groups = config["q_lora_rank"], config["o_lora_rank"], config["o_groups"]
    index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
    expert = config["moe_intermediate_size"]

    def fp8(n: int, k: int, count: int, *, sharded: bool) -> Matrix:
        return Matrix(n, k, count, sharded, FP8, "fp8")

    matrices = (
        fp8(query + width, hidden, layers, sharded=False),                      # fused_wqa_wkv
        fp8(heads * width, query, layers, sharded=True),                        # wq_b
        fp8(groups * output, heads * width // groups, layers, sharded=True),    # wo_a, one block a group
        fp8(hidden, groups * output, layers, sharded=True),                     # wo_b
        # The compressors: values and scores; those of ratio 4 overlap, and are twice as wide.
        Matrix(4 * width, hidden, fine, sharded=False),
        Matrix(2 * width, hidden, coarse, sharded=False),
        Matrix(4 * index_dim, hidden, fine, sharded=False),
        fp8(index_heads * index_dim, query, fine, sharded=False),
        Matrix(index_heads, hidden, fine, sharded=False),
        Matrix(config["n_routed_experts"], hidden, layers, sharded=False),      # the router
        fp8(3 * expert * config["n_shared_experts"], hidden, layers, sharded=True),
        _last(config),
    )
    entry = 584.0       # fp8_ds_mla: 448 B in fp8, 64 rotary dimensions in bf16, 8 B of scales
    # FlashMLA's fp8 kernel computes 64 heads or 128 (nvidia/flashmla.py: get_padded_num_q_heads).
    kinds = {"heads": heads, "qk": width, "v": width, "entry_bytes": entry, "shared": True, "least_heads": 64,
             "window": config["sliding_window"]}
    return ModelConfig(
        name=name, family="deepseek_v4", layers=layers, hidden=hidden, vocabulary=config["vocab_size"],
        matrices=matrices, streams=config["hc_mult"], head_width=heads * width,
        attention=(
            Attention(layers=ratios.count(1), **kinds),
            Attention(layers=fine, ratio=4, top=config["index_topk"], index_heads=index_heads, index_dim=index_dim,
                      index_bytes=index_dim + 4.0, **kinds),
            Attention(layers=coarse, ratio=128, **kinds),
        ),
        experts=Experts(layers, config["n_routed_experts"], config["num_experts_per_tok"], expert,
                        FP4 if config.get("expert_dtype", "fp4") == "fp4" else FP8),
        # Cosines and sines in fp32 for each position, of three kinds of layers.
        tables_bytes=3 * config["max_position_embeddings"] * config["qk_rope_head_dim"] * 4.0,
    )


def _mla(name: str, config: Mapping[str, Any]) -> ModelConfig:
    layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    latent, rope, nope, value = (config[key] for key in (
        "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    query = config.get("q_lora_rank") or 0
    weight, arithmetic = _precision(config)

    def linear(n: int, k: int, count: int, *, sharded: bool) -> Matrix:
        return Matrix(n, k, count, sharded, weight, arithmetic)

    down = (linear(query + latent + rope, hidden, layers, sharded=False),
            linear(heads * (nope + rope), query, layers, sharded=True)) if query else (
            linear(latent + rope, hidden, layers, sharded=False),
            linear(heads * (nope + rope), hidden, layers, sharded=True))
    return ModelConfig(
        name=name, family="mla", layers=layers, hidden=hidden, vocabulary=config["vocab_size"],
        matrices=(*down,
                  linear(heads * (nope + value), latent, layers, sharded=True),     # kv_b, absorbed when decoding
                  linear(hidden, heads * value, layers, sharded=True),
                  *_feed_forward(config, linear), _last(config)),
        attention=(Attention(layers=layers, heads=heads, qk=latent + rope, v=latent,
                             entry_bytes=(latent + rope) * BF16, shared=True),),
        experts=_experts(config, weight), head_width=heads * latent,
    )


def _gqa(name: str, config: Mapping[str, Any]) -> ModelConfig:
    layers, hidden, heads, shared = (config[key] for key in (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"))
    width = config.get("head_dim") or hidden // heads
    weight, arithmetic = _precision(config)

    def linear(n: int, k: int, count: int, *, sharded: bool) -> Matrix:
        return Matrix(n, k, count, sharded, weight, arithmetic)

    return ModelConfig(
        name=name, family="gqa", layers=layers, hidden=hidden, vocabulary=config["vocab_size"],
        matrices=(linear((heads + 2 * shared) * width, hidden, layers, sharded=True),
                  linear(hidden, heads * width, layers, sharded=True),
                  *_feed_forward(config, linear), _last(config)),
        attention=(Attention(layers=layers, heads=heads, qk=width, v=width, entry_bytes=2 * shared * width * BF16,
                             shared=False),),
        experts=_experts(config, weight), head_width=heads * width,
    )


def _routed(config: Mapping[str, Any]) -> int:
    """How many experts a layer has: 0 in a dense model."""
    return int(config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts") or 0)


def _expert_layers(config: Mapping[str, Any]) -> int:
    return int(config["num_hidden_layers"]) - int(config.get("first_k_dense_replace") or 0)


def _experts(config: Mapping[str, Any], weight: float) -> Experts | None:
    if not _routed(config):
        return None
    return Experts(_expert_layers(config), _routed(config), config["num_experts_per_tok"],
                   config.get("moe_intermediate_size") or config["intermediate_size"], weight)


def _feed_forward(config: Mapping[str, Any], linear: Any) -> tuple[Matrix, ...]:
    """The matrices behind attention that every token meets: dense layers, routers, shared experts."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    if not _routed(config):
        return (linear(3 * config["intermediate_size"], hidden, layers, sharded=True),)
    behind = _expert_layers(config)
    shared = int(config.get("n_shared_experts") or 0) * int(config.get("moe_intermediate_size") or 0)
    found = [Matrix(_routed(config), hidden, behind, sharded=False)]
    if layers > behind:
        found.append(linear(3 * config["intermediate_size"], hidden, layers - behind, sharded=True))
    if shared:
        found.append(linear(3 * shared, hidden, behind, sharded=True))
    return tuple(found)
