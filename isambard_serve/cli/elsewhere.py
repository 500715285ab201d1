"""``--host``: a command that is given on a laptop and done by the same command line on a login node."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from isambard_serve.cli import options

HOST = "as ssh knows it. Otherwise $ISAMBARD_SERVE_HOST, or your settings; unless they name one, on this machine."
DEPLOY = "With --host: put this version there first, if it is not there."

Again = Callable[[list[str], int], list[str]]
"""What to ask for after a lost connection, of the words and the bytes of output that have come."""


def chosen(flag: str | None, site_name: str | None) -> tuple[str | None, str | None]:
    """The host on which a command is to be done, None for this machine; and the site that is named for it.

    The flag wins, then the environment, then the user's settings. But for the flag, a site without Slurm, and a site
    that this machine belongs to, stay here.
    """
    from isambard_serve import config, site
    from isambard_serve.errors import UsageError

    settings = config.load()
    named = named_site(site_name)
    host = flag if flag is not None else os.environ.get("ISAMBARD_SERVE_HOST") or settings.host
    if host and flag is None:
        try:
            here = site.choose(named)
        except UsageError:
            return host, named  # it is known only there
        if here.scheduler == "local" or not named:
            return None, named
    return host, named


def named_site(flag: str | None) -> str | None:
    """The site that is named here, which the host will be told of."""
    from isambard_serve import config

    return flag or os.environ.get("ISAMBARD_SERVE_SITE") or config.load().site


def needed(flag: str | None) -> str:
    """The host of a command that can be done nowhere else."""
    from isambard_serve import config
    from isambard_serve.errors import UsageError

    host = flag if flag is not None else os.environ.get("ISAMBARD_SERVE_HOST") or config.load().host
    if host is None:
        raise UsageError("name the login node, as ssh knows it", where="--host",
                         remedy="clifton calls it PROJECT.aip2.isambard; host: in your settings saves the typing")
    return host


def unless_begun(words: list[str], printed: int) -> list[str]:
    """The same again, if nothing was printed yet."""
    from isambard_serve.errors import HostError

    if printed:
        raise HostError("the connection was lost in the middle of the answer", remedy="ask again")
    return words


def after(words: list[str], printed: int) -> list[str]:
    """What comes after that which was printed."""
    return [words[0], f"--skip={printed}", *words[1:]]


def end_with_caller() -> None:
    """Has this process end when whoever called it from afar has gone: nothing waits on a login node for nobody."""
    from isambard_serve.remote import TETHER

    def hold() -> None:
        while os.read(sys.stdin.fileno(), 1 << 12):
            pass
        os._exit(130)

    if os.environ.get(TETHER):
        threading.Thread(target=hold, daemon=True).start()


class Relayed(click.Command):
    """A command that may be done on another host, by the same words.

    Args:
        again: what to ask for after a lost connection; unless it is given, nothing is asked again.
        only_by_flag: stay on this machine unless ``--host`` is given.
    """

    def __init__(self, *arguments: Any, again: Again | None = None, only_by_flag: bool = False,
                 **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._again = again
        self._only_by_flag = only_by_flag
        self.params += [click.Option(["--host"], metavar="ALIAS", help=f"Do it on this login node, {HOST}"),
                        click.Option(["--deploy"], is_flag=True, help=DEPLOY)]

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command, here or there."""
        flag, deploy = ctx.params.pop("host"), ctx.params.pop("deploy")
        host, site = chosen(flag, ctx.params.get("site_name"))
        if host is None or (self._only_by_flag and flag is None):
            return super().invoke(ctx)
        from isambard_serve import deploy as deployment
        from isambard_serve import remote

        words, stdin = self.outgoing(ctx)
        if site and not ctx.params.get("site_name"):
            words = [words[0], f"--site={site}", *words[1:]]
        if deploy:
            deployment.deploy(host, say=options.say)
        again = self._again
        ctx.exit(remote.relay(host, words, stdin=stdin,
                              again=None if again is None else lambda printed: again(words, printed)))

    def outgoing(self, ctx: click.Context) -> tuple[list[str], bytes]:
        """The words of the command as it is to be given there, and what it reads."""
        return words_of(ctx), b""


class RelayedRecipes(Relayed):
    """A command whose recipes are resolved here."""

    def outgoing(self, ctx: click.Context) -> tuple[list[str], bytes]:
        """The words, without those that are worked into the recipes; and the recipes."""
        from isambard_serve import recipe

        names = ctx.params["names"]
        if names in ((), options.PROBE):
            return words_of(ctx), b""
        if names == ("-",):
            return words_of(ctx), sys.stdin.buffer.readline()
        recipes = options.load_recipes(names, ctx.params["assignments"], ctx.params["time_limit"])
        ctx.params["names"] = ("-",)
        return words_of(ctx, without=("assignments", "time_limit")), recipe.packed(recipes)


def words_of(ctx: click.Context, without: tuple[str, ...] = ()) -> list[str]:
    """The command line that would give ``ctx`` again, but for the parameters ``without`` and what is not given."""
    name = ctx.info_name or ""
    options_, arguments = [], []
    for param in ctx.command.params:
        key = param.name or ""
        if key in without or key not in ctx.params or ctx.get_parameter_source(key) is not ParameterSource.COMMANDLINE:
            continue
        value = ctx.params[key]
        values = list(value) if isinstance(value, tuple) else [value]
        if isinstance(param, click.Argument):
            arguments += [str(each) for each in values if each is not None]
        elif isinstance(param, click.Option) and param.is_flag:
            options_.append(param.opts[-1] if value else param.secondary_opts[-1])
        else:
            options_ += [f"{param.opts[-1]}={each}" for each in values]
    return [name, *options_, *(["--", *arguments] if arguments else [])]
