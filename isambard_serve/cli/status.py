"""``status`` and ``logs``."""

from __future__ import annotations

import click

from isambard_serve.cli import elsewhere, options


@click.command(cls=elsewhere.Relayed, again=elsewhere.unless_begun)
@click.argument("name", metavar="[JOBID]", required=False)
@options.site
@click.option("--ladder", "whole_ladder", is_flag=True, help="All rungs that were submitted together with this one.")
@options.as_json
def status(name: str | None, site_name: str | None, whole_ladder: bool, as_json: bool) -> None:
    """Say what a run is doing, or list your newest runs.

    Read from the run's own files; Slurm is asked no oftener than the site allows.
    """
    import msgspec

    from isambard_serve import records, table
    from isambard_serve import status as statuses
    from isambard_serve.errors import ServeError

    site = options.choose_site(site_name)
    runs = options.open_runs(site)
    slurm = options.open_slurm(site)
    named = runs.ladder if whole_ladder else lambda name: [runs.find(name)]
    directories = named(name) if name else runs.newest(10)
    found = []
    for directory in directories:
        try:
            found.append(statuses.read(directory, slurm))
        except ServeError as error:
            if name:
                raise
            options.say(f"warning: left out: {error}")
    older = 0 if name else runs.count() - len(directories)
    rows = [row for directory in directories for row in directory.read_rows()] if name else []
    if as_json:
        click.echo(records.document("status", runs=[msgspec.to_builtins(run) for run in found],
                                    rows=[msgspec.to_builtins(row) for row in rows]))
    elif found:
        click.echo(table.text(found, rows))
        if older:
            options.say(f"and {older} older in {runs.folder}")
    else:
        options.say(f"no runs in {runs.folder}")


@click.command(cls=elsewhere.Relayed, again=elsewhere.after)
@options.run
@options.site
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended.")
@click.option("--of", "which", type=click.Choice(["engine", "serve", "sweep"]),
              help="The engine's log (unless given), or what the serve or the sweep job printed.")
@click.option("--skip", type=int, default=0, hidden=True, help="Leave out so many bytes.")
def logs(name: str, site_name: str | None, follow: bool, which: str | None, skip: int) -> None:
    """Print a run's log: its engine's, or what a task printed."""
    from isambard_serve import status as statuses

    site = options.choose_site(site_name)
    directory = options.open_runs(site).find(name)
    path = directory.log("task" if directory.is_task else which or "engine")
    if follow:
        elsewhere.end_with_caller()
        for block in statuses.follow(path, directory, options.open_slurm(site), skip=skip):
            click.echo(block, nl=False)
    elif path.exists():
        with open(path, "rb") as file:
            file.seek(skip)
            while block := file.read(1 << 20):
                click.echo(block, nl=False)
    else:
        options.say(f"nothing yet: {path}")
        if which is None and directory.log("serve").exists():
            options.say(f"  → isambard-serve logs --of serve {directory.run_id}")
