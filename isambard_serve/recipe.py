"""Recipes: what to serve and how to measure it, as one strict YAML file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from isambard_serve import flags, shipped, yamlfile
from isambard_serve.errors import UsageError
from isambard_serve.records import Record

Scalar = bool | int | float | str
Count = Annotated[int, Meta(ge=1, le=10**8)]
MOST_AT_ONCE = 10**6
"""The most requests at once that are no slip of the finger: the load generator has to hold them all."""
Concurrency = Annotated[int, Meta(ge=1, le=MOST_AT_ONCE)]

YEAR_S = 366 * 86_400

END_MARGIN_S = 180
"""How long before its time limit a serve job stops by itself, so that nothing is cut off half-written."""

SIZES = {"tensor-parallel-size": 1024, "pipeline-parallel-size": 1024, "data-parallel-size": 1024,
         "max-num-seqs": 10**6, "max-num-batched-tokens": 10**8, "block-size": 10**6}
"""The engine's flags that are reckoned with, and the most that is no slip of the finger."""

_DURATION = re.compile(r"^(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?$")
_CLOCK = re.compile(r"^(?:(\d+)-)?(\d+):(\d\d):(\d\d)$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SECRET = re.compile(r"(TOKEN|API_KEY|ACCESS_KEY|PRIVATE_KEY)$|(^|_)(SECRET|PASSWORD|PASSWD|CREDENTIALS)(_|$)",
                     re.IGNORECASE)
_CREDENTIALS = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
"""A password in a URL."""


class Engine(Record, frozen=True):
    """vLLM: its version, the flags and environment it gets, and ``extra_args`` that are passed unchecked.

    ``overlay`` is a folder of Python packages that go before the installed ones: a patched vLLM, for instance. Its
    path is absolute, or ``./`` or ``../`` from the recipe's folder.
    """

    version: str
    args: dict[str, Scalar | list[Scalar] | dict[str, Any]] = {}
    env: dict[str, str] = {}
    extra_args: tuple[str, ...] = ()
    overlay: str | None = None

    def number(self, name: str, default: float) -> float:
        """The argument ``name`` where it is a number, otherwise ``default``."""
        value = self.args.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


class Expect(Record, frozen=True):
    """What the engine must really run with, on every rank; rows of one that does not are not valid.

    What is left out is not asked about. ``moe_backend`` and ``attention_backend`` are vLLM's names (``marlin``,
    ``FLASHMLA_SPARSE_DSV4``); a model may have other attention backends beside the one that is named.
    ``kv_cache_dtype`` ``fp8`` stands for all of vLLM's fp8 layouts. ``input_quant`` is what the experts' input is
    quantised to: ``float8e4m3 group 128``, or ``none``.
    """

    moe_backend: str | None = None
    attention_backend: str | None = None
    kv_cache_dtype: str | None = None
    input_quant: str | None = None


class Resources(Record, frozen=True):
    """What the serve job holds, and for how long at most.

    ``time`` limits the job, ``load_time`` is how long the engine usually takes to be ready (the sweep is not
    due before), ``load_limit`` how long it may take. The job ends after ``idle_timeout`` without a request, one that
    serves people (``submit --serve``) after ``serve_idle_timeout``.
    It measures by itself when no sweep has come ``sweep_grace`` after it was ready, or when the sweep's
    heartbeat stands still for ``sweep_silence``.
    """

    gpus: Count
    time: str
    load_time: str = "0m"
    load_limit: str = "60m"
    idle_timeout: str = "15m"
    serve_idle_timeout: str = "2h"
    sweep_grace: str = "2m"
    sweep_silence: str = "60s"


class Bench(Record, frozen=True):
    """The load: ``vllm bench serve`` with random prompts, one point for each concurrency and repeat.

    ``concurrency`` is a list, or ``saturate``: the knee is searched, the smallest concurrency within 2 % of the best
    throughput, in no more than ``sweep_limit``; ``repeats`` then counts for the knee alone.
    ``isl`` and ``osl`` are input and output length in tokens; each point sends ``prompts_per_concurrency`` ×
    concurrency requests and may take ``point_limit`` at most. A point that was measured for less than
    ``min_window`` is not valid. ``args`` adds flags of ``vllm bench serve``. Before the first point two short loads
    with ``warmup`` output tokens a request warm the engine up: prompts of full length, and short ones at the largest
    concurrency; 0 leaves them out. With ``profile_at`` no point is measured: the engine's profiler records
    ``profile_steps`` steps of steady decode at that concurrency.
    """

    isl: Count
    osl: Count
    concurrency: Literal["saturate"] | Annotated[tuple[Concurrency, ...], Meta(min_length=1)] = "saturate"
    repeats: Count = 1
    prompts_per_concurrency: Count = 2
    point_limit: str = "30m"
    sweep_limit: str = "2h"
    min_window: str = "60s"
    warmup: Annotated[int, Meta(ge=0)] = 32
    profile_at: Concurrency | None = None
    profile_steps: Count = 30
    args: dict[str, Scalar | list[Scalar]] = {}


class Recipe(Record, frozen=True):
    """A whole recipe.

    ``model`` is a hub name, or a path: absolute, or ``./`` or ``../`` from the recipe's folder. ``image`` is a
    registry's reference, or the path of a SIF, likewise.
    """

    name: str
    description: str
    model: str
    engine: Engine
    resources: Resources
    bench: Bench
    image: str | None = None
    expect: Expect = Expect()

    @property
    def revision(self) -> str:
        """The model's revision at the hub, as the engine is told."""
        return str(self.engine.args.get("revision") or "main")


def _seconds(text: str) -> int | None:
    clock = _CLOCK.match(text)
    if clock:
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + rest
    words = _DURATION.match(text)
    if words and text:
        hours, minutes, rest = (int(part or 0) for part in words.groups())
        return (hours * 60 + minutes) * 60 + rest
    return None


def seconds(text: str, where: str) -> int:
    """A length of time (``90s``, ``1h30m``, ``4:00:00``, ``1-00:00:00``) in seconds.

    Raises:
        UsageError: it is none of these, or longer than a year.
    """
    found = _seconds(text)
    if found is not None and found <= YEAR_S:
        return found
    raise UsageError(f"{text!r} is not a length of time", where=where, remedy='write "4h", "90m", "45s" or "4:00:00"')


def folders() -> list[Path]:
    """Where recipes are looked for, in order: ``./jobs``, the user's folder, the shipped ones."""
    return [Path.cwd() / "jobs", shipped.user_folder() / "jobs", shipped.folder("jobs")]


def names() -> list[str]:
    """The names of all recipes that can be found."""
    return shipped.names(folders())


def locate(name: str, named_by: Path | None = None) -> Path:
    """The file of the recipe ``name``: a path, or a name looked up beside ``named_by`` and in :func:`folders`.

    Args:
        named_by: the file that extends it, if any.

    Raises:
        UsageError: there is none.
    """
    beside = [named_by.parent] if named_by else []
    if "/" in name or name.endswith((".yaml", ".yml")):
        with contextlib.suppress(RuntimeError, ValueError):  # no such user's home; a NUL
            path = (beside or [Path.cwd()])[0] / Path(name).expanduser()
            if path.is_file():
                return path
        raise UsageError("no such recipe file", where=name)
    return shipped.named("recipe", name, beside + folders(), named_by=named_by)


def load(name: str, assignments: tuple[str, ...] = ()) -> tuple[Recipe, list[str]]:
    """The recipe ``name`` with ``KEY.PATH=VALUE`` assignments laid over it, and warnings about it.

    Raises:
        UsageError: it cannot be found, read or used, with the file and the key.
    """
    path = locate(name)
    value = _anchored(yamlfile.assigned(yamlfile.extended(path, locate, _read), assignments), Path.cwd())
    where = f"{path} with --set {' '.join(assignments)}" if assignments else str(path)
    recipe = yamlfile.convert(value, Recipe, where)
    return recipe, _check(recipe, where)


def _read(path: Path) -> dict[str, Any]:
    """The map in one recipe file: named by that file unless it says otherwise, its paths made fit to be inherited."""
    return {"name": path.stem, **_anchored(yamlfile.read(path), path.parent)}


def _anchored(value: dict[str, Any], folder: Path) -> dict[str, Any]:
    def anchored(table: dict[str, Any], *keys: str) -> dict[str, Any]:
        relative = {key: path for key in keys if isinstance(path := table.get(key), str)
                    and path.isprintable() and path.startswith(("./", "../"))}
        return {**table, **{key: str((folder / path).resolve()) for key, path in relative.items()}}

    engine = value.get("engine")
    whole = {**value, "engine": anchored(engine, "overlay")} if isinstance(engine, dict) else value
    return anchored(whole, "model", "image")


def _check(recipe: Recipe, where: str) -> list[str]:
    """What the types cannot say; returns warnings."""
    if not _NAME.fullmatch(recipe.name):
        raise UsageError(f"{recipe.name!r} cannot name a job", where=f"{where}: name",
                         remedy="use letters, digits, '.', '_' and '-'")
    if not recipe.model.isprintable() or not recipe.model.strip() or recipe.model.startswith("-"):
        raise UsageError(f"{recipe.model!r} is no name or path of a model", where=f"{where}: model",
                         remedy="write a hub's name such as org/name, or a path that begins with / or ./")
    words = [*recipe.engine.env.values(), *flags.argv(recipe.engine.args), *recipe.engine.extra_args,
             *flags.argv(recipe.bench.args), recipe.description, recipe.image or ""]
    if any("\0" in word or not _is_text(word) for word in words):
        raise UsageError("a value holds a NUL, or bytes that are no text", where=where)
    for variable in recipe.engine.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            raise UsageError(f"{variable!r} is no name for a variable", where=f"{where}: engine.env")
    _check_secrets(recipe.engine, where)
    overlay = recipe.engine.overlay
    if overlay is not None and not (overlay.startswith("/") and overlay.isprintable() and ":" not in overlay):
        raise UsageError(f"{overlay!r} is no path of a folder that can be on PYTHONPATH",
                         where=f"{where}: engine.overlay", remedy="write it absolute, or ./FOLDER beside the recipe")
    _check_times(recipe, where)
    _check_bench(recipe, where)
    warnings = [flags.check(recipe.engine.args, recipe.engine.version, where), _check_shape(recipe, where)]
    return [warning for warning in warnings if warning]


def _check_secrets(engine: Engine, where: str) -> None:
    """Raises UsageError if the engine is given a secret: it would stand in files, and in the list of processes."""
    named = [f"env.{name}" for name, value in engine.env.items() if _SECRET.search(name) or _CREDENTIALS.search(value)]
    named += [f"args.{name}" for name, value in engine.args.items()
              if _CREDENTIALS.search(str(value))
              or (name not in flags.OWNED and flags.gives_secret(f"--{name}") and value is not True)]
    named += ["extra_args" for word in engine.extra_args if _CREDENTIALS.search(word) or flags.gives_secret(word)]
    if named:
        raise UsageError("a secret would be written into the run's files and scripts",
                         where=f"{where}: engine.{named[0]}",
                         remedy="keep it in a file that only you can read, and name that: HF_TOKEN_PATH")


def _is_text(word: str) -> bool:
    """Whether ``word`` can be written to a file; bytes of a command line that are no text cannot."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_times(recipe: Recipe, where: str) -> None:
    times = {f"resources.{key}": getattr(recipe.resources, key) for key in (
        "time", "load_time", "load_limit", "idle_timeout", "serve_idle_timeout", "sweep_grace", "sweep_silence")}
    times |= {f"bench.{key}": getattr(recipe.bench, key) for key in ("point_limit", "sweep_limit", "min_window")}
    for key, text in times.items():
        if not seconds(text, f"{where}: {key}") and key.endswith(("_limit", "_timeout", "_silence")):
            raise UsageError("must be longer than 0 s: nothing would be measured", where=f"{where}: {key}")
    if seconds(recipe.resources.time, where) <= END_MARGIN_S:
        raise UsageError(f"must be longer than {END_MARGIN_S} s: so long before its end a job stops by itself",
                         where=f"{where}: resources.time")


def _check_bench(recipe: Recipe, where: str) -> None:
    for name in recipe.bench.args:
        # The benchmark's parser takes a flag's beginning for the flag.
        owned = next((flag for flag in sorted(flags.BENCH_OWNED) if flag.startswith(name.replace("_", "-"))), None)
        if owned:
            raise UsageError(f"--{owned} is set by isambard-serve itself", where=f"{where}: bench.args.{name}",
                             remedy="use the keys of bench instead")
    listed = recipe.bench.concurrency
    if listed != "saturate" and len(set(listed)) != len(listed):
        raise UsageError("names a concurrency twice", where=f"{where}: bench.concurrency",
                         remedy="use bench.repeats to measure a point again")
    if recipe.bench.profile_at and "profiler-config" in recipe.engine.args:
        raise UsageError("--profiler-config is set by isambard-serve itself where a profile is taken",
                         where=f"{where}: engine.args.profiler-config", remedy="take one of the two out")
    length, longest = recipe.bench.isl + recipe.bench.osl, recipe.engine.args.get("max-model-len")
    if isinstance(longest, int) and not isinstance(longest, bool) and length > longest:
        raise UsageError(f"isl + osl is {length} tokens, the engine takes {longest} (max-model-len)",
                         where=f"{where}: bench")


def _check_shape(recipe: Recipe, where: str) -> str | None:
    """A warning if the parallel shape leaves GPUs idle; raises UsageError if it needs more than are asked for, or if a
    size that is reckoned with is none.
    """
    for name, most in SIZES.items():
        size = recipe.engine.args.get(name, 1)
        if isinstance(size, str) and name == "max-num-batched-tokens":
            continue  # vLLM reads 8k there
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= most:
            raise UsageError(f"must be a whole number from 1 to {most:,}, not {size!r}",
                             where=f"{where}: engine.args.{name}",
                             remedy="write it without quotes, or leave it out and the engine decides")
    needed, gpus = ranks(recipe), recipe.resources.gpus
    if needed > gpus:
        raise UsageError(f"its parallel shape needs {needed} GPUs, it asks for {gpus}",
                         where=f"{where}: resources.gpus", remedy=f"set resources.gpus={needed}, or shrink the shape")
    return f"its parallel shape uses {needed} of the {gpus} GPUs that it asks for" if needed < gpus else None


def ranks(recipe: Recipe) -> int:
    """How many workers the engine has by its parallel shape: TP × PP × DP."""
    product = 1
    for key in ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"):
        size = recipe.engine.args.get(key, 1)
        product *= size if isinstance(size, int) else 1
    return product


class _Packed(Record, frozen=True):
    """Recipes on their way to another machine."""

    recipes: tuple[Recipe, ...]
    schema: str = "isambard-serve/recipes-resolved/1"


def packed(recipes: Iterable[Recipe]) -> bytes:
    """``recipes``, whole and resolved, as one line that :func:`unpacked` reads on another machine.

    What comes with the package (the model of ``tiny``) is there as well, in another place.
    """
    jobs = shipped.folder("jobs")

    def portable(recipe: Recipe) -> Recipe:
        inside = Path(recipe.model).is_relative_to(jobs)
        model = f"./{Path(recipe.model).relative_to(jobs)}" if inside else recipe.model
        return msgspec.structs.replace(recipe, model=model)

    return msgspec.json.encode(_Packed(recipes=tuple(portable(recipe) for recipe in recipes))) + b"\n"


def unpacked(line: bytes, assignments: tuple[str, ...] = ()) -> list[Recipe]:
    """The recipes in ``line``, with ``KEY.PATH=VALUE`` assignments laid over each.

    Raises:
        UsageError: it holds none.
    """
    try:
        packed = msgspec.json.decode(line, type=_Packed).recipes
    except msgspec.MsgspecError as error:
        raise UsageError(f"no recipes: {error}", where="stdin",
                         remedy="RECIPE - is for recipes that isambard-serve sends itself, with --host") from error
    jobs = shipped.folder("jobs")
    return [yamlfile.convert(_anchored(yamlfile.assigned(msgspec.to_builtins(each), assignments), jobs), Recipe,
                             each.name) for each in packed]


def locked(recipe: Recipe) -> str:
    """``recipe`` as YAML: whole, resolved, and itself a recipe that loads to the same."""
    return yamlfile.dump(msgspec.to_builtins(recipe))
