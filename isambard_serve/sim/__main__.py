"""``python -m isambard_serve.sim serve MODEL …`` and ``… bench serve …``: the command lines of ``vllm``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from isambard_serve.errors import ServeError
from isambard_serve.sim import faults

_USAGE = """\
usage: python -m isambard_serve.sim serve MODEL [vLLM's flags] [--sim-time-scale X] [--sim-fault NAME[=VALUE]]...
       python -m isambard_serve.sim bench serve [vLLM's flags]

A simulated engine in the place of vLLM: its numbers are not measurements.

  --sim-time-scale X             virtual seconds per real second (1)
  --sim-fault NAME[=VALUE]       plants a fault, as often as wanted (point: one bench serve, counted from 1):
"""


def main(words: Sequence[str]) -> int:
    """Does what the command line says and returns the exit code."""
    try:
        match list(words):
            case ["serve", *rest] if "--help" not in rest:
                from isambard_serve.sim.serve import serve
                return serve(rest, os.environ)
            case ["bench", "serve", *rest] if "--help" not in rest:
                from isambard_serve.sim.client import bench
                return bench(rest, os.environ)
            case _:
                asked = "--help" in words or "-h" in words
                (sys.stdout if asked else sys.stderr).write(_USAGE + faults.help_text())
                return 0 if asked else 2
    except ServeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
