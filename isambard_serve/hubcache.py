"""The hub's cache on a file system: where a model lies in it, and whether all of its weights are there.

A file appears in a snapshot only once it is whole; a fetch that was cut off leaves a snapshot with gaps.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

INDEX = "model.safetensors.index.json"
"""Names the file of each weight, where there are several."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def folder(cache: str, model: str) -> str:
    """The folder of ``model`` in the cache ``cache`` (what ``HF_HOME`` names)."""
    return f"{cache}/hub/models--{model.replace('/', '--')}"


def missing(model: Path, revision: str) -> str | None:
    """What is not there of ``revision`` of the model in the folder ``model``, in words; None if all is there.

    Of a model whose weights are in one file, that file; of others all that their index names; and the config.
    """
    ref = model / "refs" / revision
    snapshot = model / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision)
    if not snapshot.is_dir():
        return f"of revision {revision} not found"
    names = {path.name for path in snapshot.iterdir()}
    if INDEX in names:
        try:
            index = msgspec.json.decode((snapshot / INDEX).read_bytes(), type=_Index)
        except (OSError, msgspec.MsgspecError):
            return f"incomplete: {INDEX} cannot be read"
        wanted = set(index.weight_map.values())
    else:
        wanted = {name for name in names if name.endswith(WEIGHTS)} or {"model.safetensors"}
    gaps = sorted(name for name in {*wanted, "config.json"} if not (snapshot / name).exists())
    return f"incomplete: {len(gaps)} of {len(wanted) + 1} files are missing, {gaps[0]} for one" if gaps else None
