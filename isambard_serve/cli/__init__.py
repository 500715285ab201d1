"""The command line. Each command parses, calls, prints; the work is done by the modules that it names."""

from __future__ import annotations

import atexit
import contextlib
import gc
import signal
from collections.abc import Iterator
from typing import Any

import click

from isambard_serve import __version__
from isambard_serve.cli import (
    collect,
    compare,
    completion,
    deploy,
    doctor,
    image,
    probe,
    recipes,
    shell,
    status,
    submit,
    sweep,
    trace,
    tunnel,
    weights,
)
from isambard_serve.errors import ServeError

# Otherwise the interpreter goes through all that was loaded once more before it ends: up to a fifth of a command's time
# (benchmarks/startup.py).
atexit.register(gc.freeze)


class _Group(click.Group):
    """Shows this package's errors as what they are, with their exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _ended_as_by_ctrl_c():
                return super().invoke(ctx)
        except ServeError as error:
            code, message = error.exit_code, str(error)
        except BrokenPipeError:
            raise
        except KeyboardInterrupt:
            code, message = 130, "interrupted; runs that were submitted go on by themselves"
        except OSError as error:
            code, message = 1, f"{error.filename or 'input/output'}: {error.strerror or error}"
        click.echo(f"error: {message}", err=True)
        ctx.exit(code)


@contextlib.contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """What tells this process to end, such as a terminal that is closed, lets it tidy up (unless it hears nothing)."""
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    heard = {number: before for number in (signal.SIGTERM, signal.SIGHUP)
             if (before := signal.getsignal(number)) not in (signal.SIG_IGN, None)}
    for number in heard:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, before in heard.items():
            signal.signal(number, before)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def main() -> None:
    """Serve large models with vLLM on Slurm, measure them, and bring back numbers that can be believed.

    A RECIPE says what to serve and how to measure it; a site says what the cluster is made of. `submit` turns
    the two into a run: a job that holds the GPUs and serves, and a job that measures it. A run is named by its
    run id, by any of its job ids, or by `latest` (of several submitted together: the one that runs, or ran last).

    \b
    isambard-serve recipes                     what there is to run
    isambard-serve submit dp4-humming --wait   run it
    isambard-serve collect JOBID               bring the results here and show them

    Exit codes: 0 good, 1 a run that was waited for failed or is not valid, or a gate said no, 2 wrong usage or
    recipe, 3 Slurm cannot be reached, 4 not ready in time, 130 interrupted.
    """  # noqa: D301 - click wants the \b itself


for _command in (recipes.recipes, recipes.show, recipes.diff, recipes.plan, recipes.render, submit.submit,
                 submit.cancel, sweep.sweep, status.status, status.logs, collect.collect, compare.compare, probe.probe,
                 trace.trace, image.image, weights.weights, doctor.doctor, shell.shell, shell.attach,
                 completion.completion, deploy.deploy, tunnel.tunnel):
    main.add_command(_command)
