"""How long a person waits for the command line: medians of whole processes, beside the bare interpreter's.

Usage: python benchmarks/startup.py [REPEATS]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "isambard-serve --help": ["-m", "isambard_serve", "--help"],
    "isambard-serve recipes": ["-m", "isambard_serve", "recipes"],
    "isambard-serve render": ["-m", "isambard_serve", "render", "dp4-humming", "--site", "isambard-ai"],
}


def median_s(arguments: list[str], repeats: int) -> float:
    """The median wall time of a process, over ``repeats`` runs."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    """Prints one line a command: median seconds, and the ratio to the bare interpreter."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    bare = None
    for name, arguments in COMMANDS.items():
        seconds = median_s(arguments, repeats)
        bare = bare or seconds
        print(f"{name:<24} {seconds:6.3f} s   {seconds / bare:5.1f} x   (median of {repeats})")


if __name__ == "__main__":
    main()
