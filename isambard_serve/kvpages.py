"""The pages of the KV cache as the engine counts them, so that it can be told how many sequences fill it.

Entries times their bytes say little about DeepSeek-V4: a short sequence holds mostly windows and the compressors'
unfinished states, in blocks of 64, 4 and 8 tokens, and each block takes a page for every layer of its group. The
rules are vLLM's (``v1/core/kv_cache_utils.py``: ``group_and_unify_kv_cache_specs``,
``_get_kv_cache_groups_uniform_groups``, ``_get_kv_cache_config_packed``; ``v1/kv_cache_interface.py``), as of 0.26.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from isambard_serve.modelconfig import ModelConfig

_ALIGNMENT = 576        # of a page in the format fp8_ds_mla
_ENTRY = 584
_WINDOW_BLOCK = 64


@dataclass(frozen=True)
class Group:
    """Layers that share block tables: a block holds ``block_size`` tokens of them.

    Attributes:
        window: tokens that are kept; None: all.
        page_bytes: of the group's own layers, within the block.
    """

    block_size: int
    window: int | None
    page_bytes: int

    def blocks(self, tokens: float) -> float:
        """Blocks that a sequence of ``tokens`` holds while it decodes; a window lies across blocks as it happens to."""
        if self.window is None or tokens <= self.window:
            return tokens / self.block_size + 0.5       # the last one is half full
        return 1 + (self.window - 1) / self.block_size

    def most_blocks(self, tokens: int, in_flight: int) -> int:
        """The most that a sequence of ``tokens`` can hold, ``in_flight`` of them in steps that have not ended."""
        if self.window is None:
            return math.ceil(tokens / self.block_size)
        return math.ceil(min(self.window - 1 + in_flight, tokens) / self.block_size) + 1


@dataclass(frozen=True)
class Pages:
    """How a GPU's KV cache is cut up: all groups take blocks of ``block_bytes`` from one pool."""

    block_bytes: int
    groups: tuple[Group, ...]

    def blocks(self, memory_bytes: float) -> int:
        """Blocks in ``memory_bytes``."""
        return max(0, int(memory_bytes // self.block_bytes))

    def held(self, tokens: float) -> float:
        """Blocks that a decoding sequence of ``tokens`` holds, on average over where its windows lie."""
        return sum(group.blocks(tokens) for group in self.groups)

    def prefilling(self, tokens: int) -> int:
        """Blocks that a prompt of ``tokens`` holds in the step that computes it whole: windows slide only after."""
        return sum(math.ceil(tokens / group.block_size) for group in self.groups)

    def engines_concurrency(self, memory_bytes: float, max_model_len: int, in_flight: int) -> float:
        """What the engine's log calls "Maximum concurrency": far from what short sequences reach.

        Args:
            in_flight: ``max_num_batched_tokens``.
        """
        whole = self.groups[0].page_bytes
        most = sum(group.most_blocks(max_model_len, in_flight) * group.page_bytes for group in self.groups)
        return self.blocks(memory_bytes) / math.ceil(most / whole)


def pages(model: ModelConfig, tensor_parallel: int, block_size: int, entry_scale: float = 1.0) -> Pages:
    """The pages of ``model`` on each GPU.

    Args:
        block_size: tokens of a block (vLLM takes 256 alone for DeepSeek-V4).
        entry_scale: bytes of an entry as a share of bf16's (0.5 with an fp8 cache); DeepSeek-V4's are always fp8.
    """
    if model.family == "deepseek_v4":
        return _deepseek_v4(model, block_size)
    (attention,) = model.attention
    # One shared KV head is on every GPU; several are shared out.
    sharing = 1 if attention.shared else tensor_parallel
    page = math.ceil(attention.layers * attention.entry_bytes * entry_scale * block_size / sharing)
    return Pages(page, (Group(block_size, None, page),))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _deepseek_v4(model: ModelConfig, block_size: int) -> Pages:
    """Five kinds of blocks: compressed entries, windows, and the states of the compressors of ratio 4 and 128."""
    plain, fine, coarse = model.attention
    main = _aligned(block_size // fine.ratio * _ENTRY)
    index = _aligned(block_size // fine.ratio * int(fine.index_bytes))
    rough = _aligned(block_size // coarse.ratio * _ENTRY)
    # A compressor's state (fp32 values and scores, those of ratio 4 twice as wide) is padded to a page of the above.
    windows = plain.layers + fine.layers + coarse.layers
    per_group = _layers_per_group(fine.layers, [windows, fine.layers, coarse.layers])
    split = math.ceil(windows / per_group)
    slots = {main: max(fine.layers, math.ceil(windows / split)), index: fine.layers, rough: coarse.layers}
    full = Group(block_size, None, fine.layers * (main + index) + coarse.layers * rough)
    return Pages(sum(page * count for page, count in slots.items()), (
        full,
        *(Group(_WINDOW_BLOCK, fine.window, main * len(range(part, windows, split))) for part in range(split)),
        Group(4, 2 * fine.ratio, fine.layers * (main + index)),
        Group(8, coarse.ratio, coarse.layers * main),
    ))


def _layers_per_group(least: int, counts: list[int]) -> int:
    """vLLM's choice (``_approximate_gcd``): from ``least`` up, what leaves least padding; of equals the larger."""
    counts = [least, *counts]
    return min(range(least, max(counts) + 1), key=lambda size: (sum(-count % size for count in counts), -size))
