"""Programs: what they print is kept apart, and what was started can be ended with all that it started."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from isambard_serve import process
from isambard_serve.errors import HostError, NoProgramError
from isambard_serve.process import Completed
from tests.support.waiting import wait_until
from tests.unit.helpers import said

ENV = {"PATH": os.environ["PATH"]}


def test_a_programs_output_its_errors_and_its_exit_code_are_kept_apart() -> None:
    done = process.run(["sh", "-c", "echo out; echo err >&2; printf '\\377'; exit 3"], env=ENV)
    assert done == said("out\n\ufffd", stderr="err\n", returncode=3)


def test_a_program_sees_only_the_variables_given_and_reads_nothing() -> None:
    assert process.run([sys.executable, "-c", "import os, sys; print(len(os.environ) < 4, sys.stdin.read())"],
                       env=ENV).stdout == "True \n"


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(NoProgramError, match="no-such-program cannot be started here: No such file"):
        process.run(["no-such-program"], env=ENV)


def test_a_program_that_may_not_be_run_is_named_as_one_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "sbatch"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o600)
    with pytest.raises(NoProgramError, match="sbatch cannot be started here: Permission denied") as caught:
        process.run([str(path)], env=ENV)
    assert isinstance(caught.value, HostError)
    assert caught.value.exit_code == 3
    assert caught.value.remedy


def test_a_program_that_does_not_answer_is_given_up() -> None:
    with pytest.raises(HostError, match="sleep gave no answer within 0 s"):
        process.run(["sleep", "60"], env=ENV, timeout_s=0.05)


def test_a_started_programs_output_is_appended_to_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    child = process.start(["sh", "-c", "echo out; echo err >&2"], env=ENV, log=log)
    assert process.ended(child, 10) == 0
    assert log.read_text() == "before\nout\nerr\n"


def test_whether_a_program_has_ended_is_answered_in_time(tmp_path: Path) -> None:
    child = process.start(["sleep", "60"], env=ENV, log=tmp_path / "log")
    assert process.ended(child, 0.01) is None
    assert process.stop(child, 10) == -signal.SIGTERM


def test_stopping_a_program_ends_what_it_started_even_if_that_ignores_the_request(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "(trap '' TERM; echo $BASHPID; exec sleep 60) & wait"
    child = process.start(["bash", "-c", script], env=ENV, log=log)
    inner = int(wait_until(lambda: log.read_text().strip(), 10, "the inner process"))
    assert process.stop(child, 10) == -signal.SIGTERM
    wait_until(lambda: not psutil.pid_exists(inner) or psutil.Process(inner).status() == psutil.STATUS_ZOMBIE, 10,
               "the inner process to end", interval_s=0.01)


def test_a_program_that_ignores_the_request_is_killed_after_the_grace(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = process.start(["bash", "-c", "trap '' TERM; echo ready; while :; do sleep 60; done"], env=ENV, log=log)
    wait_until(log.read_text, 10, "the trap", interval_s=0.01)
    assert process.stop(child, 0.05) == -signal.SIGKILL


def test_programs_run_side_by_side_and_each_is_told_of(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # A pipe opens for both of its ends at once: one after another they would never end.
    done = process.together([
        (["sh", "-c", f"echo met > {pipe}; echo wrote >&2"], ENV), (["cat", str(pipe)], ENV),
        (["sh", "-c", "exit 3"], ENV)], 30)
    assert done == [Completed(returncode=0, stdout="", stderr="wrote\n"),
                    Completed(returncode=0, stdout="met\n", stderr=""), Completed(returncode=3, stdout="", stderr="")]


def test_a_program_that_hangs_is_none_and_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"trap '' TERM; sleep 60 & echo $! > {pid}; wait"
    assert process.together([(["bash", "-c", script], ENV), (["echo", "x"], ENV)], 1.0)[0] is None
    inner = int(pid.read_text())
    wait_until(lambda: not psutil.pid_exists(inner) or psutil.Process(inner).status() == psutil.STATUS_ZOMBIE, 10,
               "the inner process to end", interval_s=0.01)


def test_one_of_several_programs_that_is_not_there_is_an_error() -> None:
    with pytest.raises(NoProgramError, match="/no/such cannot be started"):
        process.together([(["/no/such"], ENV)], 5)


def test_a_started_programs_input_says_nothing_and_ends_with_whoever_started_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    # It ignores every signal that may tell it: the end of its input alone does.
    inner = "trap '' TERM HUP INT; echo up; cat; echo ended"
    code = ("import os, pathlib, time; from isambard_serve import process; child = process.start(['sh', '-c', "
            f"{inner!r}], env=os.environ, log=pathlib.Path({str(log)!r})); time.sleep(60)")
    starter = process.start([sys.executable, "-c", code], env={**ENV, "PYTHONPATH": os.pathsep.join(sys.path)},
                            log=tmp_path / "other")
    wait_until(log.exists, 10, "the program", interval_s=0.01)
    wait_until(lambda: log.read_text() == "up\n", 10, "its first word", interval_s=0.01)
    starter.kill()
    starter.wait()
    wait_until(lambda: log.read_text() == "up\nended\n", 10, "its end", interval_s=0.01)


def test_a_program_that_cannot_be_started_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        process.start(["no-such-program"], env=ENV, log=tmp_path / "log")
    child = process.start(["true"], env=ENV, log=tmp_path / "log")
    child.wait()
    del child
    assert len(os.listdir("/proc/self/fd")) == before


def test_stopping_what_has_ended_already_tells_its_exit_code(tmp_path: Path) -> None:
    child = process.start(["sh", "-c", "exit 5"], env=ENV, log=tmp_path / "log")
    child.wait()
    assert process.stop(child, 10) == 5


def test_a_bound_program_ends_with_whoever_started_it_however_that_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = ("import os, pathlib, time; from isambard_serve import process; print(process.start(['sleep', '60'], "
            f"env=os.environ, log=pathlib.Path({str(log)!r}), bound=True).pid, flush=True); time.sleep(60)")
    starter = process.start([sys.executable, "-c", code], env={**ENV, "PYTHONPATH": os.pathsep.join(sys.path)}, log=log)
    inner = psutil.Process(int(wait_until(lambda: log.read_text().strip(), 10, "the program", interval_s=0.01)))
    starter.kill()
    starter.wait()
    wait_until(lambda: not inner.is_running() or inner.status() == psutil.STATUS_ZOMBIE, 10, "its end", interval_s=0.01)
