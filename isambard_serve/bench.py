"""``vllm bench serve``: the command of one point, and the row that its result makes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from isambard_serve.enginerules import power_capped
from isambard_serve.evidence import Evidence, Measured
from isambard_serve.loadrules import increase
from isambard_serve.plan import Plan, Point, filled
from isambard_serve.records import Row, Sample
from isambard_serve.run import UNREADABLE
from isambard_serve.validity import judge

RESULT = "bench.json"
ATTEMPT_SEEDS = 100_000_000
"""How far the seeds of two attempts at a point are apart: farther than those of any two points."""

SEEDS = 2**32
"""How many seeds the benchmark knows (numpy's): the attempts of a server that is measured often go round."""


def load(plan: Plan, *, url: str, prompts: int, concurrency: int, seed: int, isl: int | None = None,
         osl: int | None = None) -> list[str]:
    """What stands after ``vllm bench serve`` for a load whose result nobody keeps: a warm-up, say.

    Args:
        url: where the engine answers.
        isl: input tokens of each prompt, and ``osl``: output tokens; the plan's own unless said otherwise.
    """
    lengths = (("--random-input-len", isl), ("--random-output-len", osl))
    return [
        *filled(plan.bench_argv, url=url),
        "--num-prompts", str(prompts),
        "--max-concurrency", str(concurrency),
        "--seed", str(seed % SEEDS),
        *(word for flag, length in lengths if length is not None for word in (flag, str(length))),
    ]


def words(plan: Plan, point: Point, *, url: str, folder: Path, attempt: int = 0) -> list[str]:
    """What stands after ``vllm bench serve`` to measure ``point`` and leave its JSON as ``folder/bench.json``.

    Each ``attempt`` has prompts of its own: those of an earlier one lie warm in the prefix cache.
    """
    return [
        *load(plan, url=url, prompts=point.prompts, concurrency=point.concurrency,
              seed=point.seed + attempt * ATTEMPT_SEEDS),
        "--save-result",
        "--result-dir", str(folder),
        "--result-filename", RESULT,
        "--metadata", f"run_id={plan.run_id}", f"point={point.name}",
    ]


def result(folder: Path) -> dict[str, Any] | None:
    """The benchmark's own JSON; None if it left none that can be read."""
    try:
        content = msgspec.json.decode((folder / RESULT).read_bytes())
    except (OSError, *UNREADABLE):
        return None
    return content if isinstance(content, dict) else None


def row(plan: Plan, point: Point, *, node: str, bench: dict[str, Any] | None, returncode: int | None,
        window: Sequence[Sample], evidence: Evidence | None = None) -> Row:
    """The row of ``point``.

    Args:
        node: the node that the engine ran on.
        bench: the benchmark's own JSON, if it left one.
        returncode: how its command ended; None if it had to be ended.
        window: the engine's samples from before the first request to after the last.
        evidence: what else was seen meanwhile.
    """
    measured = Measured(
        bench=bench, returncode=returncode, point=point, isl=plan.isl, osl=plan.osl,
        min_window_s=plan.limits.window_s, window=tuple(window), expect=plan.expect, ranks=plan.ranks,
        version=None if plan.simulated else plan.engine_version, variables=plan.environment,
        random_weights=plan.random_weights,
        evidence=evidence or Evidence())
    judgement = judge(measured)
    number = measured.number
    output_tok_s = number("output_throughput")
    tpot_ms = number("median_tpot_ms")
    duration_s = number("duration")
    tokens = number("total_output_tokens")
    node_hours = None if duration_s is None else duration_s / 3600 * plan.gpus / plan.node_gpus
    return Row(
        run_id=plan.run_id,
        recipe=plan.recipe,
        simulated=plan.simulated or number("time_scale") is not None,  # whatever the site calls its engine
        node=node,
        concurrency=point.concurrency,
        repeat=point.repeat,
        output_tok_s=output_tok_s,
        output_tok_s_per_gpu=None if output_tok_s is None else output_tok_s / plan.gpus,
        total_tok_s=number("total_token_throughput"),
        ratio=None,
        tok_s_per_user=1000 / tpot_ms if tpot_ms else None,
        median_ttft_ms=number("median_ttft_ms"),
        median_tpot_ms=tpot_ms,
        p99_tpot_ms=number("p99_tpot_ms"),
        kv_cache_usage_max=max((kv for sample in window if (kv := sample.kv_cache_usage) is not None), default=None),
        preemptions=increase(window, "preemptions_total"),
        duration_s=duration_s,
        time_scale=number("time_scale") or 1.0,
        node_hours=node_hours,
        output_tok_per_node_hour=tokens / node_hours if node_hours and tokens is not None else None,
        power_capped=power_capped(measured),
        valid=not judgement.reasons,
        reasons=judgement.reasons,
        unknown=judgement.unknown,
        not_applicable=judgement.not_applicable,
        details=judgement.details,
    )
