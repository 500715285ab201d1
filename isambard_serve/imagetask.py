"""The tasks that make an image and that try it, and what is known of the images of a site."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from isambard_serve import __version__, container, image, probetask, render, task
from isambard_serve.errors import ServeError, UsageError
from isambard_serve.image import Image
from isambard_serve.imagecheck import ImageCheck
from isambard_serve.recipe import Recipe
from isambard_serve.records import Record
from isambard_serve.run import read_record
from isambard_serve.site import Site
from isambard_serve.task import TaskPlan

T = TypeVar("T")

_MIGRATED = """podman-hpc images --format '{{.ReadOnly}}' "$1" | grep --quiet true"""
"""Whether the image ``$1`` stands on the shared file system."""


class Known(Record, frozen=True):
    """What is known of an image at a site: ``defined`` here, ``built`` there, and how its last check came out.

    ``stale``: what was built is not what is defined now. None: it is not built, or not from a definition.
    """

    image: str
    description: str
    base: str | None
    digest: str | None
    defined: bool
    built: bool
    stale: bool | None
    check: ImageCheck | None


def build(made: Image, site: Site, *, run_id: str, runs_dir: str, python: str, time_s: int) -> TaskPlan:
    """The plan of building ``made`` at ``site`` (whose variables are resolved).

    Raises:
        UsageError: the base has no digest, or the site runs no containers.
    """
    folder, run_dir = _images_dir(site), f"{runs_dir}/{run_id}"
    recipe_file = "Containerfile" if site.container.runtime == "podman-hpc" else "image.def"
    text = render.text(recipe_file, image=made, version=__version__)
    scratch = f"{site.container.local}/isambard-serve-{run_id}"
    commands: list[Sequence[str]] = [("mkdir", "-p", folder)]
    if site.container.runtime == "podman-hpc":
        tag = f"localhost/isambard-serve/{made.name}"
        commands += [("podman-hpc", "build", "--network=host", f"--tag={tag}", f"--file={run_dir}/{recipe_file}",
                      run_dir),
                     # Onto the shared file system: what was built is on this node alone. migrate's exit code is 0
                     # whatever comes of it; an image that it has put there is listed as read-only.
                     ("podman-hpc", "migrate", tag), ("sh", "-c", _MIGRATED, "sh", tag)]
    else:
        growing = f"{folder}/.{made.name}.{run_id}.sif"
        commands += [("mkdir", "-p", scratch),
                     ("apptainer", "build", "--fakeroot", growing, f"{run_dir}/{recipe_file}"),
                     ("mv", growing, f"{folder}/{made.name}.sif"),
                     ("rm", "-rf", scratch)]
    # What was found of the image that was there before says nothing of this one.
    kinds = ("check", *probetask.VERDICTS.values())
    commands += [("rm", "-f", *(f"{folder}/{made.name}.{kind}.json" for kind in kinds)),
                 ("cp", f"{run_dir}/image.json", f"{folder}/{made.name}.json")]
    own = {"APPTAINER_CACHEDIR": scratch, "APPTAINER_TMPDIR": scratch}
    return task.make(f"image-{made.name}", f"builds the image {made.name}", commands, site, run_id=run_id,
                     runs_dir=runs_dir, python=python, time_s=time_s, environment=own,
                     files={recipe_file: text, "image.json": msgspec.json.encode(made).decode()})


def check(recipe: Recipe, site: Site, *, run_id: str, runs_dir: str, python: str, time_s: int) -> TaskPlan:
    """The plan of trying the image of ``recipe`` at ``site``, with the recipe's variables, on one GPU.

    Raises:
        UsageError: the recipe names no image, or the site runs no containers.
    """
    folder, run_dir = _images_dir(site), f"{runs_dir}/{run_id}"
    commands = [("mkdir", "-p", folder),
                task.inside(site, recipe, run_dir, "imagecheck", "--out", f"{run_dir}/check.json",
                            variables={**site.set, **recipe.engine.env}),
                ("cp", f"{run_dir}/check.json", container.verdict(site, recipe, "check") or run_dir),
                *probetask.kernels(recipe, site, run_dir)]
    return task.make(f"check-{recipe.name}", f"tries the image of {recipe.name}", commands, site, run_id=run_id,
                     runs_dir=runs_dir, python=python, time_s=time_s, gpus=1, environment=recipe.engine.env,
                     needs=container.image_need(site, recipe))


def known(site: Site) -> list[Known]:
    """The images that are defined here, and those that lie at ``site`` besides."""
    folder = Path(_images_dir(site))
    there = {path.name.removesuffix(".sif") for path in folder.glob("*.sif")} if folder.is_dir() else set()
    found = []
    for name in sorted({*image.names(), *there}):
        made = image.load(name) if name in image.names() else None
        built = _read(folder / f"{name}.json", Image)
        found.append(Known(
            image=name, description=made.description if made else "not defined here", base=made.base if made else None,
            digest=made.digest if made else None, defined=made is not None, built=name in there or built is not None,
            stale=built != made if built and made else None, check=_read(folder / f"{name}.check.json", ImageCheck)))
    return found


def _read(path: Path, kind: type[T]) -> T | None:
    with contextlib.suppress(OSError, ServeError):
        return read_record(path, kind)
    return None


def _images_dir(site: Site) -> str:
    if site.container.runtime not in ("podman-hpc", "apptainer"):
        raise UsageError("runs no containers", where=f"site {site.name}: container.runtime",
                         remedy="name a site that does, with --site")
    if site.container.images_dir is None:
        raise UsageError("does not say where its images lie", where=f"site {site.name}: container.images_dir")
    return site.container.images_dir
