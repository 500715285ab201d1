"""The page that walks from 5,856 to 17,900: its commands do what it says, typed one after another."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.sandbox.conftest import Newcomer

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "from-5856-to-17900.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TYPED = [line for block in BLOCKS if not block.startswith("# on the cluster") for line in block.splitlines()
         if line.startswith("isambard-serve ")]
REPEATABLE = [line for block in BLOCKS for line in block.splitlines() if line.startswith(("expected", "GPU ", "vm: "))]


def test_the_page_can_be_followed_and_the_published_ladder_comes_out_near_its_ratios(newcomer: Newcomer) -> None:
    (newcomer.home / "docs").symlink_to(ROOT / "docs")
    printed: list[str] = []
    rungs: dict[str, str] = {}
    for line in TYPED:
        words = [rungs.get(word, word) for word in shlex.split(line, comments=True)[1:]]
        printed += newcomer.does(*words).stdout.splitlines()
        if words[0] == "submit":
            rungs = {run["recipe"].upper().replace("-", "_"): run["run_id"]
                     for run in newcomer.asks("status")["runs"]}
    assert [line.split()[1] for line in TYPED][-4:] == ["collect", "compare", "compare", "trace"]
    assert len(REPEATABLE) > 10
    assert set(REPEATABLE) <= set(printed)
    assert "SIMULATED" in "".join(printed)

    collected = json.loads(newcomer.does("collect", "--ladder", "latest", "--json").stdout)
    assert collected["simulated"]
    assert all(run["simulated"] and run["state"] == "done" for run in collected["runs"])
    assert all(row["valid"] and row["time_scale"] > 1 for row in collected["rows"])
    # Searched, not listed: the article's concurrency is found where the KV cache is full.
    assert "knee at concurrency" in collected["runs"][1]["reason"]
    assert max(row["concurrency"] for row in collected["rows"]) == pytest.approx(2752, rel=0.05)
    tp4, dp4, humming = (max(row["output_tok_s"] for row in collected["rows"] if row["run_id"] == rungs[rung])
                         for rung in ("TP4", "DP4", "DP4_HUMMING"))
    # The article's ratios: 2.2 and 1.4.
    assert dp4 / tp4 == pytest.approx(2.2, rel=0.25)
    assert humming / dp4 == pytest.approx(1.4, rel=0.25)
