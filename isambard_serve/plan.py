"""Plans: recipe × site × run id, worked out in full and without any I/O.

A plan holds every argument, variable and directive of a run. What only the node or Slurm will know is a
:class:`Slot`, filled there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from isambard_serve import __version__, container, flags, hubcache, inengine, profiler, search
from isambard_serve.container import Need
from isambard_serve.directives import holder_directives, sweep_directives
from isambard_serve.errors import UsageError
from isambard_serve.profiler import Profile
from isambard_serve.recipe import END_MARGIN_S, Expect, Recipe, ranks, seconds
from isambard_serve.records import Record
from isambard_serve.run import point_name
from isambard_serve.search import Space
from isambard_serve.site import Site


class Slot(Record, frozen=True):
    """What is not known yet, and is filled on the node.

    The engine's ``port``, its ``host`` address if it serves people, its ``url``, the ``serve_job`` id, and where this
    node's NUMA map binds what: ``membind`` is the command that keeps the engine's memory beside the node's CPUs,
    ``numa_bind`` the engine's flags that bind its ranks. ``many``: any number of words, also none; otherwise one.
    """

    slot: Literal["port", "host", "url", "serve_job", "membind", "numa_bind"]
    before: str = ""
    """Text that stands directly before the value, in the same word."""
    many: bool = False


Word = str | Slot


class Point(Record, frozen=True):
    """One point to measure. ``seed`` differs from point to point, so that no prompt meets a warm prefix cache."""

    concurrency: int
    repeat: int
    prompts: int
    seed: int

    @property
    def name(self) -> str:
        """The point's name and folder: ``c0512.r1``."""
        return point_name(self.concurrency, self.repeat)


class Limits(Record, frozen=True):
    """Seconds that things may take: the engine's start, the whole job, a time without requests, one point.

    ``window_s`` is the least that a point must measure for, to be believed. ``grace_s`` is how long the sweep may
    take to come, ``silence_s`` how long its heartbeat may stand still.
    """

    load_s: int
    time_s: int
    idle_s: int
    point_s: int
    window_s: int
    grace_s: int
    silence_s: int


class NodeHours(Record, frozen=True):
    """What the run costs if every job runs to its time limit, in node-hours of the site.

    ``inside``: the serve job alone (its own job measures). ``dependent``: with the sweep's job beside it.
    """

    inside: float
    dependent: float


class Plan(Record, frozen=True):
    """Everything about a run that is known before it is submitted.

    ``placement`` ``none``: the engine serves people and nobody measures it; it listens on ``interface``, if named.
    ``points`` are measured in their order; with a ``search`` there are none yet, and it finds them; with a
    ``profile`` nothing is measured.
    ``numa_bind``: the node works out what to bind where, and the engine's processes are audited against it.
    ``container_argv`` stands before the engine's command, and ``inside_argv`` between the two, in its container: what
    makes it load the plugin and say its facts. ``client_command`` and ``bench_command`` are whole, container and all.
    ``local_dir`` is the run's folder on its node, if it has one. ``kernels`` is how the files begin that keep compiled
    kernels for the next run; the model of GPU comes behind it.
    """

    run_id: str
    run_dir: str
    recipe: str
    site: str
    scheduler: Literal["slurm", "local"]
    placement: Literal["dependent", "inside", "none"]
    interface: str | None
    ladder: tuple[str, ...]
    same_node: bool
    resumes: str | None
    simulated: bool
    python: str
    model: str
    isl: int
    osl: int
    warmup_osl: int
    gpus: int
    node_gpus: int
    engine_version: str
    ranks: int
    random_weights: bool
    expect: Expect
    points: tuple[Point, ...]
    search: Space | None
    profile: Profile | None
    limits: Limits
    node_hours: NodeHours
    serve_directives: dict[str, str | bool]
    sweep_directives: dict[str, str | bool]
    sweep_after_min: int
    sweep_minutes: int
    open_files: int
    export: tuple[str, ...]
    unset: tuple[str, ...]
    environment: dict[str, str]
    numa_bind: bool
    launcher_argv: tuple[Word, ...]
    runtime: Literal["none", "apptainer", "podman-hpc", "simulated"]
    container_argv: tuple[str, ...]
    inside_argv: tuple[str, ...]
    local_dir: str | None
    kernels: str | None
    engine_argv: tuple[Word, ...]
    client_command: tuple[str, ...]
    bench_command: tuple[str, ...]
    bench_argv: tuple[Word, ...]
    step_argv: tuple[Word, ...]
    needs: tuple[Need, ...]
    poll_interval_s: float
    schema: str = "isambard-serve/plan/1"
    package_version: str = __version__

    @property
    def cost(self) -> float:
        """What the run costs at most with its placement, in node-hours."""
        return self.node_hours.dependent if self.placement == "dependent" else self.node_hours.inside

    @property
    def for_people(self) -> bool:
        """Whether the engine serves people, and nothing is measured."""
        return self.placement == "none"

    @property
    def lists(self) -> tuple[str, ...]:
        """The slots of any number of words that the engine's command has."""
        return tuple(word.slot for word in (*self.launcher_argv, *self.engine_argv)
                     if isinstance(word, Slot) and word.many)


def filled(words: Sequence[Word], *, lists: Mapping[str, Sequence[str]] | None = None, **values: str) -> list[str]:
    """``words`` with their slots filled: those of one word from ``values``, those of many from ``lists``."""
    result: list[str] = []
    for word in words:
        if isinstance(word, str):
            result.append(word)
        elif word.many:
            result += (lists or {})[word.slot]
        else:
            result.append(word.before + values[word.slot])
    return result


def make(recipe: Recipe, site: Site, *, run_id: str, runs_dir: str, python: str, ladder: tuple[str, ...] = (),
         same_node: bool = False, resumes: str | None = None, for_people: bool = False) -> Plan:
    """The plan of running ``recipe`` at ``site`` (whose variables are resolved) as ``run_id``.

    Args:
        runs_dir: the folder that the run directory will stand in; absolute.
        python: the interpreter that the jobs use; this package must be importable there.
        ladder: the run ids of all rungs, in order, if the run is one of several submitted together.
        same_node: whether they share one job, and so measure from inside.
        resumes: the run whose valid points it takes over.
        for_people: serve, and measure nothing.

    Raises:
        UsageError: the two do not go together, or a directive cannot be written.
    """
    if recipe.resources.gpus > site.node.gpus:
        raise UsageError(f"needs {recipe.resources.gpus} GPUs, a node of {site.name} has {site.node.gpus}",
                         where=f"recipe {recipe.name}: resources.gpus")
    run_dir = f"{runs_dir}/{run_id}"
    if "%" in run_dir or not run_dir.isprintable():
        raise UsageError(f"{run_dir!r} cannot be where runs lie: no %, and nothing that cannot be printed",
                         where="runs_dir")
    time_s = seconds(recipe.resources.time, recipe.name)
    load_s = seconds(recipe.resources.load_time, recipe.name)
    profile = None if for_people else profiler.profile(recipe)
    environment = {"NO_COLOR": "1", "PYTHONUNBUFFERED": "1", **site.set, **recipe.engine.env}
    engine_in, client_in, command_in = (
        container.words(site, recipe, role=role, run_dir=run_dir, variables=environment)
        for role in ("engine", "client", "command"))
    patched = _modules(recipe.engine.overlay, environment.get("PYTHONPATH"))
    simulated = site.container.runtime == "simulated"
    command = (python, "-m", "isambard_serve.sim") if simulated else site.container.command
    simulation = site.container.args if simulated else ()
    # A recipe that says itself which nodes or CPUs is taken at its word.
    args = dict(recipe.engine.args)
    numa_bind = args.get("numa-bind") is True and not args.keys() & {"numa-bind-nodes", "numa-bind-cpus"}
    if numa_bind:
        del args["numa-bind"]
    serve_share = recipe.resources.gpus / site.node.gpus
    sweep_share = site.sweep.gpus / site.node.gpus
    return Plan(
        run_id=run_id,
        run_dir=run_dir,
        recipe=recipe.name,
        site=site.name,
        scheduler=site.scheduler,
        # The profiler is told over HTTP, on the engine's own node.
        placement="none" if for_people else "inside" if same_node or profile else site.placement,
        interface=site.serve.interface if for_people else None,
        ladder=ladder,
        same_node=same_node,
        resumes=resumes,
        simulated=simulated,
        python=python,
        model=recipe.model,
        isl=recipe.bench.isl,
        osl=recipe.bench.osl,
        warmup_osl=recipe.bench.warmup,
        gpus=recipe.resources.gpus,
        node_gpus=site.node.gpus,
        engine_version=recipe.engine.version,
        ranks=ranks(recipe),
        random_weights=recipe.engine.args.get("load-format") == "dummy",
        expect=recipe.expect,
        points=() if for_people or profile else _points(recipe),
        search=None if for_people or profile else search.space(recipe, time_s - load_s - END_MARGIN_S),
        profile=profile,
        limits=Limits(
            load_s=seconds(recipe.resources.load_limit, recipe.name),
            time_s=time_s,
            idle_s=seconds(recipe.resources.serve_idle_timeout if for_people else recipe.resources.idle_timeout,
                           recipe.name),
            point_s=seconds(recipe.bench.point_limit, recipe.name),
            window_s=seconds(recipe.bench.min_window, recipe.name),
            grace_s=seconds(recipe.resources.sweep_grace, recipe.name),
            silence_s=seconds(recipe.resources.sweep_silence, recipe.name),
        ),
        node_hours=NodeHours(
            inside=round(serve_share * time_s / 3600, 4),
            dependent=round((serve_share + sweep_share) * time_s / 3600, 4),
        ),
        serve_directives=holder_directives(site, run_id, run_dir, "serve.log", recipe.resources.gpus, time_s),
        sweep_directives=sweep_directives(site, run_id, run_dir),
        sweep_after_min=load_s // 60,
        sweep_minutes=math.ceil(time_s / 60),
        open_files=site.open_files,
        export=site.export,
        unset=site.unset,
        environment=environment,
        numa_bind=numa_bind,
        launcher_argv=(Slot(slot="membind", many=True),) if numa_bind else (),
        runtime=site.container.runtime,
        container_argv=engine_in,
        inside_argv=("env", *_inside(run_dir, environment, patched)),
        local_dir=container.local_folder(site, run_dir),
        kernels=container.kernels(site, recipe),
        engine_argv=(*command, "serve", recipe.model, "--host", Slot(slot="host") if for_people else "127.0.0.1",
                     "--port", Slot(slot="port"),
                     *_own_flags(recipe), *profiler.words(profile, f"{run_dir}/profile"),
                     *flags.argv(args), *((Slot(slot="numa_bind", many=True),) if numa_bind else ()),
                     *recipe.engine.extra_args, *simulation),
        client_command=(*client_in, *_client_command(site, run_dir, python)),
        bench_command=(*command_in, *command, "bench", "serve"),
        bench_argv=("--backend", "openai", "--base-url", Slot(slot="url"),
                    "--endpoint", "/v1/completions", "--model", recipe.model, "--dataset-name", "random",
                    "--request-rate", "inf",
                    "--random-input-len", str(recipe.bench.isl), "--random-output-len", str(recipe.bench.osl),
                    "--ignore-eos", "--percentile-metrics", "ttft,tpot,itl,e2el",
                    "--metric-percentiles", "50,90,95,99", *flags.argv(recipe.bench.args)),
        # From one job into another: all that the serve job holds is taken by its own step, hence --overlap.
        step_argv=() if site.scheduler == "local" else (
                   "srun", Slot(slot="serve_job", before="--jobid="), "--overlap", "--nodes=1", "--ntasks=1",
                   "--gpus=0", "--mem=0", f"--cpus-per-task={site.sweep.load_generator_cpus}",
                   "--cpu-bind=none", "--export=ALL"),
        needs=() if simulated else _needs(recipe, site, environment),
        poll_interval_s=site.poll_interval_s,
    )


def _modules(*folders: str | None) -> str | None:
    """``folders`` as a ``PYTHONPATH``."""
    return ":".join(folder for folder in folders if folder) or None


def _inside(run_dir: str, environment: dict[str, str], pythonpath: str | None) -> list[str]:
    """The variables for what runs inside the engine, as words for ``env``: nobody else shall have them."""
    given = inengine.variables(f"{run_dir}/inengine", f"{run_dir}/engine/facts", sorted(environment), pythonpath)
    return [f"{name}={value}" for name, value in given.items()]


def _client_command(site: Site, run_dir: str, python: str) -> tuple[str, ...]:
    """What starts the load generator that stays: its program, with the interpreter that the engine is installed for."""
    program = f"{run_dir}/inclient/bench_client.py"
    if site.container.runtime == "simulated":
        return (python, program, "isambard_serve.sim.benchmarks")
    return (container.python(site), program, "vllm.benchmarks.serve")


def _own_flags(recipe: Recipe) -> list[str]:
    """The flags that make numbers believable and change none: the guard, and, where this version of the engine has
    it, that every kernel is named which it compiles while it serves.
    """
    verbose = "jit-monitor-verbose"
    names_kernels = verbose not in recipe.engine.args and verbose in (flags.known(recipe.engine.version) or ())
    return ["--middleware", inengine.GUARD, *([f"--{verbose}"] if names_kernels else [])]


def _points(recipe: Recipe) -> tuple[Point, ...]:
    bench = recipe.bench
    if bench.concurrency == "saturate":
        return ()
    return tuple(
        point(concurrency, repeat, bench.prompts_per_concurrency)
        for concurrency in bench.concurrency
        for repeat in range(1, bench.repeats + 1)
    )


def point(concurrency: int, repeat: int, prompts_per_concurrency: int) -> Point:
    """The point of ``concurrency`` and ``repeat``."""
    return Point(concurrency=concurrency, repeat=repeat, prompts=concurrency * prompts_per_concurrency,
                 seed=concurrency * 1000 + repeat)


def _needs(recipe: Recipe, site: Site, environment: dict[str, str]) -> tuple[Need, ...]:
    """What must be there before the run is submitted."""
    overlay = recipe.engine.overlay
    patched = (Need(what="the overlay of Python packages", path=overlay, remedy="check the path"),) if overlay else ()
    return (*container.image_need(site, recipe), *patched, *_weights(recipe, environment))


def _weights(recipe: Recipe, environment: dict[str, str]) -> tuple[Need, ...]:
    """A model of the hub must be in the cache when the engine may not ask the hub for it."""
    cache = environment.get("HF_HOME")
    if environment.get("HF_HUB_OFFLINE") != "1" or cache is None or recipe.model.startswith("/"):
        return ()
    return (Need(what="the model's weights", path=hubcache.folder(cache, recipe.model), revision=recipe.revision,
                 remedy=f"isambard-serve weights fetch {recipe.name}, in a job of its own"),)
