"""The pretend cluster that all tests of this folder share, and somebody who works on it."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.cluster.person import Person
from tests.cluster.pretend import PretendCluster
from tests.engine.environment import ensure
from tests.support import coverage
from tests.support.installation import install


@pytest.fixture(scope="session")
def cluster() -> Iterator[PretendCluster]:
    """Yield a booted cluster; a test that leaves jobs behind calls `cluster.cancel_all()`."""
    # Not pytest's own directory: the user could not enter it, and a socket's path must be short.
    scratch = TemporaryDirectory(prefix="pretend-", dir="/tmp")
    with scratch as folder, PretendCluster.boot(Path(folder)) as booted:
        yield booted


@pytest.fixture(scope="session")
def installed(cluster: PretendCluster) -> Iterator[Path]:
    """The package's commands, installed from a wheel."""
    coverage.prepare(cluster.folder)
    yield install(cluster.folder / "installed")
    coverage.gather(cluster.folder)


@pytest.fixture(scope="session")
def person(cluster: PretendCluster, installed: Path) -> Person:
    """The cluster's user, at a site whose engine is the real one."""
    vllm = ensure() / "bin/vllm"
    return Person.with_site(cluster, installed, "pretend", f"{{runtime: none, command: [{vllm}]}}")


@pytest.fixture(scope="session")
def simulating(cluster: PretendCluster, installed: Path) -> Person:
    """The cluster's user, at a site whose engine is simulated."""
    container = "{runtime: simulated, args: [--sim-time-scale, '20']}"
    return Person.with_site(cluster, installed, "simulated", container)


@pytest.fixture(scope="session")
def accounted() -> Iterator[Person]:
    """The user of a cluster of its own, which keeps accounts."""
    with (TemporaryDirectory(prefix="pretend-", dir="/tmp") as folder,
          PretendCluster.boot(Path(folder), accounting=True) as cluster):
        coverage.prepare(cluster.folder)
        container = "{runtime: simulated, args: [--sim-time-scale, '20']}"
        yield Person.with_site(cluster, install(cluster.folder / "installed"), "accounted", container)
        coverage.gather(cluster.folder)
