"""What is tried in a recipe's image, on a node, before its numbers are believed: ceilings, and the experts' kernels."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from isambard_serve import container, kernelcheck, modelconfig, task
from isambard_serve.errors import ServeError, UsageError
from isambard_serve.kernelbackends import BACKENDS
from isambard_serve.kernelcheck import KernelCheck, Shape
from isambard_serve.recipe import Recipe
from isambard_serve.run import RunDir, read_record
from isambard_serve.site import Site
from isambard_serve.task import TaskPlan

VERDICTS = {backend: f"kernels-{backend}" for backend in sorted(BACKENDS)}
"""Backend → the kind of verdict on it, which is kept beside an image."""


@dataclass(frozen=True)
class Kernels:
    """The experts' kernels that a recipe names, of a kind that can be checked.

    Attributes:
        input_quant: the activations' arithmetic, as the backend's variable says it; None: bf16.
        shape: None where they cannot be checked after all, for the reason ``obstacle``.
    """

    backend: str
    input_quant: Mapping[str, Any] | None
    shape: Shape | None
    obstacle: str = ""


def checkable(recipe: Recipe, site: Site) -> Kernels | None:
    """The kernels of ``recipe``; None if it names none that can be checked.

    Raises:
        UsageError: the recipe's variable for the activations' arithmetic is no JSON.
    """
    backend = str(recipe.engine.args.get("moe-backend", ""))
    if backend not in BACKENDS:
        return None
    variable = "VLLM_HUMMING_INPUT_QUANT_CONFIG"
    try:
        input_quant = json.loads(recipe.engine.env.get(variable) or "null")
    except ValueError as error:
        raise UsageError(f"is no JSON: {error}", where=f"recipe {recipe.name}: engine.env.{variable}") from error
    if backend != "humming":
        input_quant = None
    shape = _shape(recipe, site)
    obstacle = _obstacle(recipe, backend) or ("" if shape else f"nothing is known of the experts of {recipe.model}")
    return Kernels(backend, input_quant, None if obstacle else shape, obstacle)


def _obstacle(recipe: Recipe, backend: str) -> str:
    """Why ``recipe`` runs other kernels of ``backend`` than those that can be checked, if it does."""
    env = recipe.engine.env
    if backend == "humming" and env.get("VLLM_HUMMING_MOE_GEMM_TYPE", "indexed").lower().startswith("grouped"):
        return "only humming's indexed product is"
    if backend == "marlin" and env.get("VLLM_MARLIN_INPUT_DTYPE"):
        return "only marlin's product with activations in bf16 is"
    return ""


def _shape(recipe: Recipe, site: Site) -> Shape | None:
    model = modelconfig.find(recipe.model, _variables(recipe, site))
    if model is None or model.experts is None:
        return None
    engine = recipe.engine
    gpus = int(engine.number("tensor-parallel-size", 1) * engine.number("data-parallel-size", 1))
    shared = engine.args.get("enable-expert-parallel") is True
    return Shape(experts=model.experts.experts, ranks=gpus if shared else 1, top_k=model.experts.top_k,
                 hidden=model.hidden, intermediate=model.experts.intermediate // (1 if shared else gpus))


def kernels(recipe: Recipe, site: Site, run_dir: str) -> list[tuple[str, ...]]:
    """The commands of a task that check the experts' kernels of ``recipe`` in its image, at its shapes, on one GPU.

    A file beside the image says afterwards that they passed, and only if they did. No commands: there is nothing that
    can be checked.

    Raises:
        UsageError: see :func:`checkable`.
    """
    found = checkable(recipe, site)
    if found is None or found.shape is None:
        return []
    out = str(RunDir(Path(run_dir)).kernels)
    shape = [f"--{name.replace('_', '-')}={value}" for name, value in msgspec.structs.asdict(found.shape).items()]
    input_quant = json.dumps(found.input_quant, separators=(",", ":"))
    check = task.inside(site, recipe, run_dir, "kernelcheck", "--out", out, "--backend", found.backend,
                        "--input-quant", input_quant, *shape, variables=_variables(recipe, site))
    kept = container.verdict(site, recipe, VERDICTS[found.backend])
    if kept is None:
        return [check]
    return [("mkdir", "-p", str(Path(kept).parent)), ("rm", "-f", kept), check, ("cp", out, kept)]


def unchecked(recipe: Recipe, site: Site) -> str | None:
    """Why the experts' kernels of ``recipe`` should not be trusted yet; None: nothing speaks against them.

    Raises:
        UsageError: see :func:`checkable`.
    """
    found = checkable(recipe, site)
    kept = container.verdict(site, recipe, VERDICTS[found.backend]) if found else None
    if found is None or kept is None:
        return None
    with contextlib.suppress(OSError, ServeError):
        check = read_record(Path(kept), KernelCheck)
        if kernelcheck.covers(check, found.backend, found.input_quant) and not _made_since(recipe, site, Path(kept)):
            return None
    if found.shape is None:
        return f"its {found.backend} kernels cannot be checked: {found.obstacle}"
    return (f"the {found.backend} kernels of {recipe.image} have not passed a check here, and wrong ones do "
            f"not show: isambard-serve image check {recipe.name}")


def _made_since(recipe: Recipe, site: Site, kept: Path) -> bool:
    """Whether the recipe's image is newer than what is ``kept`` of it: the file itself, or what tells of its build."""
    places = (Path(container.image(site, recipe)), Path(f"{site.container.images_dir}/{recipe.image}.json"))
    checked = kept.stat().st_mtime
    return any(place.is_absolute() and place.exists() and place.stat().st_mtime > checked for place in places)


def plan(recipe: Recipe, site: Site, *, run_id: str, runs_dir: str, python: str, time_s: int) -> TaskPlan:
    """The plan of measuring a whole node at ``site`` (whose variables are resolved), in the image of ``recipe``.

    Raises:
        UsageError: the site's engine is simulated, or the recipe names no image.
    """
    if site.container.runtime == "simulated":
        raise UsageError("has no GPUs to measure: its engine is simulated", where=f"site {site.name}")
    run_dir = f"{runs_dir}/{run_id}"
    measure = task.inside(site, recipe, run_dir, "probe", "--out", str(RunDir(Path(run_dir)).ceilings),
                          variables=_variables(recipe, site))
    return task.make("probe", f"measures a node in the image of {recipe.name}",
                     [measure, *kernels(recipe, site, run_dir)], site, run_id=run_id, runs_dir=runs_dir, python=python,
                     time_s=time_s, gpus=site.node.gpus, environment=recipe.engine.env,
                     needs=container.image_need(site, recipe))


def _variables(recipe: Recipe, site: Site) -> dict[str, str]:
    return {**site.set, **recipe.engine.env}
