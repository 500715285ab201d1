"""The pages that can be followed without a cluster: their commands do what they say, typed one after another."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.sandbox.conftest import Newcomer

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "from-5856-to-17900.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


def blocks(page: str) -> list[str]:
    """What is typed, and what is printed."""
    return re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


BLOCKS = blocks(PAGE)
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


def test_the_tutorial_can_be_followed_from_where_it_fails_to_the_cluster(newcomer: Newcomer) -> None:
    """What comes before it, the other page has walked."""
    (newcomer.home / "docs").symlink_to(ROOT / "docs")
    part = TUTORIAL[TUTORIAL.index("## See it fail"):TUTORIAL.index("## On the cluster")]
    states = []
    for line in "".join(blocks(part)).splitlines():
        words = shlex.split(line, comments=True)[1:]
        if line.startswith("curl "):
            served = newcomer.run_of("latest")
            assert re.search(r"\bKEYFILE\b.* URL/", line)
            typed = line.replace("KEYFILE", served["key_file"]).replace("URL", served["url"])
            assert "DeepSeek" in subprocess.run(["bash", "-c", typed], check=True, capture_output=True).stdout.decode()
            continue
        if words == ["compare", "RUN", "RUN"]:
            words[1:] = [run["run_id"] for run in newcomer.asks("status")["runs"]][:2]
        fails = "--sim-fault" in line
        assert newcomer.does(*words, check=False).returncode == int(fails), line
        if words[0] == "submit":
            states.append(newcomer.run_of("latest"))
    assert [run["state"] for run in states] == ["failed", "done", "done", "ready"]
    assert [(run["points_done"], run["points_invalid"]) for run in states] == [(1, 0), (1, 1), (1, 1), (0, 0)]
    assert "exit code 0" in states[0]["reason"]
    assert newcomer.run_of("latest")["state"] == "cancelled"
