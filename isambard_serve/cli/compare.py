"""``compare``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from isambard_serve.cli import options

if TYPE_CHECKING:
    from isambard_serve.run import RunDir


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

    A RUN is a run id, a job id, or the folder of a run that was collected. Collected runs need no site.
    """
    import msgspec

    from isambard_serve import compare as comparing
    from isambard_serve import records

    comparison = comparing.runs(_run(first, site_name), _run(second, site_name))
    click.echo(records.document("compare", **msgspec.to_builtins(comparison)) if as_json
               else comparing.text(comparison))


def _run(name: str, site_name: str | None) -> RunDir:
    """The run that ``name`` means, here (collected) or at the site."""
    from isambard_serve.errors import UsageError
    from isambard_serve.run import RunDir

    run = RunDir(options.located(name, site_name).resolve())
    if not run.plan.is_file():
        raise UsageError("is no run's folder", where=name, remedy="isambard-serve collect makes one of each run: "
                         "results/RUN_ID")
    return run
