"""This very package as a wheel, made from its own files: what a login node gets is what runs here.

No build tool is needed, so that an installed package can be sent on as well as a checkout. The format is that of
PEP 427.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

from isambard_serve import __version__, shipped
from isambard_serve.errors import ServeError

NAME = f"isambard_serve-{__version__}-py3-none-any.whl"
REQUIREMENTS = "isambard_serve/requirements/package.txt"
"""What the package needs, pinned with hashes, as it lies in the wheel."""

_INFO = f"isambard_serve-{__version__}.dist-info"
_WHEEL = "Wheel-Version: 1.0\nGenerator: isambard-serve\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_BESIDE = ("images", "jobs", "templates", "requirements")
"""Folders that lie inside the package in a wheel, and beside it in a checkout."""


def files() -> dict[str, bytes]:
    """The package's files by their names in a wheel."""
    package = Path(__file__).resolve().parent
    found = {f"isambard_serve/{path.relative_to(package)}": path.read_bytes()
             for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    for name in _BESIDE:
        folder = shipped.folder(name)
        found |= {f"isambard_serve/{name}/{path.relative_to(folder)}": path.read_bytes()
                  for path in folder.rglob("*") if path.is_file()}
    # In a checkout the developers' own requirements lie there too.
    return {name: found[name] for name in sorted(found)
            if not name.startswith("isambard_serve/requirements/") or name == REQUIREMENTS}


def identity(content: Mapping[str, bytes]) -> str:
    """What tells this state of the package from every other: its version, and a hash of its files."""
    digest = hashlib.sha256()
    for name, data in sorted(content.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return f"{__version__}-{digest.hexdigest()[:12]}"


def build(content: Mapping[str, bytes]) -> bytes:
    """The wheel of ``content``, the same bytes for the same content.

    Raises:
        ServeError: the package is not installed, so that its metadata are not known.
    """
    try:
        installed = importlib.metadata.distribution("isambard-serve")
    except importlib.metadata.PackageNotFoundError as error:
        raise ServeError("isambard-serve is not installed here, only found", remedy="install it with pip") from error
    info = {"METADATA": installed.read_text("METADATA"), "WHEEL": _WHEEL,
            "entry_points.txt": installed.read_text("entry_points.txt")}
    content = dict(sorted(content.items())) | {f"{_INFO}/{name}": (text or "").encode() for name, text in info.items()}
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in content.items()]
    record = "\n".join([*lines, f"{_INFO}/RECORD,,"]) + "\n"
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {**content, f"{_INFO}/RECORD": record.encode()}.items():
            entry = zipfile.ZipInfo(name)  # of 1980: a wheel has no better time
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return wheel.getvalue()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
