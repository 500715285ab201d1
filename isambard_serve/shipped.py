"""The files that come with the package: recipes, images, sites, templates, the engines' flag lists, the load generator.

In a wheel they lie inside the package; in a checkout ``jobs/``, ``images/`` and ``templates/`` stand beside it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from isambard_serve.errors import UsageError, nearest

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """The shipped folder ``name`` (``jobs``, ``images``, ``templates``, ``sites``, ``engine_flags``, ``inclient``)."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def user_folder() -> Path:
    """The user's own folder of settings, recipes and sites: ``$XDG_CONFIG_HOME/isambard-serve``."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "isambard-serve"


def names(folders: Sequence[Path]) -> list[str]:
    """The names of all that is defined in ``folders``, a YAML file each."""
    return sorted({path.stem for place in folders for path in place.glob("*.yaml") if path.is_file()})


def named(kind: str, name: str, folders: Sequence[Path], *, named_by: Path | None = None, where: str | None = None
          ) -> Path:
    """The first ``name.yaml`` in ``folders``; a file that extends its own name means the next one.

    Args:
        kind: what it defines: a recipe, say.
        named_by: the file that extends it, if any; ``where``: what else names it.

    Raises:
        UsageError: there is none.
    """
    for place in folders:
        candidate = place / f"{name}.yaml"
        if candidate.is_file() and (named_by is None or candidate.resolve() != named_by.resolve()):
            return candidate
    known = names(folders)
    raise UsageError(f"no {'other ' if name in known else ''}{kind} is called {name!r}",
                     where=f"{named_by}: extends" if named_by else where,
                     remedy=nearest(name, known) or f"known {kind}s: {', '.join(known) or 'none'}")
