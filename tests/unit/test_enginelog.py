"""The engine's log: recorded logs say what they said, and an unknown version says nothing."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from isambard_serve import enginelog
from isambard_serve.enginelog import Log
from isambard_serve.sim import log as simulated
from isambard_serve.sim import settings
from tests.unit.helpers import SAMPLES


def recorded(version: str) -> list[str]:
    return (SAMPLES / f"vllm-{version}.log").read_text().splitlines()


def test_the_log_of_0_26_on_two_gpus_says_what_it_said() -> None:
    log = enginelog.read(recorded("0.26"))
    assert log == Log(
        version="0.26.0", known=True, moe_backend=("marlin",), kv_cache_dtype=("fp8", "fp8_ds_mla"),
        kv_cache_tokens=1_155_527, weights_gib=20.27, graphs_gib=0.36, init_s=82.71, monitors=True,
        compiled=log.compiled)
    assert len(log.compiled) == 12  # six of Triton, two of TileLang, and what TileLang itself says on each rank
    assert log.compiled[0] == "Triton kernel JIT compilation during inference: _compute_slot_mapping_kernel."
    assert log.compiled[-1] == "TileLang begins to compile kernel `mhc_pre_big_fuse_with_norm_tilelang`"


def test_the_log_of_0_32_on_a_cpu_says_what_it_said() -> None:
    assert enginelog.read(recorded("0.32")) == Log(
        version="0.32.0", known=True, kv_cache_tokens=2_097_152, init_s=32.5)


LINES = {
    "Using 'HUMMING' Mxfp4 MoE backend.": ("moe_backend", ("humming",)),
    "Using FLASHINFER_CUTLASS Fp8 MoE backend out of potential backends: ['A', 'B'].": (
        "moe_backend", ("flashinfer_cutlass",)),
    "Using 'MARLIN' WNA16 MoE backend.": ("moe_backend", ("marlin",)),
    "Using TRITON Unquantized MoE backend out of potential backends: ['TRITON'].": ("moe_backend", ("triton",)),
    "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'TRITON_ATTN'].": (
        "attention_backend", ("FLASH_ATTN",)),
    "Using AttentionBackendEnum.FLASHMLA attention backend out of potential backends: [x].": (
        "attention_backend", ("FLASHMLA",)),
    "Using DeepSeek's fp8_ds_mla KV cache format.": ("kv_cache_dtype", ("fp8_ds_mla",)),
    "Model loading took 39.12 GiB memory and 61.203 seconds": ("weights_gib", 39.12),
    "non-default args: {'model_tag': 'm', 'jit_monitor_verbose': True, 'x': 1}": ("verbose", True),
    "Kernel JIT monitor activated; monitored JIT compilations during inference will use mode=warn.": (
        "monitors", True),
}


@pytest.mark.parametrize(("line", "said"), LINES.items(), ids=[line[:40] for line in LINES])
@pytest.mark.parametrize("version", enginelog.PATTERNS)
def test_each_known_version_says_it_in_the_words_of_its_source(line: str, said: tuple[str, object],
                                                                version: str) -> None:
    log = enginelog.read([f"(EngineCore pid=1) Initializing a V1 LLM engine (v{version}.1+cu130) with config: x", line])
    assert (getattr(log, said[0]), log.version, log.known) == (said[1], f"{version}.1+cu130", True)


def test_the_smallest_kv_cache_and_the_largest_weights_of_the_ranks_count() -> None:
    lines = ["Initializing a V1 LLM engine (v0.33.0) with config", *(
        f"GPU KV cache size: {tokens} tokens, Maximum concurrency for 2,048 tokens per request: 9.00x"
        for tokens in ("1,234,567", "1,234,000", "9,999,999")), *(
        f"Model loading took {gib} GiB memory and 1.0 seconds" for gib in (1.5, 2.5, 2.0))]
    assert (enginelog.read(lines).kv_cache_tokens, enginelog.read(lines).weights_gib) == (1_234_000, 2.5)


@pytest.mark.parametrize("version", ["0.34.0", "0.3.3", "1.0", "0.330.0", "dev"])
def test_an_unknown_version_is_not_read(version: str) -> None:
    lines = [line.replace("(v0.26.0)", f"(v{version})") for line in recorded("0.26")]
    assert enginelog.read(lines) == Log(version=version, known=False)
    assert enginelog.compilations(lines, version) is None


def test_a_log_without_a_version_says_nothing() -> None:
    assert enginelog.read(["Using 'HUMMING' Mxfp4 MoE backend."]) == Log()
    assert enginelog.compilations(["x"], None) is None


def test_what_is_compiled_before_the_engine_serves_is_no_matter() -> None:
    lines = recorded("0.26")
    ready = next(number for number, line in enumerate(lines) if "Kernel JIT monitor activated" in line)
    assert enginelog.read(lines[:ready]).compiled == ()
    assert enginelog.compilations(lines[ready:], "0.26.0") == list(enginelog.read(lines).compiled)
    assert enginelog.compilations(lines[-2:], "0.26.0") == []  # requests


def test_a_request_cannot_speak_for_the_engine() -> None:
    line = 'INFO:     127.0.0.1:1 - "GET /x?Triton kernel JIT compilation during inference: y HTTP/1.1" 404 Not Found'
    assert enginelog.compilations([line], "0.33.0") == []


def test_the_simulated_engine_s_log_reads_as_that_of_its_version() -> None:
    stream = io.StringIO()
    asked = settings.parse(["deepseek-ai/DeepSeek-V4-Flash", "-dp", "4", "--jit-monitor-verbose"], {})
    log = simulated.Log(stream)
    log.begin(asked)
    log.loaded(asked, 1.5)
    log.compiled()
    read = enginelog.read(stream.getvalue().splitlines())
    assert (read.version, read.known, read.moe_backend, read.kv_cache_tokens) == (
        settings.VERSION, True, ("humming",), asked.kv_tokens)
    assert (read.monitors, read.verbose, len(read.compiled)) == (True, True, 1)


def test_a_part_of_a_log_is_cut_by_bytes(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_bytes(b"one\ntwo\n\xff\n")
    assert enginelog.part(path) == ["one", "two", "\ufffd"]
    assert enginelog.part(path, 4) == ["two", "\ufffd"]
    assert enginelog.part(path, 0, 4) == ["one"]
    assert enginelog.part(tmp_path / "none") == []
