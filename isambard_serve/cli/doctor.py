"""``doctor``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from isambard_serve.cli import elsewhere, options

if TYPE_CHECKING:
    from isambard_serve.doctor import Check


class _Relayed(elsewhere.Relayed):
    """Looks at the way to the login node from here, and has the rest looked at there."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command, here or there."""
        host, _ = elsewhere.chosen(ctx.params["host"], ctx.params.get("site_name"))
        if host is not None:
            from isambard_serve import doctor, records

            as_json = ctx.params["as_json"]
            found = _shown(doctor.way(host), err=as_json)  # what the login node prints is one document
            if as_json and _failed(found):
                click.echo(records.document("doctor", checks=found))
            _judge(found)
        return super().invoke(ctx)


@click.command(cls=_Relayed)
@click.argument("names", metavar="[RECIPE]...", nargs=-1, shell_complete=options.recipe_names)
@options.site
@options.as_json
def doctor(names: tuple[str, ...], site_name: str | None, as_json: bool) -> None:
    """Check all that must be true before a first submission, and say how to mend what is not.

    Nothing is submitted and nothing is changed. Name the RECIPEs that you mean to run, and their images, weights and
    time limits are looked at too. Ends with 1 if a check fails; a warning alone is good enough. With --host the
    certificate and the login are looked at first.
    """
    from isambard_serve import records

    checks = _checks(names, site_name)
    if as_json:
        found = list(checks)
        click.echo(records.document("doctor", checks=found))
    else:
        found = _shown(checks)
    if not names:
        options.say("no recipe was named: images, weights and time limits were not looked at")
    _judge(found)


def _shown(checks: Iterable[Check], *, err: bool = False) -> list[Check]:
    """The ``checks``, each printed as it is made."""
    found = []
    for check in checks:
        found.append(check)
        word = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}[check.state]
        click.echo(f"{word}  {check.name}: {check.found}", err=err)
        if check.remedy:
            click.echo(f"      → {check.remedy}", err=err)
    return found


def _failed(found: list[Check]) -> list[str]:
    return [check.name for check in found if check.state == "fail"]


def _judge(found: list[Check]) -> None:
    from isambard_serve.errors import ServeError

    failed = _failed(found)
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
