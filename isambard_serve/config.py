"""The user's settings: ``~/.config/isambard-serve/config.yaml``."""

from __future__ import annotations

from pathlib import Path

from isambard_serve import shipped, yamlfile
from isambard_serve.records import Record


class Config(Record, frozen=True):
    """What a user may set once.

    ``site`` is used when neither ``--site`` nor ``ISAMBARD_SERVE_SITE`` names one. ``host`` is the login node, as ssh
    knows it, on which commands are run when neither ``--host`` nor ``ISAMBARD_SERVE_HOST`` names one.
    """

    site: str | None = None
    host: str | None = None


def load(path: Path | None = None) -> Config:
    """The settings in ``path`` (the user's file unless given); all defaults when there is none."""
    path = path or shipped.user_folder() / "config.yaml"
    if not path.is_file():
        return Config()
    return yamlfile.convert(yamlfile.read(path), Config, str(path))
