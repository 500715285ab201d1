"""``probe``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from isambard_serve.cli import options

if TYPE_CHECKING:
    from isambard_serve.ceilings import Ceilings, Expected


@click.command()
@click.argument("name", metavar="[FILE|RUN]", required=False)
@options.site
@click.option("-o", "--out", metavar="FILE", type=click.Path(path_type=Path), default=Path("ceilings.json"),
              show_default=True, help="Where the record of what is measured here goes.")
@click.option("--seconds", type=click.FloatRange(min=0.1), help="How long each rate is measured; 6 unless given. A "
              "chip gets hot and slower in the first of them.")
@options.as_json
def probe(name: str | None, site_name: str | None, out: Path, seconds: float | None, as_json: bool) -> None:
    """Measure what this machine's GPUs reach at most, or show what was measured elsewhere.

    Without an argument it measures here, in about a minute: this must be a machine with GPUs and PyTorch. `submit
    probe` does so in a job, on a node, and in the engine's image. FILE is a record (ceilings.json); RUN is a
    `submit probe`, here (collected) or at the site.

    Rates are compared with what the site expects (its key `ceilings`). Exit code 1: one of them is low.
    """
    import msgspec

    from isambard_serve import ceilings, records
    from isambard_serve.errors import ServeError

    found = _found(name, site_name) if name else _measured(out, seconds)
    expected = _expected(site_name)
    compared = ceilings.compared(found, expected)
    click.echo(records.document("probe", ceilings=found, compared=[
        {**msgspec.to_builtins(each), "low": each.low} for each in compared]) if as_json else
        ceilings.text(found, expected))
    if low := [each.rate for each in compared if each.low]:
        raise ServeError(f"more than {ceilings.TOLERANCE:.0%} below what is expected: {', '.join(low)}",
                         where=found.node, remedy="see what held it down; measure another node beside it")


def _measured(out: Path, seconds: float | None) -> Ceilings:
    import msgspec

    from isambard_serve import probe as measuring
    from isambard_serve.run import write_whole

    found = measuring.measure(seconds or measuring.SECONDS)
    write_whole(out, msgspec.json.format(msgspec.json.encode(found), indent=2), mode=0o644)
    options.say(f"written to {out}")
    return found


def _found(name: str, site_name: str | None) -> Ceilings:
    """The record that ``name`` means: a file, a run that was collected here, or one at the site."""
    from isambard_serve.ceilings import Ceilings
    from isambard_serve.errors import UsageError
    from isambard_serve.run import RunDir, read_record

    path = options.located(name, site_name)
    if path.is_dir():
        run = RunDir(path)
        path = run.ceilings
        if not path.is_file():
            raise UsageError("has measured no ceilings", where=name,
                             remedy=f"isambard-serve logs {name}" if run.is_task else "isambard-serve submit probe")
    return read_record(path, Ceilings)


def _expected(site_name: str | None) -> Expected:
    """What the site expects; nothing where this machine belongs to none and none is named."""
    from isambard_serve import site
    from isambard_serve.ceilings import Expected
    from isambard_serve.errors import UsageError

    try:
        return site.choose(site_name).ceilings
    except UsageError as error:
        if site_name:
            raise
        options.say(f"note: compared with nothing: {error}")
        return Expected()
