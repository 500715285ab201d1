"""Stand-ins and small examples that the unit tests share."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from binascii import crc32
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from isambard_serve import plan as plans
from isambard_serve import recipe as recipes
from isambard_serve import site as sites
from isambard_serve import yamlfile
from isambard_serve.plan import Plan
from isambard_serve.process import Completed
from isambard_serve.recipe import Recipe
from isambard_serve.records import (
    Answer,
    Endpoint,
    EngineFacts,
    Event,
    Jobs,
    Outputs,
    Row,
    Run,
    Sample,
    State,
    SubmittedJob,
)
from isambard_serve.run import RunDir, append_line, write_whole
from isambard_serve.site import Site

HERE = Path(__file__).parent
SAMPLES = HERE / "samples"
PRETEND = HERE / "sites" / "pretend.yaml"
RUN_ID = "20261129-181258-small-3f2a"
RUNG_IDS = tuple(f"20261129-18125{rung}-small-3f2a" for rung in range(1, 5))

SMALL = """\
description: a recipe as small as they come
model: small-model
engine: {version: 0.33.0}
resources: {gpus: 1, time: 1h}
bench: {isl: 8, osl: 4, concurrency: [1, 2], min_window: 1s, warmup: 0}
"""

Shown = Callable[..., "subprocess.Popen[bytes]"]


def small_recipe(over: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe :data:`SMALL`, with ``over`` laid over it."""
    value = yamlfile.merge(yamlfile.parse(SMALL, "SMALL"), over or {})
    return yamlfile.convert({"name": "small", **value}, Recipe, "SMALL")


def pretend_site(**changes: Any) -> Site:
    """The site that runs the engine without a container."""
    return msgspec.structs.replace(sites.load(str(PRETEND)), **changes)


def small_plan(runs_dir: Path, over: Mapping[str, Any] | None = None, site: Site | None = None,
               **changes: Any) -> Plan:
    """The plan of running :func:`small_recipe` at :func:`pretend_site`."""
    made = plans.make(small_recipe(over), site or pretend_site(), run_id=RUN_ID, runs_dir=str(runs_dir),
                      python="/opt/python")
    return msgspec.structs.replace(made, **changes)


def ladder_plans(runs_dir: Path, count: int = 3, *, same_node: bool = False, **changes: Any) -> list[Plan]:
    """The plans of a ladder's rungs; their runs are the first ``count`` of :data:`RUNG_IDS`."""
    ids = RUNG_IDS[:count]
    return [plans.make(small_recipe(), pretend_site(**changes), run_id=own, runs_dir=str(runs_dir),
                       python="/opt/python", ladder=ids, same_node=same_node) for own in ids]


def written_run(plan: Plan) -> RunDir:
    """A run directory that holds ``plan``, as far as what runs on the node needs it."""
    run = RunDir(Path(plan.run_dir))
    run.create()
    write_whole(run.plan, msgspec.json.encode(plan))
    return run


def submitted(serve: str | None = "101", sweep: str | None = "102", *, complete: bool = True) -> Jobs:
    """What ``jobs.json`` says after a submission."""
    return Jobs(jobs=(SubmittedJob(role="serve", job_id=serve, time=1.0),
                      SubmittedJob(role="sweep", job_id=sweep, time=2.0)), complete=complete)


def ready(run: RunDir, url: str = "http://127.0.0.1:4711") -> None:
    """The engine says that it is ready, and where."""
    run.record("serve", "ready", job_id="101")
    write_whole(run.endpoint, msgspec.json.encode(Endpoint(
        url=url, model="small-model", node="n", job_id="101", key_file=str(run.key))))


def note(run: RunDir, event: Event) -> None:
    """Append ``event`` to its writer's file."""
    append_line(run.events / f"{event.writer}.jsonl", event)


def some_sample(**changes: float) -> Sample:
    """A sample of an engine that nobody has asked for anything yet."""
    names = [field.name for field in msgspec.structs.fields(Sample)]
    return Sample(**{**dict.fromkeys(names, 0.0), **changes})


@contextlib.contextmanager
def answering(run: RunDir) -> Iterator[None]:
    """The engine of ``run`` answers: the watcher's samples go on, of a time that is no point's own."""
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.01):
            append_line(run.samples, some_sample())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def some_row(**changes: Any) -> Row:
    """A row of a point that went well."""
    values: dict[str, Any] = {
        "run_id": RUN_ID, "recipe": "small", "simulated": False, "node": "nid001",
        "concurrency": 1, "repeat": 1, "output_tok_s": 100.0,
        "output_tok_s_per_gpu": 100.0, "total_tok_s": 300.0, "ratio": None, "tok_s_per_user": 50.0,
        "median_ttft_ms": 10.0, "median_tpot_ms": 20.0, "p99_tpot_ms": 30.0, "kv_cache_usage_max": 0.5,
        "preemptions": 0.0, "duration_s": 36.0, "time_scale": 1.0, "node_hours": 0.0025,
        "output_tok_per_node_hour": 1e6, "power_capped": None, "valid": True, "reasons": (),
        "unknown": (), "not_applicable": (), "details": {},
    }
    return Row(**{**values, **changes})


def some_run(state: State = "done", **changes: Any) -> Run:
    """A run as ``status`` reports it."""
    values: dict[str, Any] = {
        "run_id": RUN_ID, "recipe": "small", "ladder": None, "site": "pretend", "simulated": False, "state": state,
        "reason": None, "jobs": {"serve": "101", "sweep": "102"}, "node_hours": 0.5, "node_hours_by": "clock",
        "directory": "/shared/runs/x", "points_done": 2, "points_planned": 2, "points_invalid": 0,
        "binding": None, "url": None, "key_file": None, "verdict": None,
    }
    return Run(**{**values, **changes})


def some_facts(**changes: Any) -> EngineFacts:
    """What a worker says of itself that is the only one, and runs as the recipe small has it."""
    values: dict[str, Any] = {
        "schema": "isambard-serve/facts/1", "time": 1.0, "pid": 30, "ppid": 20, "ns_pids": (30,), "roles": ("worker",),
        "engine_version": "0.33.0", "data_parallel_rank": 0, "tensor_parallel_rank": 0, "rank": 0, "local_rank": 0,
        "cpus_allowed": "0-71", "mems_allowed": "0", "device_type": "cpu", "device": None, "environment": {},
        "moe_backend": (), "attention_backend": ("FLASH_ATTN",), "kv_cache_dtype": ("auto",), "input_quant": (),
        "errors": (),
    }
    return EngineFacts(**{**values, **changes})


def keep_facts(run: RunDir, facts: EngineFacts) -> None:
    """Keep ``facts`` as the plugin does."""
    run.facts.mkdir(exist_ok=True)
    write_whole(run.facts / f"{facts.pid}.json", msgspec.json.encode(facts))


def good_bench(prompts: int, osl: int = 4, **changes: Any) -> dict[str, Any]:
    """The engine's own benchmark result of a point in which every request was answered in full."""
    result: dict[str, Any] = json.loads((SAMPLES / "bench.json").read_text())
    tokens = prompts * osl
    duration_s = tokens / changes["output_throughput"] if "output_throughput" in changes else result["duration"]
    return {**result, "num_prompts": prompts, "completed": prompts, "failed": 0, "total_output_tokens": tokens,
            "duration": duration_s, "output_throughput": tokens / duration_s, **changes}


def some_outputs(*texts: str, **changes: Any) -> Outputs:
    """What an engine answers to the prompts p0, p1, …; each word is a token of its own."""
    answers = tuple(Answer(text=text, tokens=tuple(crc32(word.encode()) for word in text.split())) for text in texts)
    values: dict[str, Any] = {"time": 1.0, "took_s": 0.5, "max_tokens": 32, "answers": answers,
                              "prompts": tuple(f"p{number}" for number in range(len(texts)))}
    return Outputs(**{**values, **changes})


def keep_row(run: RunDir, row: Row) -> None:
    """Keep ``row`` as the sweep does."""
    folder = run.points / f"c{row.concurrency:04d}.r{row.repeat}"
    folder.mkdir(exist_ok=True)
    write_whole(folder / "row.json", msgspec.json.encode(row))


class FakeSlurm:
    """Answers Slurm's commands and refuses any other program.

    Args:
        answers: command → what it answers from now on: a result, an error to raise, or a function of its argv.
    """

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.calls: list[tuple[str, ...]] = []
        self.environments: list[Mapping[str, str]] = []
        self._next_id = 101

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float = 60) -> Completed:
        """Answer as Slurm would where nothing goes wrong, or as told."""
        command = argv[0]
        if command not in ("sbatch", "squeue", "scancel", "sacct", "scontrol", "sacctmgr"):
            raise AssertionError(f"ran {argv}")
        self.calls.append(tuple(argv))
        self.environments.append(env)
        answer = self.answers.get(command)
        if callable(answer):
            answer = answer(tuple(argv))
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, Completed):
            return answer
        if command != "sbatch":
            return said(answer or "")
        self._next_id += 1
        return said(f"{self._next_id - 1}\n")

    def commands(self) -> list[str]:
        """The commands that were run, without their arguments."""
        return [call[0] for call in self.calls]


def said(stdout: str = "", *, stderr: str = "", returncode: int = 0) -> Completed:
    """How a program ended."""
    return Completed(returncode=returncode, stdout=stdout, stderr=stderr)


class Stubs:
    """A folder of programs that stand in for others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, script: str) -> Path:
        """Add the bash script ``script`` under the name of the program that it stands for."""
        path = self.folder / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
        return path


def loaded(name: str, *assignments: str) -> Recipe:
    """The recipe ``name``, which must give no warnings."""
    recipe, warnings = recipes.load(name, assignments)
    assert warnings == []
    return recipe
