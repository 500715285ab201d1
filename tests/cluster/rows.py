"""Prints real rows: the recipe `tiny` through real Slurm and real vLLM (its CPU build). `make rows` runs it."""

import tempfile
from pathlib import Path

from tests.cluster.person import Person
from tests.cluster.pretend import PretendCluster
from tests.engine.environment import ensure
from tests.support.installation import install


def main() -> None:
    """Boots a pretend cluster, runs `tiny` on it as its ordinary user would, and prints the table."""
    vllm = ensure() / "bin/vllm"
    with (tempfile.TemporaryDirectory(prefix="pretend-", dir="/tmp") as folder,
          PretendCluster.boot(Path(folder)) as cluster):
        person = Person.with_site(cluster, install(cluster.folder / "installed"), "pretend",
                                  f"{{runtime: none, command: [{vllm}]}}")
        person.does("submit", "tiny", "--wait")
        print(person.does("collect", "latest").stdout)


if __name__ == "__main__":
    main()
