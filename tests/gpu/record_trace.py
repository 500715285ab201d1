"""Records a torch profiler trace of a decode loop on a GPU: what `trace` is tested on.

The loop looks like a served mixture-of-experts model of three layers: attention over a KV cache, an fp8
linear layer, a router and 64 experts in fp8, logits, argmax. With more than one GPU, all-reduces join in.

    python tests/gpu/record_trace.py graph OUT_DIR     # the layers captured in a CUDA graph and replayed
    python tests/gpu/record_trace.py eager OUT_DIR     # kernel after kernel, in steps marked by the profiler
    torchrun --nproc-per-node 2 tests/gpu/record_trace.py graph OUT_DIR     # on two GPUs, with NCCL

It needs torch (2.11 was used), triton and a GPU that knows fp8, and nothing else. Each GPU writes
`OUT_DIR/MODE-rankR.trace.json.gz`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import triton
import triton.language as tl
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, schedule

STEPS = 50
WARM_UP = 10
LAYERS = 3
GROUP = 128
"""Values of an activation that share one fp8 scale."""
BLOCK_M = 16
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@triton.jit
def per_token_group_quant_fp8(x, y, scales, group: tl.constexpr):
    offset = tl.program_id(0) * group + tl.arange(0, group)
    values = tl.load(x + offset).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values)), 1e-10) / 448.0
    tl.store(y + offset, (values / scale).to(y.dtype.element_ty))
    tl.store(scales + tl.program_id(0), scale)


@triton.jit
def reshape_and_cache_kernel(kv, cache, position, context, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0)
    offset = tl.arange(0, block)
    value = tl.load(kv + row * width + offset, mask=offset < width)
    tl.store(cache + (row * context + tl.load(position)) * width + offset, value, mask=offset < width)


@triton.jit
def fused_moe_kernel(a, a_scales, w, c, rows, experts, n, k, valid, share: tl.constexpr, group: tl.constexpr,
                     block_m: tl.constexpr, block_n: tl.constexpr):
    """One block of tokens, all of the same expert, by one block of that expert's columns."""
    row = tl.load(rows + tl.program_id(0) * block_m + tl.arange(0, block_m))
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    mask = row < valid
    if tl.max(mask.to(tl.int32)) == 0:
        return
    columns = tl.program_id(1) * block_n + tl.arange(0, block_n)
    inner = tl.arange(0, group)
    source = row // share
    total = tl.zeros((block_m, block_n), tl.float32)
    for start in range(0, k, group):
        left = tl.load(a + source[:, None] * k + start + inner[None, :], mask=mask[:, None], other=0.0)
        scale = tl.load(a_scales + source * (k // group) + start // group, mask=mask, other=0.0)
        right = tl.load(w + expert * n * k + columns[None, :] * k + start + inner[:, None])
        total += tl.dot(left, right) * scale[:, None]
    tl.store(c + row[:, None] * n + columns[None, :], total.to(c.dtype.element_ty), mask=mask[:, None])


def quantised(x: Any) -> tuple[Any, Any]:
    """``x`` in fp8, and one scale for each 128 values of a row."""
    y = torch.empty_like(x, dtype=FP8)
    scales = torch.empty(x.shape[0], x.shape[1] // GROUP, device=x.device)
    per_token_group_quant_fp8[(x.numel() // GROUP,)](x, y, scales, GROUP)
    return y, scales


def moe_gemm(x: Any, w: Any, rows: Any, experts: Any, valid: int, share: int) -> Any:
    """Each row's product with its expert's weights; ``share`` rows in turn read the same row of ``x``."""
    _, n, k = w.shape
    y, scales = quantised(x)
    c = torch.empty(valid, n, dtype=torch.bfloat16, device=x.device)
    fused_moe_kernel[(experts.shape[0], n // 128)](y, scales, w, c, rows, experts, n, k, valid, share, GROUP,
                                                  BLOCK_M, 128)
    return c


def aligned(chosen: Any, count: int) -> tuple[Any, Any]:
    """The rows in the order of their experts, each expert's padded to whole blocks, and each block's expert.

    All shapes are fixed, so that a CUDA graph can hold it.
    """
    flat = chosen.flatten()
    valid = flat.shape[0]
    counts = torch.zeros(count, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    ends = padded.cumsum(0)
    by_expert, order = flat.sort(stable=True)
    place = torch.arange(valid, device=flat.device) + (ends - padded - counts.cumsum(0) + counts)[by_expert]
    size = valid + count * BLOCK_M
    rows = torch.full((size,), valid, dtype=torch.int64, device=flat.device).scatter_(0, place, order)
    starts = torch.arange(0, size, BLOCK_M, device=flat.device)
    return rows, torch.searchsorted(ends, starts, right=True).clamp_(max=count - 1)


class Layer:
    """One layer's weights and KV cache."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        hidden, heads, width = options.hidden, options.heads, 128
        self.options = options

        def weights(*shape: int, dtype: Any = torch.bfloat16) -> Any:
            made = torch.empty(shape, dtype=dtype, device=device)
            for part in made.view(-1, shape[-1]).split(1 << 16):
                part.copy_((torch.randn(part.shape, device=device) * shape[-1] ** -0.5).to(dtype))
            return made

        self.qkv = weights(3 * heads * width, hidden)
        self.out = weights(hidden, heads * width)
        self.dense = weights(hidden, hidden, dtype=FP8)
        self.router = weights(options.experts, hidden)
        self.w13 = weights(options.experts, 2 * options.inner, hidden, dtype=FP8)
        self.w2 = weights(options.experts, hidden, options.inner, dtype=FP8)
        self.cache = weights(2, options.batch, options.context, heads * width)
        self.position = torch.full((1,), options.context - 1, dtype=torch.int64, device=device)
        self.one = torch.ones((), device=device)

    def __call__(self, x: Any) -> Any:
        """The layer applied to a batch of rows."""
        x = x + self.attention(functional.rms_norm(x, x.shape[-1:]))
        normed = functional.rms_norm(x, x.shape[-1:])
        x = x + torch._scaled_mm(normed.to(FP8), self.dense.t(), self.one, self.one, out_dtype=x.dtype)
        return x + self.experts(functional.rms_norm(x, x.shape[-1:]))

    def attention(self, x: Any) -> Any:
        """Attention over the whole context; the newest entry is written into the cache first."""
        options = self.options
        q, *kv = functional.linear(x, self.qkv).chunk(3, dim=1)
        for new, cache in zip(kv, self.cache, strict=True):
            width = new.shape[1]
            reshape_and_cache_kernel[(options.batch,)](new.contiguous(), cache, self.position, options.context, width,
                                                      triton.next_power_of_2(width))
        keys, values = (cache.view(options.batch, options.context, options.heads, -1).transpose(1, 2)
                        for cache in self.cache)
        q = q.reshape(options.batch, options.heads, 1, -1)
        attended = functional.scaled_dot_product_attention(q, keys, values)
        return summed(functional.linear(attended.reshape(options.batch, -1), self.out))

    def experts(self, x: Any) -> Any:
        """The router, and the experts that it chose."""
        options = self.options
        scores = functional.linear(x, self.router).float().sigmoid()
        weight, chosen = scores.topk(options.top, dim=1)
        weight = weight / weight.sum(1, keepdim=True)
        rows, experts = aligned(chosen, options.experts)
        valid = chosen.numel()
        gate, up = moe_gemm(x, self.w13, rows, experts, valid, options.top).chunk(2, dim=1)
        each = moe_gemm(functional.silu(gate) * up, self.w2, rows, experts, valid, 1)
        return summed((each.view(options.batch, options.top, -1) * weight.to(x.dtype).unsqueeze(2)).sum(1))


def summed(x: Any) -> Any:
    """``x`` summed over all GPUs, where there are several."""
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(x)
    return x


class Loop:
    """The decode loop: token ids in, layers, logits, the likeliest token out."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        self.embedding = torch.randn(options.vocabulary, options.hidden, device=device).to(torch.bfloat16)
        self.layers = [Layer(options, device) for _ in range(LAYERS)]
        self.tokens = torch.zeros(options.batch, dtype=torch.int64, device=device)
        pinned = device != "cpu"
        self.given = torch.randint(options.vocabulary, (options.batch,), pin_memory=pinned)
        self.taken = torch.zeros(options.batch, dtype=torch.int64, pin_memory=pinned)

    def layers_and_logits(self) -> Any:
        """What the CUDA graph holds."""
        x = self.embedding[self.tokens]
        for layer in self.layers:
            x = layer(x)
        return functional.linear(functional.rms_norm(x, x.shape[-1:]), self.embedding)

    def step(self, forward: Callable[[], Any]) -> None:
        """One step. Nothing waits for the GPU: as in an engine, it falls behind the program."""
        self.tokens.copy_(self.given, non_blocking=True)
        self.taken.copy_(forward().argmax(1), non_blocking=True)


def captured(loop: Loop) -> Callable[[], Any]:
    """The layers and logits as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            loop.layers_and_logits()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # NCCL's own thread asks after events while we capture; only this thread's calls count.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits = loop.layers_and_logits()

    def replay() -> Any:
        graph.replay()
        return logits

    return replay


def record(mode: str, loop: Loop, path: Path) -> None:
    """Runs the loop and writes the trace of 50 steps. Eager steps are marked, a graph's are not."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    forward = captured(loop) if mode == "graph" else loop.layers_and_logits
    for _ in range(WARM_UP):
        loop.step(forward)
    torch.cuda.synchronize()
    if mode == "graph":
        with profile(activities=activities) as profiler:
            for _ in range(STEPS):
                loop.step(forward)
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        return
    with profile(activities=activities, schedule=schedule(wait=1, warmup=2, active=STEPS, repeat=1),
                 on_trace_ready=lambda done: done.export_chrome_trace(str(path))) as profiler:
        for _ in range(3 + STEPS):
            loop.step(forward)
            if profiler.step_num == 2 + STEPS:
                torch.cuda.synchronize()  # the last step's kernels belong into the trace
            profiler.step()


def main() -> None:
    """Parses, sets up, records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["graph", "eager"])
    parser.add_argument("folder", type=Path)
    for name, default in {"batch": 256, "hidden": 4096, "heads": 8, "context": 512, "experts": 64, "inner": 2048,
                          "top": 6, "vocabulary": 32768}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        torch.distributed.init_process_group("nccl")
    torch.manual_seed(rank)
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"{options.mode}-rank{rank}.trace.json.gz"
    with torch.inference_mode():
        record(options.mode, Loop(options, "cuda"), path)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
