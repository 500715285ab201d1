"""``collect``."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from isambard_serve.cli import elsewhere, options
from isambard_serve.errors import ServeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from isambard_serve.host import Host
    from isambard_serve.records import Row, Run
    from isambard_serve.sources import Source
    from isambard_serve.transfer import Fetch


@click.command()
@click.argument("names", metavar="JOBID...", nargs=-1, required=True)
@options.site
@click.option("-o", "--output", metavar="DIR", default="results", show_default=True,
              help="The folder in which each run gets a folder of its own, named by its run id.")
@click.option("--ladder", "whole_ladder", is_flag=True, help="Bring all rungs that were submitted together.")
@click.option("--exclude", metavar="PATTERN", multiple=True,
              help="Leave out files whose path in the run's directory matches, such as 'profile/*'. May be given "
                   "several times.")
@click.option("-f", "--follow", is_flag=True, help="Go on bringing what is new until the run has ended.")
@click.option("--require-valid", is_flag=True, help="Exit with 1 unless every run is done and every row valid.")
@click.option("--host", metavar="ALIAS", help=f"Collect from this login node, {elsewhere.HOST}")
@click.option("--deploy", is_flag=True, help=elsewhere.DEPLOY)
@options.as_json
def collect(names: tuple[str, ...], site_name: str | None, output: str, whole_ladder: bool, exclude: tuple[str, ...],
            follow: bool, require_valid: bool, host: str | None, deploy: bool, as_json: bool) -> None:
    """Bring a run's evidence here and show its table, while it runs or after.

    Every file of the run is copied (but for keys); what is here already is left alone. With --host it comes over
    SSH, and a lost connection is made again: what has come stays. results.csv and results.json hold the rows,
    medians.csv what repeats come to. Several runs are shown in one table, compared with the first, each with its
    verdict in words.
    """
    def bring(source: Source) -> list[Run]:
        return [_brought(source, run, Path(output) / run.run_id, follow)
                for run in source.find(names, whole_ladder=whole_ladder)]

    alias, named = elsewhere.chosen(host, site_name)
    if alias is not None and deploy:
        from isambard_serve import deploy as deployment

        deployment.deploy(alias, say=options.say)
    found = _over_ssh(alias, named, exclude, bring) if alias is not None else _here(site_name, exclude, bring)
    # Not before: a connection is begun sooner without them, and they are loaded while it is made.
    import msgspec

    from isambard_serve import outcome, table, verdict
    from isambard_serve.run import RunDir, load_of, write_whole

    folders = [RunDir(Path(output) / run.run_id) for run in found]
    groups, loads = [folder.read_rows() for folder in folders], [load_of(folder) for folder in folders]
    alike = [each == loads[0] for each in loads]
    compared = table.compared(groups, alike)
    bases = [None, *(groups[0] if same else None for same in alike[1:])]
    found = [msgspec.structs.replace(run, verdict=verdict.of(own, outcome.read(folder), base))
             for run, own, folder, base in zip(found, groups, folders, bases, strict=True)]
    for folder, same in zip(folders, alike, strict=True):
        if not same:
            options.say(f"note: {folder.run_id} is not compared with {folders[0].run_id}: its load is another "
                        "(bench.isl, bench.osl), or one of the two is simulated")
    for run, own in zip(found, compared, strict=True):
        here = Path(output) / run.run_id
        write_whole(here / "results.json", _document([run], own), mode=0o644)
        write_whole(here / "results.csv", table.csv(own), mode=0o644)
        if run.verdict:
            write_whole(here / "medians.csv", table.medians(run.verdict.medians).to_csv(index=False), mode=0o644)
    rows = [row for own in compared for row in own]
    click.echo(_document(found, rows) if as_json else table.text(found, rows))
    if require_valid and not (rows and all(row.valid for row in rows)
                              and all(run.state == "done" and not run.points_invalid for run in found)):
        raise ServeError("a run is not done, or a row is not valid", where="--require-valid")


def _here(site_name: str | None, exclude: tuple[str, ...], bring: Callable[[Source], list[Run]]) -> list[Run]:
    from isambard_serve.sources import ThisMachine

    site = options.choose_site(site_name)
    return bring(ThisMachine(options.open_runs(site), options.open_slurm(site), exclude))


def _over_ssh(alias: str, site_name: str | None, exclude: tuple[str, ...], bring: Callable[[Source], list[Run]]
              ) -> list[Run]:
    from isambard_serve import host
    from isambard_serve.cli import progress

    threading.Thread(target=_get_ready, daemon=True).start()
    fetches: dict[str, Fetch] = {}
    with progress.bar() as bar:
        def work(there: Host) -> list[Run]:
            from isambard_serve.sources import OverSsh

            with OverSsh(there, fetches, site=site_name, exclude=exclude, progress=bar) as source:
                return bring(source)

        return host.persistently(alias, work, bulk=True)


def _get_ready() -> None:
    """Loads what comes after the connection, which is made meanwhile. An error will be met again where it matters."""
    with contextlib.suppress(ServeError, OSError):
        from isambard_serve import outcome, remote, sources, table, verdict  # noqa: F401

        remote.version()


def _brought(source: Source, run: Run, here: Path, follow: bool) -> Run:
    """The run, once its files are here."""
    from isambard_serve import sources, table

    if follow:
        run = sources.follow(source, run, here, lambda now: options.say(f"{now.run_id}: {table.progress(now)}"))
    copied = source.bring(run, here)
    options.say(f"{run.run_id}: {copied.files} files, {copied.bytes:,} bytes; {copied.unchanged} were here already")
    return run


def _document(runs: list[Run], rows: list[Row]) -> bytes:
    import msgspec

    from isambard_serve import records

    return records.document(
        "collect",
        simulated=any(run.simulated for run in runs),
        runs=[msgspec.to_builtins(run) for run in runs],
        rows=[msgspec.to_builtins(row) for row in rows],
    )
