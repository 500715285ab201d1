"""The check that each module of the package stays one idea: no more than 400 lines."""

import sys
from pathlib import Path

LIMIT = 400


def main() -> int:
    """Names every module over the limit; returns the exit code."""
    package = Path(__file__).parents[2] / "isambard_serve"
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in package.rglob("*.py")}
    long = {path: length for path, length in lengths.items() if length > LIMIT}
    for path, length in long.items():
        print(f"{path.relative_to(package.parent)} has {length} lines, {LIMIT} at most", file=sys.stderr)
    return 1 if long else 0


if __name__ == "__main__":
    sys.exit(main())
