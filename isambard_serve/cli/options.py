"""Options and arguments that several commands share, and what they stand for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from isambard_serve.cost import Forecast
    from isambard_serve.plan import Plan
    from isambard_serve.recipe import Recipe
    from isambard_serve.run import Runs
    from isambard_serve.site import Site
    from isambard_serve.slurm import Slurm
    from isambard_serve.task import TaskPlan

Command = Callable[..., Any]


def _site_names(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    from isambard_serve import site

    return [name for name in site.names() if name.startswith(incomplete)]


site = click.option("--site", "site_name", metavar="NAME", shell_complete=_site_names,
                    help="The site: a name, or the path of a site file. Otherwise $ISAMBARD_SERVE_SITE, your settings, "
                         "or the site this machine belongs to.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
assignments = click.option("--set", "assignments", metavar="KEY.PATH=VALUE", multiple=True,
                           help="Change one value of the recipe, such as engine.args.max-num-seqs=512; "
                                "null removes it. May be given several times.")
time_limit = click.option("--time", "time_limit", metavar="TIME",
                          help="The serve job's time limit, such as 90m or 4h, instead of the recipe's.")
placement = click.option("--placement", type=click.Choice(["dependent", "inside"]),
                         help="Who measures: a job of its own that depends on the serve job, or the serve job itself. "
                              "Otherwise as the site says.")
run = click.argument("name", metavar="JOBID")

PROBE = ("probe",)
"""Instead of recipes: the task that measures a node."""
wait_for_task = click.option("--wait", is_flag=True, help="Wait until it has ended, and show what it prints meanwhile. "
                             "Stopping to wait (Ctrl-C) does not stop it.")


def task_time(default: str) -> Callable[[Command], Command]:
    """The option of a task's time limit."""
    return click.option("--time", "time_limit", metavar="TIME", default=default, show_default=True,
                        help="The job's time limit, such as 30m or 4h.")


def recipe_names(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The recipes that begin with ``incomplete``, for a shell's completion."""
    from isambard_serve import recipe

    return [name for name in recipe.names() if name.startswith(incomplete)]


def say(text: str) -> None:
    """Prints something for people, apart from what a program may read."""
    click.echo(text, err=True)


def load_recipe(name: str, assignments: tuple[str, ...], time_limit: str | None) -> Recipe:
    """The recipe with the command line's changes; warnings about it are printed."""
    from isambard_serve import recipe

    changes = assignments if time_limit is None else (*assignments, f"resources.time='{time_limit}'")
    loaded, warnings = recipe.load(name, changes)
    for warning in warnings:
        say(f"warning: {warning}")
    return loaded


def load_recipes(names: Sequence[str], assignments: tuple[str, ...], time_limit: str | None) -> list[Recipe]:
    """The recipes ``names``; ``-`` stands for those that another machine has resolved, and sends on stdin."""
    from isambard_serve import recipe

    if tuple(names) == ("-",):
        return recipe.unpacked(sys.stdin.buffer.readline(), assignments)
    return [load_recipe(name, assignments, time_limit) for name in names]


def choose_site(name: str | None, *, from_afar: bool = False, placement: Any = None) -> Site:
    """The site with its variables filled in; values that are only examples are named."""
    import msgspec

    from isambard_serve import site

    chosen, assumed = site.resolved(site.choose(name), os.environ, from_afar=from_afar)
    if assumed:
        say(f"note: {', '.join(assumed)} not set here; {chosen.name}'s example values are shown in their place")
    return msgspec.structs.replace(chosen, placement=placement) if placement else chosen


def avoid_bad_nodes(chosen: Site) -> Site:
    """``chosen``, whose jobs are not sent to nodes found bad of late; each that it did not leave out yet is named."""
    from isambard_serve import health

    known = health.bad_nodes(Path(chosen.runs_dir)) if chosen.scheduler == "slurm" else []
    bad = [node for node in known if node.node not in (chosen.directives.exclude or "").split(",")]
    for node in bad:
        say(f"note: {node.node} is left out, where run {node.run_id} found: {'; '.join(node.faults)}")
    return health.avoiding(chosen, bad)


def make_plans(recipes: Sequence[Recipe], chosen: Site, run_id: str | None = None, runs_dir: str | None = None,
               resumes: str | None = None, *, same_node: bool = False, for_people: bool = False) -> list[Plan]:
    """The plans of one run, or of the rungs of a ladder, at ``chosen``; nodes found bad of late are left out."""
    from isambard_serve import plan, run

    chosen = avoid_bad_nodes(chosen)
    ids = [run.checked_id(run_id)] if run_id else [run.new_id(recipe.name) for recipe in recipes]
    return [plan.make(recipe, chosen, run_id=own, runs_dir=str(Path(runs_dir or chosen.runs_dir).absolute()),
                      python=sys.executable, ladder=tuple(ids) if len(ids) > 1 else (), same_node=same_node,
                      resumes=resumes, for_people=for_people)
            for recipe, own in zip(recipes, ids, strict=True)]


def forecasts(recipes: Sequence[Recipe], chosen: Site) -> list[Forecast | None]:
    """What each recipe is expected to reach at ``chosen``; None where the model or the site is not known enough."""
    from isambard_serve import cost, modelconfig

    return [cost.forecast(recipe, chosen, modelconfig.find(recipe.model, {**chosen.set, **recipe.engine.env}))
            for recipe in recipes]


def plan_document(plans: Sequence[Plan], expected: Sequence[Forecast | None]) -> bytes:
    """The plans as one JSON document, each with what it is expected to reach (null where nothing is known)."""
    import msgspec

    from isambard_serve import records

    return records.document("plan", plans=[
        {**msgspec.to_builtins(plan),
         "predicted_output_tok_s": round(forecast.output_tok_s, 1) if forecast else None,
         "predicted_knee": forecast.knee if forecast else None,
         "predicted": msgspec.to_builtins(forecast)} for plan, forecast in zip(plans, expected, strict=True)])


def open_slurm(chosen: Site) -> Slurm | None:
    """Slurm's commands, with a clean environment; None where jobs are processes of this machine."""
    from isambard_serve import slurm

    return slurm.Slurm(slurm.environment(chosen.export, os.environ)) if chosen.scheduler == "slurm" else None


def submit_task(plan: TaskPlan, chosen: Site, *, wait: bool, as_json: bool) -> None:
    """Submits a task, says so, and with ``wait`` shows its log until it has ended.

    Raises:
        ServeError: it was waited for, and failed.
    """
    import msgspec

    from isambard_serve import records, status, task
    from isambard_serve.errors import ServeError

    slurm = open_slurm(chosen)
    directory = task.submit(plan, slurm)
    job = directory.job_ids().get("task") or directory.job_ids().get("controller")
    say(f"{plan.run_id}: job {job}, at most {plan.cost:g} node-hours")
    if wait:
        for block in status.follow(directory.task_log, directory, slurm):
            click.echo(block, nl=False, err=as_json)
    else:
        say(f"  → isambard-serve logs -f {plan.run_id}")
    run = status.read(directory, slurm if wait else None)
    if as_json:
        click.echo(records.document("task", runs=[msgspec.to_builtins(run)]))
    if wait and run.state != "done":
        raise ServeError(run.reason or run.state, where=run.run_id, remedy=f"isambard-serve logs {run.run_id}")


def open_runs(chosen: Site) -> Runs:
    """The site's runs."""
    from isambard_serve.run import Runs

    return Runs(Path(chosen.runs_dir), chosen.name)


def located(name: str, site_name: str | None) -> Path:
    """Where ``name`` lies: a path, a run that `collect` has put into ./results, or one at the site.

    Raises:
        UsageError: nowhere.
    """
    from isambard_serve.errors import UsageError

    for path in (Path(name), Path("results") / name):
        if path.exists():
            return path
    try:
        return open_runs(choose_site(site_name)).find(name).path
    except UsageError as error:
        raise UsageError(f"is no file or folder here, and no run that is known here: {error.what}", where=name,
                         remedy=error.remedy) from error
