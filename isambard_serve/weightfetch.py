"""In the engine's container, with its own client of the hub: fetches a model into the cache and says how far it is.

``python3 -m isambard_serve.weightfetch MODEL [--revision REVISION]``. Files that are there already are not fetched
again, and a cut connection is gone on with: a fetch that was ended is simply started again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

REPORT_S = 20.0
ATTEMPTS = 5
PAUSE_S = 15.0
HASHING = 8
"""How many files are checked at once: one core hashes less than a parallel file system gives."""

STALE_S = 3600.0
"""How long a partial file must not have grown to be what somebody who is gone has left."""

BESIDE_SAFETENSORS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "original/*", "metal/*")
"""The same weights in other forms, which the engine does not read where there are safetensors."""


def wanted(files: dict[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Those of a model's ``files`` (name → blob and size in bytes) that an engine needs."""
    if not any(name.endswith(".safetensors") and "/" not in name for name in files):
        return files
    return {name: blob for name, blob in files.items() if not any(fnmatch(name, other) for other in BESIDE_SAFETENSORS)}


def present(blobs: Path, files: dict[str, tuple[str, int]]) -> int:
    """Bytes of ``files`` that are in the folder ``blobs``, in whole files and in parts of some."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError):
        for path in blobs.iterdir():
            with contextlib.suppress(FileNotFoundError):
                blob = path.name.split(".")[0]
                sizes[blob] = max(sizes.get(blob, 0), path.stat().st_size)
    return sum(min(size, sizes.get(blob, 0)) for blob, size in dict(files.values()).items())


def forget_damaged(blobs: Path, files: dict[str, tuple[str, int]]) -> list[str]:
    """Removes those of ``files`` whose content is not what the hub says, and names them.

    The hub's client looks at sizes alone. The blob of a large file is named by its SHA-256; small ones are not checked.
    """
    large = [(name, blobs / blob) for name, (blob, _) in files.items() if re.fullmatch("[0-9a-f]{64}", blob)]

    def is_damaged(path: Path) -> bool:
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() != path.name
        return False

    with ThreadPoolExecutor(HASHING) as pool:
        judged = zip(large, pool.map(is_damaged, [path for _, path in large]), strict=True)
        damaged = [each for each, bad in judged if bad]
    for _, path in damaged:
        path.unlink(missing_ok=True)
    return [name for name, _ in damaged]


def progress(done: int, total: int, began_with: int, after_s: float) -> str:
    """How far a fetch is, in one line."""
    rate = (done - began_with) / after_s if after_s > 0 else 0.0
    left = f", {(total - done) / rate / 60:.0f} min left" if rate > 0 and done < total else ""
    return f"{done / 1e9:.2f} of {total / 1e9:.2f} GB ({100 * done / total if total else 100:.0f} %), " \
           f"{rate / 1e6:.0f} MB/s{left}"


@contextlib.contextmanager
def reporting(measure: Callable[[], int], total: int) -> Iterator[None]:
    """Says every ``REPORT_S`` how far it is, and once more at the end."""
    over, began, began_with = threading.Event(), time.monotonic(), measure()

    def report() -> None:
        while not over.wait(REPORT_S):
            say(progress(measure(), total, began_with, time.monotonic() - began))

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        say(progress(measure(), total, began_with, time.monotonic() - began))


def say(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)  # noqa: T201 - the job's log


def fetch(model: str, revision: str) -> None:
    """Fetches ``model`` into the cache that the environment names."""
    from huggingface_hub import HfApi, constants, snapshot_download

    info: Any = HfApi().model_info(model, revision=revision, files_metadata=True)
    files = wanted({each.rfilename: (each.lfs.sha256 if each.lfs else each.blob_id, each.size or 0)
                    for each in info.siblings})
    total = sum(dict(files.values()).values())
    blobs = Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "blobs"
    for part in blobs.glob("*.incomplete"):
        if time.time() - part.stat().st_mtime > STALE_S:
            part.unlink(missing_ok=True)
    say(f"{model}, revision {revision} ({info.sha}): {len(files)} files, {total / 1e9:.2f} GB, into {blobs.parent}")
    with reporting(lambda: present(blobs, files), total):
        snapshot_download(model, revision=revision, allow_patterns=sorted(files))
    say("checking what was fetched")
    damaged = forget_damaged(blobs, files)
    if damaged:
        raise OSError(f"arrived damaged, and was removed: {', '.join(damaged)}")


def main(words: Sequence[str] | None = None) -> int:
    """``python3 -m isambard_serve.weightfetch``: exit code 0 if all files are there."""
    parser = argparse.ArgumentParser(prog="isambard_serve.weightfetch", description="Fetch a model's weights.")
    parser.add_argument("model", help="as the hub calls it")
    parser.add_argument("--revision", default="main")
    given = parser.parse_args(words)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            fetch(given.model, given.revision)
            return 0
        except Exception as error:  # noqa: BLE001 - what the client raises differs from version to version
            status = getattr(getattr(error, "response", None), "status_code", None)
            say(f"error: {type(error).__name__}: {' '.join(str(error).split())}")
            if status in (401, 403, 404):
                say("  → the hub shows this model to those who may see it: accept its terms there, and name the file "
                    "that holds your token (HF_TOKEN_PATH, or `hf auth login`)")
                return 1
            if attempt < ATTEMPTS:
                say(f"again in {PAUSE_S:.0f} s, from where it is")
                time.sleep(PAUSE_S)
    return 1


if __name__ == "__main__":
    sys.exit(main())
