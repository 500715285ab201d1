"""The files that come with the package: recipes, images, sites, templates, the engines' flag lists, the load generator.

In a wheel they lie inside the package; in a checkout ``jobs/``, ``images/`` and ``templates/`` stand beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """The shipped folder ``name`` (``jobs``, ``images``, ``templates``, ``sites``, ``engine_flags``, ``inclient``)."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def user_folder() -> Path:
    """The user's own folder of settings, recipes and sites: ``$XDG_CONFIG_HOME/isambard-serve``."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "isambard-serve"


def named_file(name: str, folders: list[Path], other_than: Path | None = None) -> Path | None:
    """The first ``name.yaml`` in ``folders``; a file that extends its own name means the next one."""
    for place in folders:
        candidate = place / f"{name}.yaml"
        if candidate.is_file() and (other_than is None or candidate.resolve() != other_than.resolve()):
            return candidate
    return None
