"""The pretend cluster that all tests of this folder share, and somebody who works on it."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.cluster.person import Person
from tests.cluster.pretend import PretendCluster
from tests.engine.environment import ensure
from tests.support.installation import install


@pytest.fixture(scope="session")
def cluster() -> Iterator[PretendCluster]:
    """Yield a booted cluster; a test that leaves jobs behind calls `cluster.cancel_all()`."""
    # Not pytest's own directory: the user could not enter it, and a socket's path must be short.
    scratch = TemporaryDirectory(prefix="pretend-", dir="/tmp")
    with scratch as folder, PretendCluster.boot(Path(folder)) as booted:
        yield booted


@pytest.fixture(scope="session")
def person(cluster: PretendCluster) -> Person:
    """The cluster's user, with the package installed from a wheel and a site whose engine is the real one."""
    return Person.with_site(cluster, install(cluster.folder / "installed"), ensure() / "bin/vllm")
