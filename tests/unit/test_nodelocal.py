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


def test_a_removal_that_a_signal_ended_is_done_again_but_not_for_ever(plan: Plan) -> None:
    for codes, rounds in (([143, 0], 2), ([143] * 9, nodelocal.LOOKS)):
        left = [*codes]

        def runner(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float = 60,
                   left: list[int] = left) -> Completed:
            return said(returncode=left.pop(0))

        nodelocal.clear(plan, {}, runner)
        assert len(codes) - len(left) == rounds


def test_what_appears_while_a_node_is_cleared_is_cleared_too(plan: Plan, tmp_path: Path) -> None:
    late: list[subprocess.Popen[bytes]] = []
    removals = 0

    def runner(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float = 60) -> Completed:
        nonlocal removals
        removals += 1
        if not late:
            label = f"--label=isambard-serve.run={RUN_ID}"
            late.append(subprocess.Popen([sys.executable, podman_hpc(tmp_path), "run", label], stdin=subprocess.PIPE))
        return said()

    try:
        nodelocal.clear(plan, {}, runner)
        assert [each.poll() is None for each in late] == [False]
        assert removals == 2
    finally:
        for each in late:
            each.kill()
            each.communicate()


def test_a_killed_watcher_is_told_of_before_the_node_is_cleared(
        plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written_run(plan)
    told: list[str] = []

    def runner(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float = 60) -> Completed:
        told.extend(f"{event.event}: {event.reason}" for event in run.read_events())
        return said()

    clear = nodelocal.clear
    monkeypatch.setattr(nodelocal, "clear", lambda plan, env: clear(plan, env, runner))
    monkeypatch.setattr(sys, "argv", ["nodelocal", str(run.path)])
    nodelocal.main()
    assert told == ["failed: its watcher was killed"]


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
