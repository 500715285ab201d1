"""The search for the knee on real Slurm and the real engine, whose KV cache is made small."""

from __future__ import annotations

import json

from tests.cluster.person import Person

SMALL_CACHE = (
    "--set", "engine.args.num-gpu-blocks-override=21",  # of 128 tokens each on the CPU; one of them is never used
    "--set", "engine.args.max-num-seqs=64",
    "--set", "bench.concurrency=saturate", "--set", "bench.isl=64", "--set", "bench.osl=192",
    # Sampled once a second, the cache must be seen while it is full: half of the time.
    "--set", "bench.prompts_per_concurrency=16",
)
SEQUENCES = 20 // 2
"""Sequences of 64 + 192 tokens that so many blocks hold."""


def test_the_search_stops_by_itself_where_the_real_engines_kv_cache_is_full(person: Person) -> None:
    run_id = person.submits("tiny", *SMALL_CACHE)
    run = person.waits_for(run_id, "done", "failed", timeout_s=400)
    assert run["state"] == "done", run
    found = json.loads((person.runs / run_id / "sweep.json").read_text())
    steps = "".join(path.read_text() for path in sorted((person.runs / run_id / "search").glob("*.jsonl")))
    assert found["saturation"] in ("kv", "waiting", "preemptions"), steps
    assert found["reason"] == "the knee is found"
    assert found["engine_kv_cache_tokens"] in (20 * 128, 21 * 128)
    rows = person.asks("collect", run_id)["rows"]
    assert found["knee"] in [row["concurrency"] for row in rows if row["valid"]]
    assert found["knee"] <= SEQUENCES + 2
    assert run["reason"].startswith(f"knee at concurrency {found['knee']}, where ")
    person.cluster.cancel_all()
