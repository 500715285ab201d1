"""``submit`` and ``cancel``."""

from __future__ import annotations

import click

from isambard_serve.cli import options


@click.command()
@click.argument("name", metavar="RECIPE")
@options.site
@options.assignments
@options.time_limit
@click.option("--wait", is_flag=True, help="Wait until the run has ended, and say how it goes. Stopping to wait "
              "(Ctrl-C) does not stop the run.")
@click.option("--dry-run", is_flag=True, help="Do all but submit: check the recipe and the site, and print the "
              "serve job's script (or, with --json, the plan).")
@options.as_json
def submit(name: str, site_name: str | None, assignments: tuple[str, ...], time_limit: str | None, wait: bool,
           dry_run: bool, as_json: bool) -> None:
    """Serve RECIPE and measure it: one job holds the GPUs and serves, a second one measures.

    The GPUs are given back as soon as the last point is measured. You need not stay: the jobs do all by
    themselves. `status`, `logs` and `collect` tell and bring what they did.
    """
    import msgspec

    from isambard_serve import launch, records, table
    from isambard_serve import status as statuses
    from isambard_serve.errors import ServeError
    from isambard_serve.run import RunDir

    site = options.choose_site(site_name)
    recipe = options.load_recipe(name, assignments, time_limit)
    made = options.make_plan(recipe, site, None)
    if dry_run:
        launch.check_needs(made)
        click.echo(records.document("plan", plans=[made]) if as_json else launch.scripts(made)["serve.sbatch"],
                   nl=as_json)
        return
    slurm = options.open_slurm(site)
    launch.submit(made, recipe, slurm)
    directory = RunDir(options.open_runs(site).folder / made.run_id)
    if not as_json:
        jobs = ", ".join(f"{role} job {job_id}" for role, job_id in directory.job_ids().items())
        click.echo(f"{made.run_id}: {jobs}, at most {made.node_hours.dependent:g} node-hours")
    run = statuses.read(directory)
    if wait:
        run = statuses.wait(directory, slurm, lambda now: options.say(table.progress(now)))
    if as_json:
        click.echo(records.document("submit", runs=[msgspec.to_builtins(run)]))
    if wait and (run.state != "done" or not all(row.valid for row in directory.read_rows())):
        raise ServeError(f"the run is {run.state}, or a row is not valid", where=run.run_id,
                         remedy=f"isambard-serve collect {run.run_id}")


@click.command()
@options.run
@options.site
@options.as_json
def cancel(name: str, site_name: str | None, as_json: bool) -> None:
    """End a run now: its sweep first, then the serve job. What was measured is kept."""
    import msgspec

    from isambard_serve import launch, records
    from isambard_serve import status as statuses

    site = options.choose_site(site_name)
    directory = options.open_runs(site).find(name)
    before = statuses.read(directory)
    if before.state in statuses.ENDS:
        options.say(f"{before.run_id} has ended already: {before.state}")
    else:
        launch.cancel(directory, options.open_slurm(site))
    run = statuses.read(directory)
    if as_json:
        click.echo(records.document("cancel", runs=[msgspec.to_builtins(run)]))
    else:
        click.echo(f"{run.run_id}: {run.state}")
