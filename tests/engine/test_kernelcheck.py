"""The kernel check's own arithmetic, in the engine's PyTorch: it passes what is right and catches what is wrong."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from isambard_serve.kernelcheck import THRESHOLD

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def told(engine_venv: Path) -> Any:
    """What the check says of plain kernels."""
    done = subprocess.run([engine_venv / "bin/python", "-m", "tests.engine.plain_kernels"], check=True, timeout=120,
                          cwd=ROOT, env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}, capture_output=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("kernel", ["right", "per token", "bf16"])
def test_a_right_kernel_is_off_by_the_rounding_to_bf16_alone(told: Any, kernel: str) -> None:
    verdict = told["verdicts"][kernel]
    assert verdict["passed"] is True
    # bf16 keeps 8 bits: a uniform rounding error of 2^-9 at most is 1.65e-3 in the mean square.
    assert all(1.4e-3 < error < 2e-3 < THRESHOLD for error in verdict["errors"])


def test_a_kernel_that_drops_the_groups_scales_is_caught(told: Any) -> None:
    verdict = told["verdicts"]["drops the scales"]
    assert verdict["passed"] is False
    assert min(verdict["errors"]) > 0.8


def test_a_kernel_that_leaves_rows_unwritten_is_caught(told: Any) -> None:
    assert told["verdicts"]["skips an expert"] == {"passed": False, "why": None, "errors": [None, None]}


def test_a_kernel_that_cannot_be_run_is_not_judged_and_says_why(told: Any) -> None:
    verdict = told["verdicts"]["missing"]
    assert verdict == {"passed": None, "why": "ImportError: no module named missing", "errors": []}


def test_rows_are_put_beside_their_experts_in_whole_tiles(told: Any) -> None:
    assert told["aligned"] == {"sorted_ids": [2, 4, 6, 10, 8, 10, 9, 10], "expert_ids": [0, 0, 2, 3],
                               "num_tokens_padded": [8]}


def test_marlins_product_is_called_as_this_vllm_takes_it(told: Any) -> None:
    # On the CPU it computes nothing; that it computes what it should, a GPU has shown (tests/gpu).
    assert told["marlin"] == {"b_qweight": [4, 32, 512], "b_scales": [4, 8, 512], "sorted_token_ids": [16],
                              "moe_block_size": 8, "top_k": 2, "size_m": 2, "size_n": 512, "size_k": 256}


def test_an_engine_without_marlins_kernels_is_not_judged(told: Any) -> None:
    verdict = told["verdicts"]["marlin"]
    assert verdict["passed"] is None
    assert "gptq_marlin_repack" in verdict["why"]
