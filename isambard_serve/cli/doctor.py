"""``doctor``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from isambard_serve.cli import options

if TYPE_CHECKING:
    from isambard_serve.doctor import Check


@click.command()
@click.argument("names", metavar="[RECIPE]...", nargs=-1, shell_complete=options.recipe_names)
@options.site
@options.as_json
def doctor(names: tuple[str, ...], site_name: str | None, as_json: bool) -> None:
    """Check all that must be true before a first submission, and say how to mend what is not.

    Nothing is submitted and nothing is changed. Name the RECIPEs that you mean to run, and their images, weights and
    time limits are looked at too. Ends with 1 if a check fails; a warning alone is good enough.
    """
    from isambard_serve import records
    from isambard_serve.errors import ServeError

    found = []
    for check in _checks(names, site_name):
        found.append(check)
        if not as_json:
            word = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}[check.state]
            click.echo(f"{word}  {check.name}: {check.found}")
            if check.remedy:
                click.echo(f"      → {check.remedy}")
    if as_json:
        click.echo(records.document("doctor", checks=found))
    if not names:
        options.say("no recipe was named: images, weights and time limits were not looked at")
    failed = [check.name for check in found if check.state == "fail"]
    if failed:
        raise ServeError(f"{len(failed)} of {len(found)} checks failed: {', '.join(failed)}", where="doctor")


def _checks(names: tuple[str, ...], site_name: str | None) -> Iterator[Check]:
    from isambard_serve import doctor, slurm
    from isambard_serve.doctor import Check
    from isambard_serve.errors import UsageError

    try:
        site = options.choose_site(site_name)
    except UsageError as error:
        yield doctor.failed("site", error)
        return
    yield Check(name="site", state="ok", found=f"{site.name}: {site.description}")
    recipes = []
    for name in names:
        try:
            recipes.append(options.load_recipe(name, (), None))
        except UsageError as error:
            yield doctor.failed(f"recipe {name}", error)
    yield from doctor.examine(site, recipes, slurm.environment(("USER", *site.export), os.environ),
                              options.open_slurm(site))
