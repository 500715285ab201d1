"""``completion``."""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete commands, options and recipe names.

    For bash, for instance: isambard-serve completion bash >> ~/.bashrc
    """
    from click.shell_completion import get_completion_class

    from isambard_serve.cli import main

    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - one of the choices above
    click.echo(kind(main, {}, "isambard-serve", "_ISAMBARD_SERVE_COMPLETE").source())
