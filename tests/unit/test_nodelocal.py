"""What a run has on its node: its folder is made and removed, and so are its containers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from isambard_serve import nodelocal
from isambard_serve.errors import NoProgramError, ServeError
from isambard_serve.plan import Plan
from isambard_serve.process import Completed
from tests.unit.helpers import RUN_ID, said, small_plan, written_run


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return small_plan(tmp_path / "runs", local_dir=str(tmp_path / "local" / "run"), runtime="podman-hpc")


def test_the_runs_folder_is_made_for_its_owner_alone_and_removed_with_all_in_it(plan: Plan) -> None:
    nodelocal.make(plan)
    folder = Path(str(plan.local_dir))
    assert {path.name for path in folder.iterdir()} == {"tmp", "kernels"}
    assert (folder / "kernels").stat().st_mode & 0o077 == 0
    (folder / "kernels" / "x").touch()
    nodelocal.clear(plan, {}, lambda *_, **__: said())
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_is_named_with_the_key_that_names_it(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "local").touch()
    with pytest.raises(ServeError, match=r"local/run: cannot be made on this node: .*\n.*container\.local"):
        nodelocal.make(plan)


def test_a_run_without_a_container_has_nothing_on_its_node(tmp_path: Path) -> None:
    plan = small_plan(tmp_path / "runs")
    nodelocal.make(plan)
    nodelocal.clear(plan, {}, lambda *_, **__: pytest.fail("there is no container to remove"))
    assert not (tmp_path / "runs").exists()


def test_the_runs_containers_are_removed_by_their_label(plan: Plan) -> None:
    ran: list[Sequence[str]] = []

    def runner(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float = 60) -> Completed:
        ran.append((*argv, env["PATH"]))
        return said()

    nodelocal.clear(plan, {"PATH": "/bin"}, runner)
    assert ran == [("podman-hpc", "rm", "--force", "--time=0", f"--filter=label=isambard-serve.run={RUN_ID}", "/bin")]


def test_what_would_still_make_a_container_of_the_run_is_ended_first(plan: Plan, tmp_path: Path) -> None:
    """But not whoever has podman's words among their own, like the watcher, and no other run's podman."""
    podman = tmp_path / "podman"
    podman.symlink_to("/bin/sh")
    label = f"--label=isambard-serve.run={RUN_ID}"

    def started(*argv: str | Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*argv], stdin=subprocess.PIPE)

    ours = [started(podman, "-c", "read line", "podman", label),
            started(sys.executable, podman_hpc(tmp_path), "run", label)]
    others = [started("/bin/sh", "-c", "read line", "sh", "podman", label),
              started(podman, "-c", "read line", "podman", f"{label}0")]
    try:
        nodelocal.clear(plan, {}, lambda *_, **__: said())
        assert [each.poll() is None for each in (*ours, *others)] == [False, False, True, True]
    finally:
        for each in (*ours, *others):
            each.kill()
            each.communicate()


def podman_hpc(folder: Path) -> Path:
    """A script of that name that waits for the end of its input."""
    script = folder / "podman-hpc"
    script.write_text("import sys\nsys.stdin.read()\n")
    return script


def test_the_folder_goes_even_when_podman_cannot_be_asked(plan: Plan) -> None:
    def runner(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float = 60) -> Completed:
        raise NoProgramError("gone")

    nodelocal.make(plan)
    nodelocal.clear(plan, {}, runner)
    assert not Path(str(plan.local_dir)).exists()


@pytest.mark.parametrize(("text", "pid"), [("4711\n", 4711), ("", 7), (None, 7)])
def test_the_engine_is_looked_for_below_its_container_where_there_is_one(
        plan: Plan, text: str | None, pid: int) -> None:
    run = written_run(plan)
    if text is not None:
        run.container_pid.write_text(text)
    assert nodelocal.root_process(run, 7) == pid
