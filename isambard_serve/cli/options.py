"""Options and arguments that several commands share, and what they stand for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from isambard_serve.plan import Plan
    from isambard_serve.recipe import Recipe
    from isambard_serve.run import Runs
    from isambard_serve.site import Site
    from isambard_serve.slurm import Slurm

Command = Callable[..., Any]

site = click.option("--site", "site_name", metavar="NAME", help="The site: a name, or the path of a site file. "
                    "Otherwise $ISAMBARD_SERVE_SITE, your settings, or the site this machine belongs to.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
assignments = click.option("--set", "assignments", metavar="KEY.PATH=VALUE", multiple=True,
                           help="Change one value of the recipe, such as engine.args.max-num-seqs=512; "
                                "null removes it. May be given several times.")
time_limit = click.option("--time", "time_limit", metavar="TIME",
                          help="The serve job's time limit, such as 90m or 4h, instead of the recipe's.")
run = click.argument("name", metavar="JOBID")


def say(text: str) -> None:
    """Prints something for people, apart from what a program may read."""
    click.echo(text, err=True)


def load_recipe(name: str, assignments: tuple[str, ...], time_limit: str | None) -> Recipe:
    """The recipe with the command line's changes; warnings about it are printed."""
    from isambard_serve import recipe

    changes = (*assignments, f"resources.time='{time_limit}'") if time_limit else assignments
    loaded, warnings = recipe.load(name, changes)
    for warning in warnings:
        say(f"warning: {warning}")
    return loaded


def choose_site(name: str | None, *, from_afar: bool = False) -> Site:
    """The site with its variables filled in; values that are only examples are named."""
    from isambard_serve import site

    chosen, assumed = site.resolved(site.choose(name), os.environ, from_afar=from_afar)
    if assumed:
        say(f"note: {', '.join(assumed)} not set here; {chosen.name}'s example values are shown in their place")
    return chosen


def make_plan(recipe: Recipe, chosen: Site, run_id: str | None, runs_dir: str | None = None) -> Plan:
    """The plan of one run at ``chosen``."""
    from isambard_serve import plan, run

    return plan.make(recipe, chosen, run_id=run.checked_id(run_id) if run_id else run.new_id(recipe.name),
                     runs_dir=str(Path(runs_dir or chosen.runs_dir).absolute()), python=sys.executable)


def open_slurm(chosen: Site) -> Slurm:
    """Slurm's commands, with a clean environment."""
    from isambard_serve import slurm

    return slurm.Slurm(slurm.environment(chosen.export, os.environ))


def open_runs(chosen: Site) -> Runs:
    """The site's runs."""
    from isambard_serve.run import Runs

    return Runs(Path(chosen.runs_dir), chosen.name)
