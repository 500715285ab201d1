"""``trace``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from isambard_serve.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.command()
@click.argument("names", metavar="PATH|RUN...", nargs=-1, required=True)
@options.site
@click.option("--buckets", "table", metavar="FILE", type=click.Path(path_type=Path),
              help="A YAML file of more buckets, or of more patterns for those there are; tried first.")
@click.option("--floors", metavar="FILE", type=click.Path(path_type=Path),
              help="A JSON file of the least that each bucket can take, in ms: {\"attention\": 1.2}; instead of what "
                   "is reckoned of a run.")
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path),
              help="Also draw it: what each bucket takes in grey, and the least that it could take in solid.")
@options.as_json
def trace(names: tuple[str, ...], site_name: str | None, table: Path | None, floors: Path | None, plot: Path | None,
          as_json: bool) -> None:
    """Say where a decode step's time goes: the GPU's kernels by buckets, from the torch profiler's traces.

    PATH is a trace (.json or .json.gz), or a folder that holds those of all ranks; RUN is a run that was submitted
    with --profile-at, here (collected) or at the site. The steps are found in the trace, and the figures are the
    mean over all steady ones and all ranks. Each instant counts once, so that the buckets add up to the step.

    Beside a run's buckets stands the least that each could take, where the model and the site's ceilings are known
    (docs/roofline.md).
    """
    import msgspec

    from isambard_serve import records
    from isambard_serve.errors import ServeError
    from isambard_serve.trace import breakdown, files, shown
    from isambard_serve.trace import buckets as bucketing

    chosen = bucketing.load(table)
    given = files.floors(floors, chosen) if floors else None
    places = [options.located(name, site_name) for name in names]
    paths = list({path.resolve(): path for place in places for path in files.traces(place)}.values())
    ranks = breakdown.of_files(paths, chosen, options.say)
    if not ranks:
        raise ServeError("holds no GPU kernels", where=", ".join(names),
                         remedy="it was recorded on a CPU, or without CUDA activities: there is nothing to break down")
    result = breakdown.combined(ranks, _reckoned(places, site_name) if given is None else given)
    if plot:
        shown.picture(result, plot)
    click.echo(records.document("trace", **msgspec.structs.asdict(result)) if as_json else shown.text(result))


def _reckoned(places: Sequence[Path], site_name: str | None) -> dict[str, float]:
    """The least that the buckets of one profiled run could take, in ms; nothing where that is not known.

    Args:
        site_name: whose ceilings count; those of the site by whose name the run goes, unless given.
    """
    from isambard_serve import cost, modelconfig, recipe, site
    from isambard_serve.errors import ServeError
    from isambard_serve.run import Outline, RunDir, read_record

    run = RunDir(places[0])
    if len(places) > 1 or not run.lock.is_file():
        return {}
    try:
        profiled, _ = recipe.load(str(run.lock), ())
        own = site.load(site_name or read_record(run.plan, Outline).site)
        model = modelconfig.find(profiled.model, {**own.set, **profiled.engine.env})
    except (FileNotFoundError, ServeError) as error:
        if site_name:
            raise
        # A site that is known only where the run is, or by its file, above all. What was recorded needs none of it.
        options.say(f"note: the least that each bucket could take is not known: {error}")
        return {}
    known = cost.setting(profiled, own, model) if model else None
    if known is None or profiled.bench.profile_at is None:
        return {}
    options.say("note: the least that each bucket could take is reckoned from the site's ceilings, not measured")
    return known.least_ms(profiled.bench.profile_at)
