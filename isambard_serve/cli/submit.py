"""``submit`` and ``cancel``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from isambard_serve.cli import elsewhere, options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isambard_serve.plan import Plan
    from isambard_serve.recipe import Recipe
    from isambard_serve.records import Run, State
    from isambard_serve.run import RunDir
    from isambard_serve.site import Site
    from isambard_serve.task import TaskPlan


@click.command(cls=elsewhere.RelayedRecipes)
@click.argument("names", metavar="RECIPE...", nargs=-1, shell_complete=options.recipe_names)
@options.site
@options.assignments
@options.time_limit
@options.placement
@click.option("--serve", "for_people", is_flag=True, help="Serve people, and measure nothing: the engine listens where "
              "the site says, for whoever has the key. It ends when it is cancelled, when nobody asks for anything for "
              "serve_idle_timeout, or when its time is up.")
@click.option("--no-numa-bind", is_flag=True, help="Do not bind the engine to the cores and memory beside its GPUs, "
              "to measure what binding gains: as --set engine.args.numa-bind=false.")
@click.option("--same-node", is_flag=True, help="Run all rungs in one job on one node, one after another: one wait in "
              "the queue, and a fairer ratio than that of several nodes.")
@click.option("--profile-at", metavar="CONCURRENCY", type=click.IntRange(1), help="Measure nothing: record some steps "
              "of steady decode at this concurrency with the engine's profiler, for `trace`.")
@click.option("--resume", metavar="JOBID", help="Go on with a run that was lost, and has ended: its recipe again, "
              "but for the points that are valid already. Instead of RECIPE.")
@click.option("--image-of", metavar="RECIPE", default="dp4-humming", show_default=True,
              shell_complete=options.recipe_names, help="Of `submit probe`: in whose image, and whose kernels.")
@click.option("--max-node-hours", type=float, help="Refuse what may cost more than this in all.")
@click.option("--wait", is_flag=True, help="Wait until all has ended (with --serve: until it is ready), and say "
              "how it goes. Stopping to wait (Ctrl-C) does not stop the run.")
@click.option("--dry-run", is_flag=True, help="Do all but submit: check the recipes and the site, and print the "
              "serve jobs' scripts (or, with --json, the plans).")
@options.as_json
def submit(names: tuple[str, ...], site_name: str | None, assignments: tuple[str, ...], time_limit: str | None,
           placement: str | None, for_people: bool, no_numa_bind: bool, same_node: bool, profile_at: int | None,
           resume: str | None, image_of: str, max_node_hours: float | None, wait: bool, dry_run: bool,
           as_json: bool) -> None:
    """Serve RECIPE and measure it: one job holds the GPUs and serves, a second one measures.

    The GPUs are given back as soon as the last point is measured. You need not stay: the jobs do all by
    themselves. `status`, `logs` and `collect` tell and bring what they did.

    Several recipes are the rungs of a ladder: they run one after another, and are compared with the first. Each has
    jobs of its own, unless --same-node puts them all into one.

    `submit probe` serves nothing: one job measures what a node reaches at most, and checks the experts' kernels.
    """
    import msgspec

    from isambard_serve import ladder, launch, records, table
    from isambard_serve import status as statuses

    site = options.choose_site(site_name, placement=placement)
    if names == options.PROBE:
        task = _probe(image_of, site, assignments, time_limit or "30m")
        _check_cost([task], max_node_hours)
        _submit_task(task, site, wait=wait, dry_run=dry_run, as_json=as_json)
        return
    if no_numa_bind:
        assignments = (*assignments, "engine.args.numa-bind=false")
    if profile_at:
        assignments = (*assignments, f"bench.profile_at={profile_at}")
    plans, recipes = _planned(names, site, assignments, time_limit, resume, same_node=same_node,
                              for_people=for_people)
    if same_node:
        ladder.check(plans, placement)
    _check_cost(plans, max_node_hours)
    _warn(recipes, site)
    if dry_run:
        _show(plans, recipes, site, as_json=as_json)
        return
    slurm = options.open_slurm(site)
    directories = launch.submit(list(zip(plans, recipes, strict=True)), slurm)
    if not as_json:
        _say_what_was_sent(plans, directories)
    if wait:
        elsewhere.end_with_caller()
    runs = [statuses.wait(directory, slurm, lambda run: options.say(f"{run.recipe}: {table.progress(run)}"),
                          until=("ready",) if for_people else ())
            if wait else statuses.read(directory) for directory in directories]
    if not wait and not as_json:
        options.say(f"  → isambard-serve status {plans[0].run_id}")
    if as_json:
        click.echo(records.document("submit", runs=[msgspec.to_builtins(run) for run in runs]))
    elif wait and for_people:
        click.echo(table.text(runs, []))
    if wait:
        _check_outcome(runs, "ready" if for_people else "done")


def _show(plans: list[Plan], recipes: list[Recipe], site: Site, *, as_json: bool) -> None:
    """What a submission would send: the scripts of the jobs that hold GPUs, or the plans."""
    from isambard_serve import ladder, launch

    for plan in plans:
        launch.check_needs(plan.needs)
    together = [ladder.script(plans)] if plans[0].same_node and site.scheduler == "slurm" else []
    scripts = [*together, *(launch.scripts(plan)["serve.sbatch"] for plan in plans)]
    click.echo(options.plan_document(plans, options.forecasts(recipes, site)) if as_json else "\n".join(scripts),
               nl=as_json)


def _say_what_was_sent(plans: list[Plan], directories: list[RunDir]) -> None:
    for plan, directory in zip(plans, directories, strict=True):
        jobs = ", ".join(f"{role} job {job_id}" for role, job_id in directory.job_ids().items())
        cost = "simulated" if plan.simulated else f"at most {plan.cost:g} node-hours"
        click.echo(f"{plan.run_id}: {jobs}, {cost}")


def _planned(names: tuple[str, ...], site: Site, assignments: tuple[str, ...], time_limit: str | None,
             resume: str | None, *, same_node: bool, for_people: bool) -> tuple[list[Plan], list[Recipe]]:
    """The plans of what is to be submitted, and their recipes."""
    from isambard_serve import launch
    from isambard_serve.errors import UsageError

    if for_people and (resume or len(names) > 1):
        raise UsageError("one recipe is served at a time, and from its beginning", where="--serve",
                         remedy="name one RECIPE; submit each server by itself")
    if not resume:
        if not names:
            raise UsageError("name a recipe", remedy="isambard-serve recipes lists them")
        recipes = options.load_recipes(names, assignments, time_limit)
        if for_people and any(recipe.bench.profile_at for recipe in recipes):
            raise UsageError("an engine that serves people is not profiled", where="--serve",
                             remedy="leave --profile-at out, or --serve")
        return options.make_plans(recipes, site, same_node=same_node, for_people=for_people), recipes
    if names or assignments or same_node:
        raise UsageError("a run is resumed with its own recipe, alone", where="--resume",
                         remedy="leave RECIPE, --set and --same-node out")
    lost = _lost(resume, site)
    recipes = [options.load_recipe(str(lost.lock), (), time_limit)]
    plans = options.make_plans(recipes, site, resumes=lost.run_id)
    launch.check_resumable(lost, plans[0])
    if launch.left(lost, plans[0]) == 0:
        raise UsageError("has no point left to measure", where=lost.run_id, remedy=f"isambard-serve collect {resume}")
    return plans, recipes


def _lost(name: str, site: Site) -> RunDir:
    """The run ``name``, which has ended, and was to measure points.

    Raises:
        UsageError: it goes on, or has no points to go on with.
    """
    from isambard_serve import status as statuses
    from isambard_serve.errors import UsageError
    from isambard_serve.run import Outline, read_record

    lost = options.open_runs(site).find(name)
    run = statuses.read(lost, options.open_slurm(site))
    if run.state not in (*statuses.ENDS, "unknown"):
        raise UsageError(f"has not ended: it is {run.state}", where=run.run_id,
                         remedy=f"wait for it, or end it first: isambard-serve cancel {run.run_id}")
    plan = read_record(lost.plan, Outline)
    if not (plan.points or plan.search):
        raise UsageError("was to measure no points, so that none are left", where=run.run_id,
                         remedy="submit it again, as it was submitted")
    return lost


def _warn(recipes: list[Recipe], site: Site) -> None:
    """Says whose experts' kernels nobody has checked."""
    from isambard_serve import probetask

    for recipe in recipes:
        if why := probetask.unchecked(recipe, site):
            options.say(f"warning: {recipe.name}: {why}")


def _probe(image_of: str, site: Site, assignments: tuple[str, ...], time_limit: str) -> TaskPlan:
    """The plan of `submit probe`."""
    import sys

    from isambard_serve import probetask, recipe, run
    from isambard_serve.errors import UsageError

    given = click.get_current_context().params
    if any(given[name] for name in ("placement", "for_people", "no_numa_bind", "same_node", "profile_at", "resume")):
        raise UsageError("a probe serves nothing", where="submit probe", remedy="give it --image-of, --set or --time")
    site = options.avoid_bad_nodes(site)
    return probetask.plan(options.load_recipe(image_of, assignments, None), site, run_id=run.new_id("probe"),
                          runs_dir=site.runs_dir, python=sys.executable, time_s=recipe.seconds(time_limit, "--time"))


def _submit_task(plan: TaskPlan, site: Site, *, wait: bool, dry_run: bool, as_json: bool) -> None:
    from isambard_serve import launch, records, task

    if dry_run:
        launch.check_needs(plan.needs)
        click.echo(records.document("task", plan=plan) if as_json else task.script(plan), nl=as_json)
    else:
        options.submit_task(plan, site, wait=wait, as_json=as_json)


def _check_cost(plans: Sequence[Plan | TaskPlan], max_node_hours: float | None) -> None:
    from isambard_serve.errors import ServeError

    total = sum(plan.cost for plan in plans)
    if max_node_hours is not None and not total <= max_node_hours:  # also of what is no number
        raise ServeError(f"may cost {total:g} node-hours, which is more than {max_node_hours:g}",
                         where="--max-node-hours", remedy="allow more, or shorten it with --time")


def _check_outcome(runs: list[Run], wanted: State) -> None:
    from isambard_serve.errors import ServeError

    bad = {run.run_id: run.state if run.state != wanted else "rows that are not valid"
           for run in runs if run.state != wanted or run.points_invalid}
    if bad:
        raise ServeError("; ".join(f"{run_id}: {why}" for run_id, why in bad.items()),
                         remedy=f"isambard-serve collect {' '.join(bad)}")


@click.command(cls=elsewhere.Relayed)
@options.run
@options.site
@click.option("--ladder", "whole_ladder", is_flag=True, help="End all rungs that were submitted together, the last "
              "one first.")
@options.as_json
def cancel(name: str, site_name: str | None, whole_ladder: bool, as_json: bool) -> None:
    """End a run now: its sweep first, then the serve job. What was measured is kept.

    On a ladder, the rungs behind it still have their turn, unless --ladder ends them too.
    """
    import msgspec

    from isambard_serve import launch, records
    from isambard_serve import status as statuses
    from isambard_serve.errors import ServeError

    site = options.choose_site(site_name)
    runs_here = options.open_runs(site)
    directory = runs_here.find(name)
    slurm = options.open_slurm(site)
    try:
        before = statuses.read(directory)
    except ServeError as error:
        # Its own jobs need none of what is damaged: they end when they see this.
        directory.record("cancel", "cancelled", reason="cancelled on request")
        raise ServeError(f"{error.what}; the run's jobs have been told to end by themselves", where=error.where,
                         remedy=f"see that they do: squeue --me --name={directory.run_id},{directory.run_id}-sweep"
                         ) from error
    ended = runs_here.ladder(name) if whole_ladder else [directory]
    if whole_ladder:
        launch.cancel_ladder(ended, slurm)
    elif before.state in statuses.ENDS:
        options.say(f"{before.run_id} has ended already: {before.state}")
        if slurm and before.state != "done":
            launch.end_jobs(directory, slurm)  # whatever the run's files say, nothing of it stays in the queue
    else:
        launch.cancel(directory, slurm)
        rungs = runs_here.ladder(name)
        behind = [rung.run_id for rung in rungs[[rung.path for rung in rungs].index(directory.path) + 1:]
                  if not rung.read_events(["cancel"])]
        if behind:
            options.say(f"still to come: {', '.join(behind)} (--ladder ends them too)")
    runs = [statuses.read(each) for each in ended]
    if as_json:
        click.echo(records.document("cancel", runs=[msgspec.to_builtins(run) for run in runs]))
    else:
        for run in runs:
            click.echo(f"{run.run_id}: {run.state}")
