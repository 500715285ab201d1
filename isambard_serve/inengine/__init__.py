"""What goes into the engine: a folder for its ``PYTHONPATH``, without any dependency.

vLLM finds the plugin by its entry point and runs it in every EngineCore and worker; the middleware is named on its
command line; ``enter.sh`` is the first program in a container. All are copied into the run directory, which the
engine's container sees in any case, so that a run keeps exactly what ran in it. Nothing of the rest of this package
is imported there.
"""

from __future__ import annotations

import shutil
from pathlib import Path

GUARD = "isambard_serve_inengine.guard.Guard"
"""The middleware that demands the API key on every route but ``/health``."""


def install(target: Path) -> None:
    """Copies what goes onto the engine's ``PYTHONPATH``, and ``enter.sh``, to the folder ``target``."""
    here = Path(__file__).resolve().parent
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copy(here / "enter.sh", target)
    for source in sorted(here.glob("isambard_serve_inengine*")):
        shutil.copytree(source, target / source.name, dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("__pycache__"))


def variables(plugin: str, facts: str, shown: list[str], pythonpath: str | None) -> dict[str, str]:
    """The variables that the engine gets for it.

    Args:
        plugin: the folder that :func:`install` filled.
        facts: the folder that the facts go to.
        shown: the names of the variables whose values the facts shall hold.
        pythonpath: what ``PYTHONPATH`` would be otherwise.
    """
    return {
        "PYTHONPATH": f"{plugin}:{pythonpath}" if pythonpath else plugin,
        "ISAMBARD_SERVE_FACTS": facts,
        "ISAMBARD_SERVE_SHOWN": " ".join(shown),
    }
