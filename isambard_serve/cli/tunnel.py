"""``tunnel``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from isambard_serve.cli import elsewhere, options

if TYPE_CHECKING:
    from isambard_serve.tunnel import Target


@click.command()
@options.run
@click.argument("command", metavar="[-- COMMAND...]", nargs=-1)
@click.option("--host", metavar="ALIAS", help="The login node, as ssh knows it. Otherwise $ISAMBARD_SERVE_HOST, or "
              "your settings.")
@options.site
@click.option("--port", type=click.IntRange(1, 65535), help="The local port. Otherwise any that is free.")
@options.as_json
def tunnel(name: str, command: tuple[str, ...], host: str | None, site_name: str | None, port: int | None,
           as_json: bool) -> None:
    """Reach an engine that serves people (submit --serve) from here, as if it ran on this machine.

    The engine has answered one completion, all the way, when you see how to reach it: lines that set OPENAI_BASE_URL
    and OPENAI_API_KEY in a shell. It lasts until Ctrl-C, or until the run has ended, and says so. Given a COMMAND,
    it runs that with both variables set, and lasts as long as the command.
    """
    import contextlib
    import os
    import shlex
    import tempfile
    from pathlib import Path

    from isambard_serve import process, records
    from isambard_serve import tunnel as tunnels
    from isambard_serve.errors import ServeError
    from isambard_serve.run import write_whole

    alias, site = elsewhere.needed(host), elsewhere.named_site(site_name)
    with tempfile.TemporaryDirectory(prefix="isambard-serve-") as folder, \
            contextlib.closing(tunnels.Forwarder(port or 0)) as forwarder:
        base_url = f"http://127.0.0.1:{forwarder.port}/v1"
        code = 0

        def opened(target: Target) -> bool:
            nonlocal code
            if command:
                code = process.attended(command, env={**os.environ, "OPENAI_BASE_URL": base_url,
                                                      "OPENAI_API_KEY": target.key})
                return False
            key_file = Path(folder) / "api.key"
            write_whole(key_file, target.key)
            if as_json:
                click.echo(records.document("tunnel", run_id=target.run_id, base_url=base_url, model=target.model,
                                            key_file=str(key_file)))
            else:
                click.echo(f"export OPENAI_BASE_URL={base_url}")
                click.echo(f'export OPENAI_API_KEY="$(cat {shlex.quote(str(key_file))})"')
            options.say(f"{target.model} answers; Ctrl-C ends the tunnel, and not the run")
            return True

        run = tunnels.keep(alias, name, forwarder, opened, site=site)
    if run:
        raise ServeError(f"the run has ended, and the tunnel with it: {run.state}"
                         f"{f' ({run.reason})' if run.reason else ''}", where=run.run_id)
    click.get_current_context().exit(code)
