"""``sweep``."""

from __future__ import annotations

import click

from isambard_serve.cli import elsewhere, options


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers above 0 with commas between."""
    from isambard_serve.recipe import MOST_AT_ONCE

    words = text.split(",")
    if not all(word.isdecimal() and len(word) < 10 and 1 <= int(word) <= MOST_AT_ONCE for word in words):
        raise click.BadParameter(f"{text!r} is no list of concurrencies, such as 1,2,4", param_hint="--concurrency")
    return tuple(int(word) for word in words)


@click.command(cls=elsewhere.Relayed)
@options.run
@options.site
@click.option("--concurrency", metavar="N,N...", help="Where to measure; otherwise at the concurrencies "
              "that the recipe lists. One that was measured already is measured once more.")
@options.as_json
def sweep(name: str, site_name: str | None, concurrency: str | None, as_json: bool) -> None:
    """Measure a server that lives: one that `submit --serve` started.

    The server's own job measures, one sweep after another, and keeps the points with the run: `status` and `collect`
    show them. It should have no other load meanwhile: a point in which somebody else was served is not valid.
    """
    import msgspec

    from isambard_serve import asked, recipe, records
    from isambard_serve import status as statuses
    from isambard_serve.errors import ServeError, UsageError
    from isambard_serve.plan import Plan
    from isambard_serve.run import read_record

    wanted = _numbers(concurrency) if concurrency else ()
    site = options.choose_site(site_name)
    directory = options.open_runs(site).find(name)
    if directory.is_task or not read_record(directory.plan, Plan).for_people:
        raise UsageError("its server is measured by its own sweep, and ends with it", where=directory.run_id,
                         remedy="submit --serve starts one that stays")
    run = statuses.read(directory, options.open_slurm(site))
    if run.state in statuses.ENDS:
        raise ServeError(f"its server has ended: {run.state}", where=run.run_id)
    bench = recipe.load(str(directory.lock))[0].bench
    if not wanted and bench.concurrency == "saturate":
        raise UsageError("its recipe searches for the knee, which a server for people is not kept free for",
                         where=run.run_id, remedy="name where to measure: --concurrency 1,2,4")
    listed = tuple(each for each in bench.concurrency if isinstance(each, int))
    points = asked.add(directory, wanted or listed, bench.prompts_per_concurrency)
    if as_json:
        click.echo(records.document("sweep", run=msgspec.to_builtins(statuses.read(directory)),
                                    points=[point.name for point in points]))
    else:
        click.echo(f"{run.run_id}: {', '.join(point.name for point in points)}")
        options.say(f"  → isambard-serve status {run.run_id}")
