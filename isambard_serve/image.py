"""Images that are built here: what each is made of, as one strict YAML file.

A recipe that names one (``image: vllm-0.33``) runs in it; ``image build`` makes it for a site.
"""

from __future__ import annotations

import re
from pathlib import Path

from isambard_serve import shipped, yamlfile
from isambard_serve.errors import UsageError
from isambard_serve.records import Record

NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
"""An image's name: of a file, of a tag, and no reference, which has a ``/`` or a ``:``."""

_BASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_DEBIAN = re.compile(r"[a-z0-9][a-z0-9.+-]*(=[A-Za-z0-9.+~:-]+)?")
_VERSION = re.compile(r"[0-9][A-Za-z0-9.+!-]*")
_FORK = re.compile(r"git\+https://\S+@\S+")


class Image(Record, frozen=True):
    """An image's definition.

    ``base`` is a registry's reference; ``digest`` names its content, once and for all, and ``image resolve`` writes
    it. On top go Debian packages (``apt``), Python packages (``pip``, with nothing else changed for them), and
    ``humming``: a version of humming-kernels, or a fork as ``git+https://…@REVISION``.
    """

    name: str
    description: str
    base: str
    digest: str | None = None
    platform: str = "linux/arm64"
    apt: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    humming: str | None = None

    @property
    def pinned(self) -> str:
        """The base by its content, with its registry: podman takes none for granted.

        Raises:
            UsageError: it has no digest yet.
        """
        if self.digest is None:
            raise UsageError(f"{self.base} may be another image tomorrow: it has no digest",
                             where=f"image {self.name}: digest", remedy=f"isambard-serve image resolve {self.name}")
        registry, repository, _ = parts(self.base)
        return f"{registry}/{repository}@{self.digest}"

    @property
    def requirements(self) -> tuple[str, ...]:
        """What pip installs, one by one."""
        if self.humming is None:
            return self.pip
        joint = " @ " if _FORK.fullmatch(self.humming) else "=="
        return (*self.pip, f"humming-kernels{joint}{self.humming}")


def parts(reference: str) -> tuple[str, str, str]:
    """Registry, repository and tag of ``reference``, with what docker takes for granted filled in."""
    name, _, tag = reference.rpartition(":") if ":" in reference.rpartition("/")[2] else (reference, "", "latest")
    host, slash, rest = name.partition("/")
    if slash and ("." in host or ":" in host or host == "localhost"):
        return host, rest, tag
    return "docker.io", name if slash else f"library/{name}", tag


def folders() -> list[Path]:
    """Where images are looked for, in order: ``./images``, the user's folder, the shipped ones."""
    return [Path.cwd() / "images", shipped.user_folder() / "images", shipped.folder("images")]


def names() -> list[str]:
    """The names of all images that can be found."""
    return shipped.names(folders())


def locate(name: str, named_by: Path | None = None) -> Path:
    """The file of the image ``name``.

    Args:
        named_by: the file that extends it, if any.

    Raises:
        UsageError: there is none.
    """
    return shipped.named("image", name, folders(), named_by=named_by)


def load(name: str) -> Image:
    """The image ``name``.

    Raises:
        UsageError: it cannot be found, read or used.
    """
    path = locate(name)
    image = yamlfile.convert({**yamlfile.extended(path, locate), "name": name}, Image, str(path))
    forms = [("name", NAME, (image.name,)), ("base", _BASE, (image.base,)), ("apt", _DEBIAN, image.apt),
             ("digest", _DIGEST, (image.digest,) if image.digest else ())]
    for key, form, words in forms:
        for word in words:
            if not form.fullmatch(word):
                raise UsageError(f"{word!r} cannot be used", where=f"{path}: {key}")
    for word in image.pip:
        if word.startswith("-") or not word.isprintable():
            raise UsageError(f"{word!r} is no package", where=f"{path}: pip")
    if image.humming is not None and not (_VERSION.fullmatch(image.humming) or _FORK.fullmatch(image.humming)):
        raise UsageError(f"{image.humming!r} is neither a version nor git+https://…@REVISION",
                         where=f"{path}: humming")
    return image


def write_digest(name: str, digest: str) -> Path:
    """Writes the digest of an image's base where the image is defined, and returns the file.

    A shipped definition is left as it is: a file of the user's own extends it.
    """
    path = locate(name)
    if path.is_relative_to(shipped.folder("images")):
        path = shipped.user_folder() / "images" / path.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"extends: {name}\ndigest: {digest}\n", encoding="utf-8")
        return path
    text = path.read_text(encoding="utf-8")
    line = f"digest: {digest}\n"
    changed, count = re.subn(r"^digest:.*\n?", line, text, flags=re.MULTILINE)
    path.write_text(changed if count else f"{text.rstrip()}\n{line}", encoding="utf-8")
    return path
