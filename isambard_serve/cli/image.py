"""``image``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from isambard_serve.cli import options

if TYPE_CHECKING:
    from isambard_serve.imagetask import Known


def _image_names(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    from isambard_serve import image

    return [name for name in image.names() if name.startswith(incomplete)]


_name = click.argument("name", metavar="IMAGE", shell_complete=_image_names)


@click.group()
def image() -> None:
    """The images that engines run in: what they are made of, and whether they work.

    An image is defined by a file, images/NAME.yaml, looked for in ./images, in your own folder
    (~/.config/isambard-serve/images) and among those shipped. A recipe that says `image: NAME` runs in it. On a
    cluster it is made once: `image resolve`, `image build`, `image check`.
    """


@image.command("list")
@options.site
@options.as_json
def listing(site_name: str | None, as_json: bool) -> None:
    """List the images that are defined here or built at the site, and how their last check came out."""
    import msgspec

    from isambard_serve import imagetask, records

    known = imagetask.known(options.choose_site(site_name))
    if as_json:
        click.echo(records.document("images", images=[msgspec.to_builtins(each) for each in known]))
        return
    width = max((len(each.image) for each in known), default=0)
    for each in known:
        click.echo(f"{each.image:<{width}}  {_state(each)}: {each.description}")


def _state(known: Known) -> str:
    if not known.built:
        return "not built" if known.digest or not known.defined else "not built, without a digest"
    checked = "not checked" if known.check is None else "works" if known.check.passed else "DOES NOT WORK"
    return f"built{' from another definition' if known.stale else ''}, {checked}"


@image.command()
@_name
@options.as_json
def resolve(name: str, as_json: bool) -> None:
    """Ask the registry for the digest of IMAGE's base, and write it into IMAGE's definition.

    A tag may mean another image tomorrow; a digest never does. A definition that is shipped stays as it is: one of
    your own extends it.
    """
    from isambard_serve import image as images
    from isambard_serve import records, registry

    made = images.load(name)
    digest = registry.digest(made.base, made.platform)
    path = images.write_digest(name, digest)
    options.say(f"{made.base} for {made.platform}, written to {path}")
    click.echo(records.document("digest", image=name, base=made.base, platform=made.platform, digest=digest,
                                file=str(path)) if as_json else digest)


@image.command()
@_name
@options.site
@options.task_time("2h")
@options.wait_for_task
@options.as_json
def build(name: str, site_name: str | None, time_limit: str, wait: bool, as_json: bool) -> None:
    """Build IMAGE at the site, in a job: login nodes have too little memory for it.

    Refused for an image whose base has no digest: `image resolve` writes it.
    """
    from isambard_serve import image as images
    from isambard_serve import imagetask, recipe, run

    site = options.avoid_bad_nodes(options.choose_site(site_name))
    plan = imagetask.build(images.load(name), site, run_id=run.new_id(f"image-{name}"), runs_dir=site.runs_dir,
                           python=sys.executable, time_s=recipe.seconds(time_limit, "--time"))
    options.submit_task(plan, site, wait=wait, as_json=as_json)


@image.command()
@click.argument("name", metavar="RECIPE", shell_complete=options.recipe_names)
@options.site
@options.assignments
@options.task_time("30m")
@options.wait_for_task
@options.as_json
def check(name: str, site_name: str | None, assignments: tuple[str, ...], time_limit: str, wait: bool,
          as_json: bool) -> None:
    """Try the image that RECIPE names, in a job with one GPU: vLLM, the GPU, numactl, and what versions are in it.

    Where the recipe names expert kernels that can be checked, what they compute is compared with a reference in
    float64: a wrong kernel may be as quick, and its text reads well at a glance.
    """
    from isambard_serve import imagetask, recipe, run

    site = options.avoid_bad_nodes(options.choose_site(site_name))
    chosen = options.load_recipe(name, assignments, None)
    plan = imagetask.check(chosen, site, run_id=run.new_id(f"check-{chosen.name}"), runs_dir=site.runs_dir,
                           python=sys.executable, time_s=recipe.seconds(time_limit, "--time"))
    options.submit_task(plan, site, wait=wait, as_json=as_json)
