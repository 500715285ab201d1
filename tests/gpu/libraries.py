"""Fetches what a bare GPU machine lacks into folders for its PYTHONPATH: `make device-libs`.

The machine has Python 3.12 on x86-64 Linux, PyTorch with what that brings, and a CUDA toolkit, and reaches no
network. The folders are unpacked wheels; each is made anew.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {
    # msgspec is the package's own need; the rest is what humming-kernels imports.
    "device-libs": ("msgspec==0.23.0", "safetensors==0.8.0", "jinja2==3.1.6", "markupsafe==3.0.4", "tqdm==4.70.1",
                    "tabulate==0.10.0", "filelock==4.3.1", "packaging==26.4", "pyelftools==0.33",
                    "nvidia-ml-py==13.615.71"),
    "device-libs-humming-0.1.20": ("humming-kernels==0.1.20",),
    "device-libs-humming-0.1.10": ("humming-kernels==0.1.10",),
}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64",
             "manylinux_2_5_x86_64", "manylinux1_x86_64")


def fill(folder: Path, wheels: tuple[str, ...]) -> None:
    """Makes ``folder`` of the unpacked ``wheels``."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as fetched:
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
                        "--python-version", "3.12", "--implementation", "cp", *platforms, "--dest", fetched, *wheels],
                       check=True)
        for wheel in Path(fetched).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
                for entry in archive.infolist():  # zipfile leaves the mode out, and one of the files is a program
                    if entry.external_attr >> 16 & 0o111 and not entry.is_dir():
                        (folder / entry.filename).chmod(0o755)


def main() -> None:
    """Fills the folders, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", choices=[*FOLDERS, []], help="all, unless named")
    for name in parser.parse_args().folders or FOLDERS:
        fill(ROOT / name, FOLDERS[name])
        size = sum(path.stat().st_size for path in (ROOT / name).rglob("*") if path.is_file())
        print(f"{name}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
