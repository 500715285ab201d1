"""``compare``."""

from __future__ import annotations

import click

from isambard_serve.cli import options


@click.command()
@click.argument("first", metavar="RUN")
@click.argument("second", metavar="RUN")
@options.site
@options.as_json
def compare(first: str, second: str, site_name: str | None, as_json: bool) -> None:
    """Say how two runs differ: how much faster the second is, by what, and whether both answer alike.

    The best valid row of each is compared. How many requests decode at once and how fast each does make the
    throughput, so the two factors say where a gain comes from. Each run's engine was asked the same prompts,
    greedily: where their answers part, they do not compute the same, be it by another rounding or by a fault.

    A RUN is a run id, a job id, or the folder of a run that was collected.
    """
    import msgspec

    from isambard_serve import compare as comparing
    from isambard_serve import records

    runs = options.open_runs(options.choose_site(site_name))
    comparison = comparing.runs(runs.find(first), runs.find(second))
    click.echo(records.document("compare", **msgspec.to_builtins(comparison)) if as_json
               else comparing.text(comparison))
