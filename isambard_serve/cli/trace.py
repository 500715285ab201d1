"""``trace``."""

from __future__ import annotations

from pathlib import Path

import click

from isambard_serve.cli import options


@click.command()
@click.argument("names", metavar="PATH|RUN...", nargs=-1, required=True)
@options.site
@click.option("--buckets", "table", metavar="FILE", type=click.Path(path_type=Path),
              help="A YAML file of more buckets, or of more patterns for those there are; tried first.")
@click.option("--floors", metavar="FILE", type=click.Path(path_type=Path),
              help="A JSON file of the least that each bucket can take, in ms: {\"attention\": 1.2}.")
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path),
              help="Also draw it: what each bucket takes in grey, and the least that it could take in solid.")
@options.as_json
def trace(names: tuple[str, ...], site_name: str | None, table: Path | None, floors: Path | None, plot: Path | None,
          as_json: bool) -> None:
    """Say where a decode step's time goes: the GPU's kernels by buckets, from the torch profiler's traces.

    PATH is a trace (.json or .json.gz), or a folder that holds those of all ranks; RUN is a run that was submitted
    with --profile-at, here (collected) or at the site. The steps are found in the trace, and the figures are the
    mean over all steady ones and all ranks. Each instant counts once, so that the buckets add up to the step.
    """
    import msgspec

    from isambard_serve import records
    from isambard_serve.errors import ServeError
    from isambard_serve.trace import breakdown, files, shown
    from isambard_serve.trace import buckets as bucketing

    chosen = bucketing.load(table)
    known = files.floors(floors, chosen) if floors else {}
    paths = [path for name in names for path in files.traces(_place(name, site_name))]
    ranks = breakdown.of_files(paths, chosen, options.say)
    if not ranks:
        raise ServeError("holds no GPU kernels", where=", ".join(names),
                         remedy="it was recorded on a CPU, or without CUDA activities: there is nothing to break down")
    result = breakdown.combined(ranks, known)
    if plot:
        shown.picture(result, plot)
    click.echo(records.document("trace", **msgspec.structs.asdict(result)) if as_json else shown.text(result))


def _place(name: str, site_name: str | None) -> Path:
    """The file or folder that ``name`` means: a path, a run that was collected here, or one at the site."""
    for path in (Path(name), Path("results") / name):
        if path.exists():
            return path
    return options.open_runs(options.choose_site(site_name)).find(name).path
