"""``collect``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from isambard_serve.cli import options

if TYPE_CHECKING:
    from isambard_serve.records import Row, Run


@click.command()
@click.argument("names", metavar="JOBID...", nargs=-1, required=True)
@options.site
@click.option("-o", "--output", metavar="DIR", default="results", show_default=True,
              help="The folder in which each run gets a folder of its own, named by its run id.")
@click.option("--ladder", "whole_ladder", is_flag=True, help="Bring all rungs that were submitted together.")
@click.option("--require-valid", is_flag=True, help="Exit with 1 unless every run is done and every row valid.")
@options.as_json
def collect(names: tuple[str, ...], site_name: str | None, output: str, whole_ladder: bool, require_valid: bool,
            as_json: bool) -> None:
    """Bring a run's evidence here and show its table, while it runs or after.

    Every file of the run is copied (but for keys); what is here already is left alone. results.csv and
    results.json hold the rows, medians.csv what repeats come to. Several runs are shown in one table, compared with
    the first, each with its verdict in words.
    """
    from pathlib import Path

    import msgspec

    from isambard_serve import collect as collecting
    from isambard_serve import knee, table, verdict
    from isambard_serve import status as statuses
    from isambard_serve.errors import ServeError, UsageError
    from isambard_serve.run import RunDir, write_whole

    site = options.choose_site(site_name)
    runs = options.open_runs(site)
    slurm = options.open_slurm(site)
    found: list[Run] = []
    groups: list[list[Row]] = []
    named = [rung for name in names for rung in (runs.ladder(name) if whole_ladder else [runs.find(name)])]
    for directory in {each.path: each for each in named}.values():
        if Path(output).resolve().is_relative_to(directory.path.resolve()):
            raise UsageError("results cannot be collected into the run that they are of", where=output,
                             remedy="name another folder: -o DIR")
        # The state first: what it says has then been copied too.
        run = statuses.read(directory, slurm)
        copied = collecting.collect(directory, Path(output) / run.run_id)
        options.say(f"{run.run_id}: {copied.files} files, {copied.bytes:,} bytes; {copied.unchanged} were here already")
        found.append(run)
        groups.append(RunDir(Path(output) / run.run_id).read_rows())
    compared = table.compared(groups)
    found = [msgspec.structs.replace(run, verdict=verdict.of(own, knee.found(RunDir(Path(output) / run.run_id)),
                                                             groups[0] if at else None))
             for at, (run, own) in enumerate(zip(found, groups, strict=True))]
    for run, own in zip(found, compared, strict=True):
        here = Path(output) / run.run_id
        write_whole(here / "results.json", _document([run], own), mode=0o644)
        write_whole(here / "results.csv", table.frame(own).to_csv(index=False), mode=0o644)
        if run.verdict:
            write_whole(here / "medians.csv", table.medians(run.verdict.medians).to_csv(index=False), mode=0o644)
    rows = [row for own in compared for row in own]
    click.echo(_document(found, rows) if as_json else table.text(found, rows))
    if require_valid and not (rows and all(row.valid for row in rows) and all(run.state == "done" for run in found)):
        raise ServeError("a run is not done, or a row is not valid", where="--require-valid")


def _document(runs: list[Run], rows: list[Row]) -> bytes:
    import msgspec

    from isambard_serve import records

    return records.document(
        "collect",
        simulated=any(run.simulated for run in runs),
        runs=[msgspec.to_builtins(run) for run in runs],
        rows=[msgspec.to_builtins(row) for row in rows],
    )
