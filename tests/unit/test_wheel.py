"""The package as it is sent: the same wheel that the build makes."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from isambard_serve import __version__, wheel
from isambard_serve.errors import ServeError

ROOT = Path(__file__).parents[2]


def test_the_wheel_is_the_one_that_the_build_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=ROOT, check=True,
                   capture_output=True)
    (built,) = tmp_path.glob("*.whl")
    assert built.name == wheel.NAME
    theirs, ours = zipfile.ZipFile(built), zipfile.ZipFile(io.BytesIO(wheel.build(wheel.files())))
    with theirs, ours:
        info = f"isambard_serve-{__version__}.dist-info"
        own = [name for name in theirs.namelist() if not name.startswith(f"{info}/licenses/")]
        assert sorted(ours.namelist()) == sorted(own)
        differ = [name for name in own if ours.read(name) != theirs.read(name)]
        # By its licences, its generator, and where the checkout is newer than its installation.
        assert set(differ) <= {f"{info}/{name}" for name in ("RECORD", "WHEEL", "METADATA")}


def test_the_same_content_makes_the_same_wheel_and_another_one_another_version() -> None:
    content = wheel.files()
    assert wheel.build(content) == wheel.build(dict(reversed(content.items())))
    changed = {**content, "isambard_serve/__init__.py": b"# changed\n"}
    assert wheel.identity(changed) != wheel.identity(content)


def test_a_package_that_is_not_installed_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def none(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", none)
    with pytest.raises(ServeError, match="not installed here"):
        wheel.build({})
