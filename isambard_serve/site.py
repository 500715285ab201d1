"""Sites: what a cluster is made of, and what a job must ask for there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from isambard_serve import config, shipped, yamlfile
from isambard_serve.ceilings import Expected
from isambard_serve.errors import UsageError
from isambard_serve.records import Record

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


class Node(Record, frozen=True):
    """A node's shape: GPUs, CPU cores (all of them, over all chips), memory of each GPU in GiB."""

    gpus: int
    cpus: int
    gpu_gib: Annotated[float, Meta(gt=0, le=10**5)] | None = None


class Container(Record, frozen=True):
    """How the engine's container is run.

    ``runtime`` ``none`` starts ``command`` on the node itself; ``apptainer`` and ``podman-hpc`` run it in the
    recipe's image, with the runtime's ``args`` and with ``binds``, host folders seen under the same path inside
    (the runs' folder and ``HF_HOME`` are, anyway); ``simulated`` starts the package's own simulated engine, with
    ``args``. ``images_dir`` is where apptainer's images lie. ``local`` is a folder of the node's own, in memory, for
    temporary files and compiled kernels; ``kernels_dir``, on shared storage, keeps the kernels for the next run.
    """

    runtime: Literal["none", "apptainer", "podman-hpc", "simulated"]
    command: tuple[str, ...] = ("vllm",)
    images_dir: str | None = None
    args: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()
    local: str = "/tmp"  # noqa: S108 - a folder of the run's own is made in it
    kernels_dir: str | None = None


class Sweep(Record, frozen=True):
    """The smallest job that this site lets measure: GPUs it must ask for, and its load generator's CPU cores."""

    gpus: int
    load_generator_cpus: int


class Serve(Record, frozen=True):
    """Where a server for people (``submit --serve``) listens on its node.

    ``interface`` is the node's network interface whose address is used; loopback unless one is named.
    """

    interface: str | None = None


class Directives(Record, frozen=True, rename="kebab"):
    """Slurm directives passed through as given; None leaves one out."""

    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    mail_user: str | None = None
    mail_type: str | None = None


class Site(Record, frozen=True):
    """A site file. Paths may hold ``$VARIABLE``; :func:`resolved` fills them from the environment.

    ``detect`` is a path that exists only there. ``example`` gives values to variables where the site is only
    looked at from afar (``plan``, ``render``). ``poll_interval_s`` is the fastest that Slurm may be asked.
    ``scheduler`` ``local`` runs jobs as processes of this machine, one rung after another. ``placement`` says who
    measures: ``dependent`` a job of its own, ``inside`` the serve job itself.
    ``interactive`` lists the directives that may be wanted for an interactive job (``shell``): the first that Slurm
    accepts are used, in place of ``partition``.
    ``export`` names the variables of the submitting shell that jobs see; ``unset`` those a job drops.
    ``ceilings`` is what each of its GPUs should reach: what ``probe`` is compared with, and ``plan`` reckons with.
    """

    name: str
    description: str
    scheduler: Literal["slurm", "local"]
    node: Node
    runs_dir: str
    container: Container
    sweep: Sweep
    serve: Serve = Serve()
    interactive: tuple[dict[str, str], ...] = ()
    partition: str | None = None
    detect: str | None = None
    placement: Literal["dependent", "inside"] = "dependent"
    poll_interval_s: float = 60.0
    open_files: int = 65536
    directives: Directives = Directives()
    export: tuple[str, ...] = ("HOME", "USER", "LOGNAME", "PATH", "LANG")
    unset: tuple[str, ...] = ()
    set: dict[str, str] = {}
    example: dict[str, str] = {}
    ceilings: Expected = Expected()


def folders() -> list[Path]:
    """Where sites are looked for, in order: the user's, then the shipped ones."""
    return [shipped.user_folder() / "sites", shipped.folder("sites")]


def names() -> list[str]:
    """The names of all sites that can be found."""
    return shipped.names(folders())


def _locate(name: str, named_by: Path | None = None) -> Path:
    """The file of the site ``name``: a path, or a name, looked up beside ``named_by`` (the file that extends it, if
    any) and in :func:`folders`.
    """
    if "/" in name or name.endswith(".yaml"):
        path = Path(name) if named_by is None else named_by.parent / name
        if path.is_file():
            return path
        raise UsageError("no such site file", where=str(path))
    beside = [named_by.parent] if named_by else []
    return shipped.named("site", name, beside + folders(), named_by=named_by, where="--site")


def load(name: str) -> Site:
    """The site called ``name``, or in the file ``name``."""
    path = _locate(name)
    value = yamlfile.extended(path, _locate)
    value.setdefault("name", path.stem)
    site = yamlfile.convert(value, Site, str(path))
    for key, variables in (("export", site.export), ("unset", site.unset), ("set", site.set)):
        for variable in variables:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
                raise UsageError(f"{variable!r} is no name for a variable", where=f"{path}: {key}")
    return site


def choose(flag: str | None, environ: Mapping[str, str] | None = None) -> Site:
    """The site to use: ``flag``, else ``$ISAMBARD_SERVE_SITE``, the user's config, or the one detected here.

    Raises:
        UsageError: none of these names a site.
    """
    environ = os.environ if environ is None else environ
    named = flag or environ.get("ISAMBARD_SERVE_SITE") or config.load().site
    if named:
        return load(named)
    for candidate in names():
        try:
            site = load(candidate)
        except UsageError:
            continue  # a broken file is named to whoever names it
        if site.detect and Path(site.detect).exists():
            return site
    raise UsageError("this machine is none of the known sites", where="--site",
                     remedy=f"name one: --site {'|'.join(names())}, or set site: in "
                            f"{shipped.user_folder() / 'config.yaml'}")


def resolved(site: Site, environ: Mapping[str, str], *, from_afar: bool = False) -> tuple[Site, list[str]]:
    """``site`` with its variables filled in, and the names of those that took their ``example`` value.

    Args:
        from_afar: whether example values may stand in for variables that are not set.

    Raises:
        UsageError: a variable has no value.
    """
    assumed: list[str] = []
    # Shells have UID and export it to nobody: by itself it tells nothing of where this is.
    elsewhere = from_afar and not all(environ.get(name) for name in site.example if name != "UID")

    def fill(text: str) -> str:
        def value(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            if environ.get(name):  # an empty one would make a path from the root
                return environ[name]
            if name == "UID" and not elsewhere:
                return str(os.getuid())
            if from_afar and name in site.example:
                assumed.append(name)
                return site.example[name]
            raise UsageError(f"${name} is not set", where=f"site {site.name}",
                             remedy=f"run this where {name} is set (a login node of {site.name}), or set it")
        return _VARIABLE.sub(value, text)

    container = msgspec.structs.replace(
        site.container,
        images_dir=fill(site.container.images_dir) if site.container.images_dir else None,
        binds=tuple(fill(bind) for bind in site.container.binds),
        local=fill(site.container.local),
        kernels_dir=fill(site.container.kernels_dir) if site.container.kernels_dir else None,
        command=tuple(fill(word) for word in site.container.command),
    )
    values = {key: fill(value) for key, value in site.set.items()}
    runs_dir = str(Path(fill(site.runs_dir)).expanduser())
    if not Path(runs_dir).is_absolute():
        raise UsageError(f"{site.runs_dir!r} is no absolute path", where=f"site {site.name}: runs_dir")
    filled = msgspec.structs.replace(site, runs_dir=runs_dir, container=container, set=values)
    return filled, sorted(set(assumed))
