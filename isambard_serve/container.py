"""The engine's container, from site and recipe alone: the words before a command that is to run inside.

Folders of the host are seen inside under their own paths, so that no path means two things. Variables are named and
never given a value here: podman takes the values from its own environment and apptainer passes all on, so that no
list of processes shows a secret. ``inengine/enter.sh`` is the first program inside; it ends what it has started when
whoever started the container has gone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Literal

import msgspec

from isambard_serve.errors import UsageError
from isambard_serve.image import NAME
from isambard_serve.recipe import Recipe
from isambard_serve.records import Record
from isambard_serve.site import Site

Role = Literal["engine", "client", "command", "shell"]
"""What is run inside: the engine itself, the load generator that is talked to on its input, a command that reads
nothing, or a person's shell."""

LABEL = "isambard-serve.run"
"""The label of a run's containers; its value is the run id."""

KERNELS = "/mnt"
"""Where the engine's container sees the run's folder of compiled kernels. Every image has it, and it is the same in
every run: part of what lies there names its own path."""

PASSED = ("CUDA_VISIBLE_DEVICES", "OPENAI_API_KEY", "SLURM_JOB_ID", "VLLM_API_KEY")
"""Variables of the job that the inside sees besides those of the plan, where they are set."""


class Need(Record, frozen=True):
    """Something that must be there before the run is submitted, and the ``remedy`` when it is not.

    It is there when ``path`` exists or, where nothing on the file system tells, when ``command`` succeeds. With a
    ``revision``, ``path`` is a model in the hub's cache, of which all weights must be there.
    """

    what: str
    remedy: str
    path: str | None = None
    revision: str | None = None
    command: tuple[str, ...] = ()


class Mount(Record, frozen=True):
    """A folder or file of the host that the inside sees: at ``target``, or under its own path."""

    source: str
    target: str
    writable: bool


def words(site: Site, recipe: Recipe, *, role: Role, run_dir: str, variables: Mapping[str, str]) -> tuple[str, ...]:
    """The words before a command that is to run in the recipe's container at ``site``; none without a container.

    Args:
        run_dir: the run's directory; the folder that it lies in is seen inside too.
        variables: those that the inside shall see.

    Raises:
        UsageError: the recipe names no image, or a path cannot be mounted.
    """
    runtime = site.container.runtime
    if runtime in ("none", "simulated"):
        return ()
    own_input = role in ("client", "shell")
    enter = ("/bin/sh", f"{run_dir}/inengine/enter.sh", *(("--interactive",) if own_input else ()))
    mounts = [f"{mount.source}:{mount.target}:{'rw' if mount.writable else 'ro'}"
              for mount in _mounts(site, recipe, role, run_dir, variables)]
    if runtime == "apptainer":
        # In a process namespace of its own: when its first process ends, so does everything in it.
        return ("apptainer", "exec", "--pid", *site.container.args, *(f"--bind={mount}" for mount in mounts),
                image(site, recipe), *enter)
    return (
        "podman-hpc", "run", "--rm", "--init", "--interactive", *(("--tty",) if role == "shell" else ()),
        f"--label={LABEL}={run_dir.rsplit('/', 1)[-1]}",
        *((f"--pidfile={run_dir}/engine/container.pid",) if role == "engine" else ()),
        # NCCL's shared memory and every rank's files are those of the node; the log is the run's own file alone.
        "--network=host", "--ipc=host", "--ulimit=host", "--pids-limit=-1", "--log-driver=none",
        *site.container.args, *(f"--volume={mount}" for mount in mounts), f"--workdir={run_dir}",
        *(f"--env={name}" for name in dict.fromkeys([*variables, *PASSED])),
        f"--entrypoint={enter[0]}", image(site, recipe), *enter[1:],
    )


def python(site: Site) -> str:
    """The interpreter that the engine is installed for: beside the engine's command, or the image's own."""
    folder, slash, _ = site.container.command[0].rpartition("/")
    return f"{folder}{slash}python3"


def image(site: Site, recipe: Recipe) -> str:
    """What the site's runtime calls the recipe's image.

    Raises:
        UsageError: the recipe names none.
    """
    if recipe.image is None:
        raise UsageError(f"names no image, and {site.name} runs the engine in a container",
                         where=f"recipe {recipe.name}: image")
    if recipe.image.endswith(".sif"):
        return recipe.image
    if site.container.runtime == "podman-hpc":
        return f"localhost/isambard-serve/{recipe.image}" if NAME.fullmatch(recipe.image) else recipe.image
    # The name that apptainer itself gives to the image: last part of the reference, tag behind "_".
    name = recipe.image.rsplit("/", 1)[-1].replace(":", "_").replace("@", "_")
    return f"{site.container.images_dir}/{name}.sif"


def verdict(site: Site, recipe: Recipe, kind: str) -> str | None:
    """The file that says how a ``kind`` of check of the recipe's image, with its overlay, came out; None where no
    images are kept.

    Raises:
        UsageError: the recipe names no image.
    """
    if site.container.runtime not in ("podman-hpc", "apptainer") or site.container.images_dir is None:
        return None
    stem = image(site, recipe).rsplit("/", 1)[-1].removesuffix(".sif").replace(":", "_").replace("@", "_")
    patched = f"+{recipe.engine.overlay.strip('/').replace('/', '_')}" if recipe.engine.overlay else ""
    return f"{site.container.images_dir}/{stem}{patched}.{kind}.json"


def image_need(site: Site, recipe: Recipe) -> tuple[Need, ...]:
    """What must be there for the container to start: its image."""
    runtime = site.container.runtime
    if runtime in ("none", "simulated"):
        return ()
    what, name = "the engine's image", image(site, recipe)
    job = "pull it in a job (login nodes have too little memory): srun --gpus=1 --time=1:00:00"
    if NAME.fullmatch(recipe.image or ""):
        remedy = f"isambard-serve image build {recipe.image}, in a job of its own"
    elif recipe.image == name and runtime == "apptainer":
        remedy = "check the path"
    elif runtime == "apptainer":
        remedy = f"{job} apptainer pull --dir {site.container.images_dir} docker://{recipe.image}"
    else:
        remedy = f"{job} podman-hpc pull {name}"
    if runtime == "apptainer":
        return (Need(what=what, path=name, remedy=remedy),)
    return (Need(what=what, command=("podman-hpc", "image", "exists", name), remedy=remedy),)


def local_folder(site: Site, run_dir: str) -> str | None:
    """The run's own folder on its node, in memory, for what the container writes besides results."""
    if site.container.runtime not in ("podman-hpc", "apptainer"):
        return None
    return f"{site.container.local}/isambard-serve-{run_dir.rsplit('/', 1)[-1]}"


def kernels(site: Site, recipe: Recipe) -> str | None:
    """How the files begin that keep compiled kernels of this image and engine, if the site keeps any."""
    if site.container.kernels_dir is None or site.container.runtime not in ("podman-hpc", "apptainer"):
        return None
    what = msgspec.json.encode((recipe.image, recipe.model, recipe.engine), order="sorted")
    return f"{site.container.kernels_dir}/{hashlib.sha256(what).hexdigest()[:16]}"


def _mounts(site: Site, recipe: Recipe, role: Role, run_dir: str, variables: Mapping[str, str]) -> list[Mount]:
    """What the inside sees, outer folders first."""
    runs_dir = run_dir.rpartition("/")[0]
    own = [Mount(source=path, target=path, writable=True)
           for path in _outermost([*site.container.binds, runs_dir, *_absolute(variables.get("HF_HOME"))])]
    seen = [mount.source for mount in own]
    read = [Mount(source=path, target=path, writable=False)
            for path in _outermost([*seen, *_absolute(recipe.model), *_absolute(recipe.engine.overlay),
                                    *_absolute(variables.get("HF_TOKEN_PATH"))])
            if path not in seen]
    local = local_folder(site, run_dir) if role == "engine" else None
    scratch = [Mount(source=f"{local}/tmp", target="/tmp", writable=True),  # noqa: S108 - inside, and bound
               Mount(source=f"{local}/kernels", target=KERNELS, writable=True)] if local else []
    mounts = [*own, *read, *scratch]
    for mount in mounts:
        if set(mount.source) & set(":,"):
            raise UsageError(f"{mount.source!r} cannot be seen inside a container: no ':' and no ','",
                             where=f"recipe {recipe.name} at {site.name}")
    return mounts


def _absolute(path: str | None) -> list[str]:
    return [path] if path and path.startswith("/") else []


def _outermost(paths: Iterable[str]) -> list[str]:
    """``paths`` without those that lie in another of them, in their order."""
    unique = list(dict.fromkeys(str(PurePosixPath(path)) for path in paths))
    return [path for path in unique
            if not any(other != path and PurePosixPath(path).is_relative_to(other) for other in unique)]
