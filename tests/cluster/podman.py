"""Real podman for the pretend cluster's user: without root, behind the real podman-hpc, with an image made here.

The image is a skeleton without a single program: those of this machine are mounted into it. No network is needed.
Two things of this machine are made as they are on any other: /dev/fuse is everybody's, and /dev/mqueue is there.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.pretend import PretendCluster
from tests.engine.environment import cache
from tests.support.packages import need

PACKAGES = ("catatonit", "conmon", "fuse-overlayfs", "podman", "runc", "uidmap")
IMAGE = "localhost/skeleton:latest"
FOLDERS = ("dev", "etc", "mnt", "proc", "run", "sys", "tmp", "usr", "var")
LINKS = ("bin", "lib", "lib64", "sbin")

WRAPPER = """#!/bin/bash
# The real podman-hpc, told where this cluster keeps its containers.
export PATH={bin}:/usr/sbin:$PATH SQUASH_DIR={storage}/squash
export PODMANHPC_GRAPH_ROOT={storage}/graph PODMANHPC_RUN_ROOT={storage}/run PODMANHPC_CONFIG_HOME={storage}/config
export PODMANHPC_HOOKS_DIR={storage}/hooks PODMANHPC_MODULES_DIR={modules}
exec {bin}/podman-hpc "$@"
"""


@dataclass(frozen=True)
class Podman:
    """The user's podman-hpc; ``folder`` holds it and goes first on the PATH."""

    cluster: PretendCluster
    folder: Path

    @classmethod
    @contextmanager
    def ready(cls, cluster: PretendCluster, dependencies: Path) -> Iterator[Podman]:
        """Have podman work for the user, with the image :data:`IMAGE`; leave no container when done.

        Args:
            dependencies: the environment that podman-hpc is installed in.
        """
        need(*PACKAGES)
        Path("/dev/fuse").chmod(0o666)
        Path("/dev/mqueue").mkdir(exist_ok=True)
        storage, folder = cluster.home / "containers", cluster.home / "podman"
        cluster.run(["mkdir", "-p", folder, storage / "hooks", storage / "squash", storage / "config/containers"])
        # As in Debian, where crun would be the default and cannot run on every kernel.
        cluster.run(["tee", storage / "config/containers/containers.conf"], input='[engine]\nruntime = "runc"\n')
        cluster.run(["tee", storage / "config/containers/storage.conf"], input='[storage]\ndriver = "overlay"\n')
        wrapper = WRAPPER.format(bin=dependencies / "bin", storage=storage,
                                 modules=dependencies / "etc/podman_hpc/modules.d")
        cluster.run(["tee", folder / "podman-hpc"], input=wrapper)
        cluster.run(["chmod", "+x", folder / "podman-hpc"])
        podman = cls(cluster, folder)
        skeleton = cluster.folder / "skeleton.tar"
        skeleton.write_bytes(_skeleton())
        podman.run("import", str(skeleton), IMAGE)
        try:
            yield podman
        finally:
            podman.run("rm", "--all", "--force", "--time=0")

    @property
    def path(self) -> str:
        """The PATH on which podman-hpc is found."""
        return f"{self.folder}:{self.cluster.environment['PATH']}"

    @property
    def mounts(self) -> list[str]:
        """The folders of this machine that hold all that is run in the image."""
        return ["/usr", str(self.cluster.folder), str(cache())]

    def run(self, *arguments: str) -> str:
        """Run ``podman-hpc ARGUMENTS`` as the user and return what it prints."""
        return self.cluster.run([self.folder / "podman-hpc", *arguments], timeout=120).stdout

    def containers(self) -> list[str]:
        """All containers, in whatever state."""
        return [each["Names"][0] for each in json.loads(self.run("ps", "--all", "--format=json"))]


def _skeleton() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in FOLDERS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name in LINKS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(entry)
    return data.getvalue()
