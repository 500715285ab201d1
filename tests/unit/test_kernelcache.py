"""Compiled kernels: kept beside the measurement, found by the next run of the same kind, and never in the way."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isambard_serve import container, kernelcache, nodelocal
from isambard_serve.errors import HostError
from isambard_serve.plan import Plan
from isambard_serve.process import Completed
from isambard_serve.site import Site
from tests.support.waiting import wait_until
from tests.unit.helpers import pretend_site, said, small_plan, small_recipe

GPUS = [{"name": "NVIDIA GH200 120GB"}] * 4


def a_plan(tmp_path: Path, name: str = "first") -> Plan:
    """A run on a node of its own whose kernels are kept; its folder there has been made."""
    plan = small_plan(tmp_path / "runs", local_dir=str(tmp_path / name), kernels=str(tmp_path / "shared" / "0123"))
    nodelocal.make(plan)
    return plan


def kernel(plan: Plan, name: str = "vllm/a.so") -> Path:
    return Path(str(plan.local_dir)) / "kernels" / name


def compiled(plan: Plan) -> None:
    """The engine has compiled something."""
    kernel(plan).parent.mkdir()
    kernel(plan).write_text("machine code")


def restored(plan: Plan) -> str | None:
    return kernelcache.restore(plan, GPUS, os.environ)


def saved(plan: Plan, over: threading.Event | None = None) -> None:
    kernelcache.save(plan, GPUS, os.environ, Path(str(plan.local_dir)) / "log", over or threading.Event())


def test_what_one_run_has_compiled_the_next_one_finds(tmp_path: Path) -> None:
    first, second = a_plan(tmp_path), a_plan(tmp_path, "second")
    assert restored(first) is None
    compiled(first)
    saved(first)
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["0123-nvidia-gh200-120gb.tar"]
    assert restored(second) == "compiled kernels from an earlier run: 0 MB"
    assert kernel(second).read_text() == "machine code"


def test_another_model_of_gpu_has_kernels_of_its_own(tmp_path: Path) -> None:
    first, second = a_plan(tmp_path), a_plan(tmp_path, "second")
    restored(first)
    compiled(first)
    saved(first)
    assert kernelcache.restore(second, [], os.environ) is None
    assert not kernel(second).exists()


def test_nothing_new_is_not_written_again(tmp_path: Path) -> None:
    first, second = a_plan(tmp_path), a_plan(tmp_path, "second")
    restored(first)
    compiled(first)
    saved(first)
    (kept,) = (tmp_path / "shared").iterdir()
    restored(second)
    before = kept.stat()
    saved(second)
    assert kept.stat() == before
    kernel(second, "more").touch()
    saved(second)
    assert kept.stat().st_ino != before.st_ino


def with_tar(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``tar --create --file=F …`` be a bash script that finds F in $file."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "tar").write_text(f"#!/bin/bash\nfile=${{2#--file=}}\n{script}\n")
    (tools / "tar").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")


def test_a_run_that_ends_meanwhile_leaves_nothing_half_written(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, over = a_plan(tmp_path), threading.Event()
    restored(plan)
    compiled(plan)
    with_tar("echo half > $file; exec sleep 60", tmp_path, monkeypatch)
    saving = threading.Thread(target=saved, args=(plan, over))
    saving.start()
    wait_until(lambda: (tmp_path / "shared").exists() and list((tmp_path / "shared").iterdir()), 10, "half a file")
    over.set()
    saving.join(10)
    assert not saving.is_alive()
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_run_that_is_over_keeps_nothing_more(tmp_path: Path) -> None:
    plan, over = a_plan(tmp_path), threading.Event()
    restored(plan)
    compiled(plan)
    over.set()
    saved(plan, over)
    assert not (tmp_path / "shared").exists()


def test_a_failed_tar_leaves_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = a_plan(tmp_path)
    restored(plan)
    compiled(plan)
    with_tar("echo half > $file; exit 2", tmp_path, monkeypatch)
    saved(plan)
    assert list((tmp_path / "shared").iterdir()) == []


def test_what_does_not_unpack_is_said_and_left_out(tmp_path: Path) -> None:
    plan = a_plan(tmp_path)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "0123-nvidia-gh200-120gb.tar").write_text("torn")
    assert "does not unpack: tar: " in str(restored(plan))
    assert list((Path(str(plan.local_dir)) / "kernels").iterdir()) == []


def test_a_tar_that_hangs_is_given_up(tmp_path: Path) -> None:
    def runner(argv: object, *, env: object, timeout_s: float = 60) -> Completed:
        raise HostError("tar gave no answer within 300 s")

    plan = a_plan(tmp_path)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "0123-nvidia-gh200-120gb.tar").touch()
    assert "gave no answer" in str(kernelcache.restore(plan, GPUS, {}, runner))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    plan = a_plan(tmp_path)
    restored(plan)
    compiled(plan)
    (tmp_path / "shared").mkdir()
    for age in range(kernelcache.KEPT + 3):
        old = tmp_path / "shared" / f"{age}.tar"
        old.touch()
        os.utime(old, (1e9 - age, 1e9 - age))
    saved(plan)
    left = {path.name for path in (tmp_path / "shared").iterdir()}
    assert len(left) == kernelcache.KEPT
    assert {"0123-nvidia-gh200-120gb.tar", "0.tar"} <= left


def test_without_a_folder_to_keep_them_in_nothing_is_touched(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(a_plan(tmp_path), kernels=None)
    assert kernelcache.restore(plan, GPUS, {}, lambda *_, **__: said(returncode=1)) is None
    saved(plan)


def a_site(**changes: object) -> Site:
    site = pretend_site()
    settings = {"runtime": "apptainer", "kernels_dir": "/shared/kernels", **changes}
    return msgspec.structs.replace(site, container=msgspec.structs.replace(site.container, **settings))


def test_the_same_image_and_engine_share_their_kernels_and_no_others() -> None:
    one = small_recipe({"image": "a:1"})
    name = container.kernels(a_site(), one)
    assert str(name).startswith("/shared/kernels/")
    assert container.kernels(a_site(), small_recipe({"image": "a:1", "bench": {"osl": 9}, "description": "x"})) == name
    others: list[dict[str, Any]] = [
        {"image": "a:2"}, {"image": "a:1", "model": "other"}, {"image": "a:1", "engine": {"env": {"A": "1"}}},
        {"image": "a:1", "engine": {"args": {"block-size": 16}}}]
    assert len({name, *(container.kernels(a_site(), small_recipe(other)) for other in others)}) == 5
    assert container.kernels(a_site(kernels_dir=None), one) is None
    assert container.kernels(a_site(runtime="none"), one) is None
