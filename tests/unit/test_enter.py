"""The first program in a container: what it sets, and that what it starts never outlives who asked for it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from isambard_serve import shipped

SCRIPT = shipped.folder("inengine") / "enter.sh"
OLD = "NVRM version: NVIDIA UNIX aarch64 Kernel Module  565.57.01  Thu Oct 10 12:00:00 UTC 2024\n"
NEW = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.173.02  Release Build  (x@y)\n"

Entered = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Stands for the container's /: what the script looks at there."""
    root = tmp_path / "root"
    (root / "mnt").mkdir(parents=True)
    return root


@pytest.fixture
def entered(root: Path) -> Iterator[Entered]:
    """Start the script on words, with its absolute paths moved below ``root``."""
    text = SCRIPT.read_text()
    for path in ("/mnt", "/proc/driver", "/usr/local/cuda"):
        assert path in text
        text = text.replace(path, f"{root}{path}")
    copy = root / "enter.sh"
    copy.write_text(text)
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, **environ: str) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(
            ["sh", str(copy), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={"PATH": os.environ["PATH"], **environ}, process_group=0))
        return started[-1]

    yield start
    for each in started:
        with each, contextlib.suppress(ProcessLookupError):  # nothing of its group is left
            os.killpg(each.pid, signal.SIGKILL)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.read()


def compatibility(root: Path, version: str) -> Path:
    """Libraries in the image that stand for a driver of ``version``."""
    folder = root / "usr/local/cuda/compat"
    folder.mkdir(parents=True)
    for name in ("libcuda.so", "libcuda.so.1", f"libcuda.so.{version}"):
        (folder / name).touch()
    return folder


def driver(root: Path, text: str) -> None:
    folder = root / "proc/driver/nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(text)


def test_the_command_is_ended_when_nobody_holds_the_other_end_of_the_input(entered: Entered) -> None:
    process = entered("sh", "-c", "trap 'exit 5' TERM; echo up; while :; do sleep 0.02; done")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 5


def test_a_command_that_will_not_end_is_killed(entered: Entered, root: Path) -> None:
    copy = root / "enter.sh"
    assert "sleep 10" in copy.read_text()
    copy.write_text(copy.read_text().replace("sleep 10", "sleep 0.1"))
    process = entered("sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.02; done")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == -signal.SIGKILL


def test_the_command_takes_the_scripts_place_and_so_gets_its_signals(entered: Entered) -> None:
    process = entered("sh", "-c", "echo $$; exec sleep 60")
    assert process.stdout is not None
    assert process.stdout.readline() == f"{process.pid}\n"
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM


def test_the_commands_own_input_is_empty_and_it_does_not_hold_the_lifeline(entered: Entered) -> None:
    process = entered("sh", "-c", "cat; ls /proc/self/fd | wc -l")
    assert int(said(process)) == 4  # input, output, errors, and the folder that ls reads


def test_a_persons_shell_keeps_its_input(entered: Entered) -> None:
    process = entered("--interactive", "cat")
    assert process.communicate("typed\n", timeout=10)[0] == "typed\n"


def variables(process: subprocess.Popen[str]) -> dict[str, str]:
    return dict(line.split("=", 1) for line in said(process).splitlines())


def test_compiled_kernels_go_into_the_runs_folder_unless_told_otherwise(entered: Entered, root: Path) -> None:
    given = variables(entered("env", HUMMING_CACHE_DIR="/mine"))
    assert given["VLLM_CACHE_ROOT"] == f"{root}/mnt/vllm"
    assert given["TRITON_CACHE_DIR"] == f"{root}/mnt/triton"
    assert given["HUMMING_CACHE_DIR"] == "/mine"
    assert (given["TMPDIR"], given["PYTHONNOUSERSITE"]) == ("/tmp", "1")


def test_without_the_runs_folder_the_image_keeps_its_own_places_for_kernels(entered: Entered, root: Path) -> None:
    shutil.rmtree(root / "mnt")
    assert not [name for name in variables(entered("env")) if "CACHE" in name]


def test_an_older_driver_gets_the_images_compatibility_libraries(entered: Entered, root: Path) -> None:
    folder = compatibility(root, "580.95.05")
    driver(root, OLD)
    process = entered("env", LD_LIBRARY_PATH="/image/lib")
    assert variables(process)["LD_LIBRARY_PATH"] == f"{folder}:/image/lib"
    assert process.stderr is not None
    assert "driver is 565, CUDA comes from" in process.stderr.read()


@pytest.mark.parametrize(("text", "version"), [
    (NEW, "580.95.05"), (NEW, "565.57.01"), (None, "580.95.05"), ("nothing that we know\n", "580.95.05")])
def test_any_other_driver_does_not(entered: Entered, root: Path, text: str | None, version: str) -> None:
    compatibility(root, version)
    if text is not None:
        driver(root, text)
    assert "LD_LIBRARY_PATH" not in variables(entered("env"))


def test_an_image_without_compatibility_libraries_is_left_alone(entered: Entered, root: Path) -> None:
    driver(root, OLD)
    assert "LD_LIBRARY_PATH" not in variables(entered("env"))
