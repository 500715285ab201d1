"""The task that fetches a model's weights into the shared cache of the hub."""

from __future__ import annotations

from isambard_serve import container, task
from isambard_serve.errors import UsageError
from isambard_serve.recipe import Recipe
from isambard_serve.site import Site
from isambard_serve.task import TaskPlan


def plan(recipe: Recipe, site: Site, *, run_id: str, runs_dir: str, python: str, time_s: int,
         token_file: str | None = None) -> TaskPlan:
    """The plan of fetching the weights of ``recipe`` at ``site`` (whose variables are resolved).

    Args:
        token_file: holds the token that the hub wants for some models.

    Raises:
        UsageError: there is nothing to fetch.
    """
    if site.container.runtime == "simulated":
        raise UsageError("a simulated engine has no weights", where=f"site {site.name}")
    if recipe.model.startswith("/"):
        raise UsageError("the model is a folder of this machine, not one of the hub", where=f"recipe {recipe.name}")
    own = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if token_file:
        own["HF_TOKEN_PATH"] = token_file
    fetch = task.inside(site, recipe, f"{runs_dir}/{run_id}", "weightfetch", recipe.model,
                        "--revision", recipe.revision, variables={**site.set, **own})
    return task.make(f"weights-{recipe.name}", f"fetches the weights of {recipe.model}", [fetch], site,
                     run_id=run_id, runs_dir=runs_dir, python=python, time_s=time_s, environment=own,
                     needs=container.image_need(site, recipe))
