"""``recipes``, ``show``, ``diff``, ``plan``, ``render``: everything that touches no cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from isambard_serve.cli import elsewhere, options

if TYPE_CHECKING:
    from isambard_serve.plan import Plan


@click.command()
@options.as_json
def recipes(as_json: bool) -> None:
    """List the recipes that can be run.

    They are looked for in ./jobs, in your own folder (~/.config/isambard-serve/jobs) and among those shipped.
    """
    from isambard_serve import recipe, records
    from isambard_serve.errors import UsageError

    found = []
    for name in recipe.names():
        try:
            file = recipe.locate(name)
            found.append({"recipe": name, "description": recipe.load(name)[0].description, "file": str(file)})
        except UsageError as error:
            options.say(f"warning: left out: {error}")
    if as_json:
        click.echo(records.document("recipes", recipes=found))
    else:
        width = max((len(entry["recipe"]) for entry in found), default=0)
        for entry in found:
            click.echo(f"{entry['recipe']:<{width}}  {entry['description']}")


@click.command()
@click.argument("name", metavar="RECIPE", shell_complete=options.recipe_names)
@options.assignments
@options.as_json
def show(name: str, assignments: tuple[str, ...], as_json: bool) -> None:
    """Show a recipe in full: what it inherits, and your changes, worked in. RECIPE is a name or a path."""
    import msgspec

    from isambard_serve import recipe, records

    chosen = options.load_recipe(name, assignments, None)
    if as_json:
        click.echo(records.document("recipe", **msgspec.to_builtins(chosen)))
    else:
        click.echo(recipe.locked(chosen), nl=False)


@click.command()
@click.argument("first", metavar="RECIPE", shell_complete=options.recipe_names)
@click.argument("second", metavar="RECIPE", shell_complete=options.recipe_names)
@click.option("--all", "everything", is_flag=True, help="Also what is not the engine's: resources, load, description.")
@options.as_json
def diff(first: str, second: str, everything: bool, as_json: bool) -> None:
    """Show how the second recipe's engine differs from the first's, in flags and variables."""
    from isambard_serve import difference, records

    changes = difference.between(first, second)
    shown = [change for change in changes if everything or change.engine]
    if as_json:
        click.echo(records.document("diff", changes=shown))
        return
    for change in shown:
        for line in change.lines():
            click.echo(line)
    left = [change.key for change in changes if change not in shown]
    if left:
        options.say(f"not shown without --all: {', '.join(left)}")


@click.command(cls=elsewhere.RelayedRecipes, only_by_flag=True)
@click.argument("names", metavar="RECIPE...", nargs=-1, required=True, shell_complete=options.recipe_names)
@options.site
@options.assignments
@options.time_limit
@options.as_json
def plan(names: tuple[str, ...], site_name: str | None, assignments: tuple[str, ...], time_limit: str | None,
         as_json: bool) -> None:
    """Show what a run would do, reach and at most cost, without doing it.

    What it would reach is reckoned from the model's config and the ceilings that the site gives for its GPUs, and is
    no measurement: docs/roofline.md says how, and how far it was off.
    """
    import shlex

    from isambard_serve import cost
    from isambard_serve import plan as plans

    site = options.choose_site(site_name, from_afar=True)
    recipes = options.load_recipes(names, assignments, time_limit)
    made = options.make_plans(recipes, site)
    expected = options.forecasts(recipes, site)
    if as_json:
        click.echo(options.plan_document(made, expected))
        return
    for each, forecast in zip(made, expected, strict=True):
        if each.simulated:
            click.echo("SIMULATED: the engine is a model of one; no GPU is held and nothing is charged.")
        alone = f" ({each.node_hours.inside:g} without the sweep's own job)" if each.placement == "dependent" else ""
        click.echo(f"{each.recipe} at {each.site}: {each.gpus} of a node's {each.node_gpus} GPUs, "
                   f"at most {each.serve_directives['time']} and {each.cost:g} node-hours{alone}")
        click.echo(cost.words(forecast) if forecast else
                   f"expected: nothing is known of {each.model}, of {each.site}'s GPUs, or of the two together")
        click.echo(_measured(each))
        for name, value in each.environment.items():
            click.echo(f"  {name}={value}")
        unknown = {name: [name.upper()] for name in each.lists}
        command = plans.filled((*each.launcher_argv, *each.container_argv, *each.engine_argv), port="PORT",
                               lists=unknown)
        click.echo(f"  {shlex.join(command)}")
        click.echo(f"filled in on the node: {', '.join(['PORT', *(name.upper() for name in each.lists)])}")


def _measured(plan: Plan) -> str:
    """What is measured, in one line."""
    lengths = f"at ISL/OSL {plan.isl}/{plan.osl}"
    if plan.profile:
        wanted = plan.profile
        return f"points: none; {wanted.steps} steps are recorded at concurrency {wanted.concurrency} {lengths}"
    listed = ", ".join(point.name for point in plan.points)
    return (f"points: {listed or 'wherever the search for the knee leads,'} {lengths}, "
            f"{plan.limits.window_s} s each at least")


@click.command()
@click.argument("name", metavar="RECIPE", shell_complete=options.recipe_names)
@options.site
@options.assignments
@options.time_limit
@options.placement
@click.option("--run-id", help="Render as this run. Given the run id of a submission, its scripts byte for byte.")
@click.option("--script", type=click.Choice(["serve.sbatch", "sweep.sbatch", "send.sh"]), default="serve.sbatch",
              show_default=True, help="The script to print.")
@click.option("-o", "--output", metavar="DIR", help="Write the whole run directory into DIR instead, ready to be "
              "sent by hand with its send.sh, and print its path.")
def render(name: str, site_name: str | None, assignments: tuple[str, ...], time_limit: str | None,
           placement: str | None, run_id: str | None, script: str, output: str | None) -> None:
    """Print the scripts that submit would send."""
    from isambard_serve import launch
    from isambard_serve.errors import UsageError

    site = options.choose_site(site_name, from_afar=True, placement=placement)
    recipe = options.load_recipe(name, assignments, time_limit)
    made = options.make_plans([recipe], site, run_id, output)[0]
    if output is None:
        texts = launch.scripts(made)
        if script not in texts:
            raise UsageError(f"there is no {script} with placement {made.placement} at {site.name}", where="--script")
        click.echo(texts[script], nl=False)
    else:
        click.echo(launch.write(made, recipe).path)
