"""``weights``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from isambard_serve.cli import options


@click.group()
def weights() -> None:
    """The weights of a recipe's model."""


@weights.command()
@click.argument("name", metavar="RECIPE", shell_complete=options.recipe_names)
@options.site
@options.assignments
@options.task_time("4h")
@options.wait_for_task
@options.as_json
def fetch(name: str, site_name: str | None, assignments: tuple[str, ...], time_limit: str, wait: bool,
          as_json: bool) -> None:
    """Fetch the weights of RECIPE's model from the hub, in a job: login nodes have too little memory for it.

    They go into the cache that the site names (HF_HOME), once for all recipes and all who share it. Files that are
    there already are not fetched again. A token that the hub wants for some models is read from the file that
    HF_TOKEN_PATH names, or where `hf auth login` has put it.
    """
    from isambard_serve import recipe as recipes
    from isambard_serve import run
    from isambard_serve import weights as fetching

    site = options.avoid_bad_nodes(options.choose_site(site_name))
    recipe = options.load_recipe(name, assignments, None)
    token = Path(os.environ.get("HF_TOKEN_PATH") or "~/.cache/huggingface/token").expanduser()
    if "HF_TOKEN" in os.environ and not token.exists():
        options.say(f"note: HF_TOKEN is passed to no job, where others could see it; keep the token in {token}")
    plan = fetching.plan(recipe, site, run_id=run.new_id(f"weights-{recipe.name}"), runs_dir=site.runs_dir,
                         python=sys.executable, time_s=recipes.seconds(time_limit, "--time"),
                         token_file=str(token) if token.exists() else None)
    options.submit_task(plan, site, wait=wait, as_json=as_json)
