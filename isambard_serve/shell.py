"""A person's shell on a node: beside a running engine (``attach``), or where nothing runs yet (``shell``).

Keys go by the environment alone: a list of processes shows what is started, on login nodes and compute nodes alike.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from isambard_serve import bench, container, directives, inengine, process, slurm
from isambard_serve.errors import HostError
from isambard_serve.plan import Plan, filled
from isambard_serve.prepare import Filled, NodeFacts, node_facts
from isambard_serve.recipe import Recipe
from isambard_serve.records import Endpoint
from isambard_serve.run import RunDir, read_record, write_whole
from isambard_serve.site import Site
from isambard_serve.slurm import Slurm

FOLDER = ".shells"
"""Where below the runs' folder a shell has its files while it is open."""

DEFAULT = ("bash",)
Started = tuple[list[str], dict[str, str]]
"""A command, and the variables that it gets."""


def attach(run: RunDir, site: Site, recipe: Recipe, job_id: str, command: Sequence[str], environ: Mapping[str, str], *,
           terminal: bool) -> Started:
    """What starts ``command`` (a shell unless given) on the node of ``run``, as the engine is started there.

    Args:
        recipe: the run's own.
        job_id: its serve job's.
        environ: the variables of whoever asks.
        terminal: whether somebody sits at one.
    """
    plan = read_record(run.plan, Plan)
    env = _environment(plan, slurm.stripped(environ))
    with contextlib.suppress(FileNotFoundError):
        env |= _access(read_record(run.endpoint, Endpoint).url, run.key.read_text())
    # The job's own step holds everything, and this one shares it: also the GPUs, so that they can be looked at.
    step = [word for word in filled(plan.step_argv, serve_job=job_id) if word != "--gpus=0"]
    membind: Filled = []
    with contextlib.suppress(FileNotFoundError):
        membind = read_record(run.node, NodeFacts).slots.get("membind", [])
    overlay = ["env", f"PYTHONPATH={recipe.engine.overlay}"] if recipe.engine.overlay else []
    inside = _inside(site, recipe, plan, terminal=terminal)
    return [*step, *_pty(site, terminal), *membind, *inside, *overlay, *(command or DEFAULT)], env


def asked(site: Site, gpus: int, time_s: int) -> list[list[str]]:
    """The ways to ask for an interactive job on one node, as words; the first that Slurm accepts is the site's."""
    wanted = {**msgspec.to_builtins(site.directives), **directives.held(site, gpus, time_s)}
    given = {name: value for name, value in wanted.items() if value is not None and not name.startswith("mail")}
    ways: tuple[dict[str, str], ...] = site.interactive or ({"partition": site.partition} if site.partition else {},)
    return [directives.words({**given, **way}) for way in ways]


def accepted(ways: Sequence[list[str]], cluster: Slurm) -> list[str]:
    """The first of ``ways`` that Slurm accepts.

    Raises:
        HostError: it accepts none.
    """
    refusals = []
    for words in ways:
        try:
            cluster.accepts(words, "an interactive job")
        except HostError as error:
            refusals.append(error)
        else:
            return words
    raise refusals[-1]


def open_on_node(site: Site, words: Sequence[str], inner: Sequence[str], environ: Mapping[str, str], *,
                 terminal: bool) -> Started:
    """What runs ``inner`` in an interactive job that is asked for with ``words``; without Slurm, right here."""
    env = {name: value for name, value in slurm.stripped(environ).items() if name not in site.unset}
    if site.scheduler == "local":
        return list(inner), env
    return ["srun", *words, "--ntasks=1", "--cpu-bind=none", "--export=ALL", *_pty(site, terminal), *inner], env


def with_recipe(plan: Plan, site: Site, recipe: Recipe, command: Sequence[str], *, terminal: bool) -> list[str]:
    """What, on the node, starts ``command`` (a shell unless given) as the engine of ``plan`` would be started."""
    return [plan.python, "-m", "isambard_serve.shell", plan.run_dir, "--",
            *_inside(site, recipe, plan, terminal=terminal), *plan.inside_argv, *(command or DEFAULT)]


@contextlib.contextmanager
def written(plan: Plan) -> Iterator[None]:
    """What the node needs to know is in the shell's own folder, as long as the block lasts."""
    run = RunDir(Path(plan.run_dir))
    run.path.mkdir(mode=0o700, parents=True)
    try:
        write_whole(run.plan, msgspec.json.encode(plan))
        inengine.install(run.inengine)
        yield
    finally:
        shutil.rmtree(run.path, ignore_errors=True)


def introduction(plan: Plan, slots: Mapping[str, Filled], node: str) -> str:
    """The engine's and the benchmark's commands, ready to be typed."""
    lists = {name: list(slots.get(name, [])) for name in plan.lists}
    port = str(slots["port"])
    engine = filled(plan.engine_argv, lists=lists, port=port)
    concurrency = plan.points[0].concurrency if plan.points else 1
    load = [*engine[:engine.index("serve")], "bench", "serve",
            *bench.load(plan, url=f"http://127.0.0.1:{port}", prompts=2 * concurrency, concurrency=concurrency, seed=1)]
    return f"""\
On {node}, as the engine of {plan.recipe} is started. The key is in VLLM_API_KEY and OPENAI_API_KEY.
The engine:
  {shlex.join(engine)}
Its load, once it answers (put the engine into the background, or attach a second shell):
  {shlex.join(load)}"""


def perform(run: RunDir, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """On the node: says what can be typed, runs ``argv`` bound as an engine would be, and returns its exit code."""
    plan = read_record(run.plan, Plan)
    facts = node_facts(plan)
    for remark in (*facts.health.faults, *facts.remarks):
        print(f"warning: {remark}", file=sys.stderr)  # noqa: T201 - at the person's terminal
    print(introduction(plan, facts.slots, facts.node), flush=True)  # noqa: T201
    env = _environment(plan, environ) | _access(f"http://127.0.0.1:{facts.slots['port']}", secrets.token_urlsafe(32))
    return process.attended([*facts.slots["membind"], *argv], env=env)


def _inside(site: Site, recipe: Recipe, plan: Plan, *, terminal: bool) -> tuple[str, ...]:
    """The words that put a command into the recipe's container; it reads what the person types, or sends."""
    variables = {**plan.environment, "OPENAI_BASE_URL": ""}
    return container.words(site, recipe, role="shell" if terminal else "client", run_dir=plan.run_dir,
                           variables=variables)


def _environment(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environ.items() if name not in plan.unset}
    return kept | plan.environment


def _access(url: str, key: str) -> dict[str, str]:
    """The variables by which clients find the engine, and its own."""
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "VLLM_API_KEY": key}


def _pty(site: Site, terminal: bool) -> list[str]:
    return ["--pty"] if terminal and site.scheduler == "slurm" else []


def main() -> None:
    """``python -m isambard_serve.shell FOLDER -- COMMAND…``."""
    split = sys.argv.index("--")
    sys.exit(perform(RunDir(Path(sys.argv[1])), sys.argv[split + 1:], os.environ))


if __name__ == "__main__":
    main()
