"""``shell`` and ``attach``."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys

import click

from isambard_serve.cli import options

HOLDING = ("started", "loading", "ready", "measuring")


def _at_a_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


@click.command()
@options.run
@click.argument("command", metavar="[-- COMMAND...]", nargs=-1)
@options.site
def attach(name: str, command: tuple[str, ...], site_name: str | None) -> None:
    """Open a shell beside a running engine: on its node, in its container, with its variables.

    OPENAI_BASE_URL and OPENAI_API_KEY are set for clients. It shares what the engine holds: what it does, the engine
    feels. With a COMMAND behind `--` that is run instead of a shell, and its exit code is this command's.
    """
    from isambard_serve import process, shell
    from isambard_serve import status as statuses
    from isambard_serve.errors import NotReadyError

    site = options.choose_site(site_name)
    directory = options.open_runs(site).find(name)
    run = statuses.read(directory, options.open_slurm(site))
    if run.state not in HOLDING or directory.is_task:
        raise NotReadyError(f"no engine of it runs: it is {run.state}", where=run.run_id,
                            remedy=f"isambard-serve status {run.run_id}")
    argv, env = shell.attach(directory, site, options.load_recipe(str(directory.lock), (), None), run.jobs["serve"],
                             command, os.environ, terminal=_at_a_terminal())
    click.get_current_context().exit(process.attended(argv, env=env))


@click.command()
@click.argument("name", metavar="[RECIPE", required=False, shell_complete=options.recipe_names)
@click.argument("command", metavar="[-- COMMAND...]]", nargs=-1)
@options.site
@options.assignments
@click.option("--time", "time_limit", metavar="TIME", default="1h", show_default=True,
              help="How long you may stay.")
def shell(name: str | None, command: tuple[str, ...], site_name: str | None, assignments: tuple[str, ...],
          time_limit: str) -> None:
    """Open a shell on a node of your own, to try things by hand.

    With a RECIPE it has the recipe's GPUs, and is in its container, with its variables and its binding; the commands
    of the engine and of its load are printed, ready to be typed. A COMMAND (behind the RECIPE and `--`) is run
    instead of a shell. Leave the shell, and the node is given back.
    """
    from isambard_serve import container, launch, process, recipe
    from isambard_serve import shell as shells

    site = options.avoid_bad_nodes(options.choose_site(site_name))
    cluster = options.open_slurm(site)
    terminal = _at_a_terminal()
    with contextlib.ExitStack() as files:
        gpus, inner = site.sweep.gpus, list(shells.DEFAULT)
        if name is not None:
            chosen = options.load_recipe(name, assignments, None)
            launch.check_needs(container.image_need(site, chosen))
            (plan,) = options.make_plans([chosen], site, runs_dir=f"{site.runs_dir}/{shells.FOLDER}")
            gpus, inner = plan.gpus, shells.with_recipe(plan, site, chosen, command, terminal=terminal)
            files.enter_context(shells.written(plan))
        words: list[str] = []
        if cluster:
            words = shells.accepted(shells.asked(site, gpus, recipe.seconds(time_limit, "--time")), cluster)
            options.say(f"asking for a node: srun {shlex.join(words)}")
        argv, env = shells.open_on_node(site, words, inner, os.environ, terminal=terminal)
        code = process.attended(argv, env=env)
    click.get_current_context().exit(code)
