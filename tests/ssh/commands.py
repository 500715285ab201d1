"""Commands that somebody gives on a laptop, to be done on the login node, in the sandbox there."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.ssh.world import ALIAS, Laptop
from tests.support.waiting import wait_until

SERVE = (sys.executable, "-m", "isambard_serve")


def does(laptop: Laptop, *words: str, check: bool = True, **keywords: Any) -> subprocess.CompletedProcess[str]:
    """Run ``isambard-serve WORDS`` on the laptop, for the sandbox of the login node."""
    command, *rest = words
    return laptop.run([*SERVE, command, "--host", ALIAS, "--site", "sandbox", *rest], check=check, **keywords)


def asks(laptop: Laptop, *words: str) -> Any:
    """What it prints as JSON: all of its stdout is that."""
    return json.loads(does(laptop, *words, "--json").stdout)


def waits(laptop: Laptop, run_id: str, *states: str) -> dict[str, Any]:
    def reached() -> dict[str, Any] | None:
        run: dict[str, Any] = asks(laptop, "status", run_id)["runs"][0]
        return run if run["state"] in states else None

    run = wait_until(reached, 90, f"{run_id} to be {states}")
    assert run is not None
    return run
