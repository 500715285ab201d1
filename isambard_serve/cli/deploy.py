"""``deploy``."""

from __future__ import annotations

import click

from isambard_serve.cli import elsewhere, options


@click.command()
@click.option("--host", metavar="ALIAS", help="The login node, as ssh knows it. Otherwise $ISAMBARD_SERVE_HOST, or "
              "your settings.")
@options.site
@click.option("--in-job/--no-job", "in_job", default=None, help="Install in a small job, or on the login node itself. "
              "Otherwise in a job where the login node's memory is short.")
@click.option("--wheelhouse", is_flag=True, help="Send all that is needed, and have nothing fetched there. It is sent "
              "anyway where the login node reaches no package index.")
@options.as_json
def deploy(host: str | None, site_name: str | None, in_job: bool | None, wheelhouse: bool, as_json: bool) -> None:
    """Put this very version on a login node, so that commands can be done there with --host.

    It is installed in your home there, below ~/.local/share/isambard-serve, in a folder of its own: runs go on with
    the version that they were begun with. There must be a Python 3.11 or newer: on the PATH, in a module
    (cray-python), or one of uv's.
    """
    import msgspec

    from isambard_serve import deploy as deployment
    from isambard_serve import records

    alias = elsewhere.needed(host)
    done = deployment.deploy(alias, say=options.say, site=site_name, in_job=in_job, wheelhouse=wheelhouse)
    if as_json:
        click.echo(records.document("deploy", **msgspec.to_builtins(done)))
    else:
        click.echo(f"{done.host}: {done.version} {'is there now' if done.new else 'was there already'}: {done.command}")
