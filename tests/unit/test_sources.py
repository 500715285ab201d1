"""Collecting from this machine or from a host: the same runs, files and words; following ends when the run does."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from isambard_serve import deploy, host, remote, sources, status
from isambard_serve.cli import main, progress
from isambard_serve.errors import ConnectionLostError, HostError
from isambard_serve.host import Host
from isambard_serve.records import Run, State
from isambard_serve.run import RunDir, Runs
from isambard_serve.sources import OverSsh, ThisMachine
from isambard_serve.ssh.stream import Done
from tests.support.hosts import LocalHost
from tests.unit.helpers import (
    PRETEND,
    RUN_ID,
    keep_row,
    ladder_plans,
    small_plan,
    some_row,
    some_run,
    submitted,
    written_run,
)

ALIAS = "login.example"


class LoginNode(LocalHost):
    """A login node with isambard-serve on it, which is this process."""

    def __init__(self, cuts: Sequence[int | None] = ()) -> None:
        super().__init__(cuts)
        self.asked: list[tuple[str, ...]] = []

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = None) -> Done:
        """Run a command of isambard-serve."""
        words = argv[-argv[::-1].index(remote.version()):]
        assert list(argv) == remote.argv(words, remote.version())
        self.asked.append(tuple(words))
        result = CliRunner().invoke(main, words)
        return Done(returncode=result.exit_code, stdout=result.stdout_bytes, stderr=result.stderr_bytes)


@pytest.fixture
def runs_dir(tmp_path: Path, user_file: Callable[[str, str], Path]) -> Path:
    """Where the login node keeps runs: at a site whose jobs are processes."""
    folder = tmp_path / "runs"
    site = PRETEND.read_text().replace("/shared/runs", str(folder)).replace("scheduler: slurm", "scheduler: local")
    user_file("sites/there.yaml", site.replace("partition: batch", ""))
    user_file("config.yaml", "site: there")
    return folder


def a_run(runs_dir: Path, *, done: bool = True) -> RunDir:
    run = written_run(small_plan(runs_dir))
    run.write_jobs(submitted())
    run.record("serve", "ready")
    run.engine_log.write_text("a log\n" * 1000)
    run.key.write_text("secret")
    keep_row(run, some_row(run_id=run.run_id))
    if done:
        run.record("serve", "done")
    return run


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> LoginNode:
    """The login node that ``--host`` leads to."""
    node = LoginNode()

    def connect(alias: str, *, bulk: bool = False) -> Host:
        assert (alias, bulk) == (ALIAS, True)
        return node

    monkeypatch.setattr(host, "connect", connect)
    return node


def does(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["collect", *words])
    assert result.exit_code == code, (result.output, result.exception)
    return result


# From a host.


def test_a_run_on_a_host_is_collected_as_one_of_this_machine_is(runs_dir: Path, there: LoginNode,
                                                              tmp_path: Path) -> None:
    run = a_run(runs_dir)
    near = json.loads(does("latest", "--json", "-o", str(tmp_path / "near")).stdout)
    result = does("latest", "--json", "-o", str(tmp_path / "far"), "--host", ALIAS)
    assert json.loads(result.stdout) == near
    assert "5 files, " in result.stderr

    def files(where: str) -> dict[str, bytes]:
        folder = tmp_path / where / run.run_id
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert files("far") == files("near")
    assert "api.key" not in files("far")
    assert there.asked == [("status", "--json", "latest", "--site", "there")]  # the site of the user's settings


def test_a_whole_ladder_is_asked_for_at_the_site_that_is_named_there(runs_dir: Path, there: LoginNode,
                                                                   isolated: Path) -> None:
    for plan in ladder_plans(runs_dir):
        run = written_run(plan)
        run.record("serve", "done")
    result = does("latest", "--ladder", "--host", ALIAS, "--site", "there", "--exclude", "plan*")
    assert there.asked == [("status", "--json", "latest", "--ladder", "--site", "there")]
    folders = sorted((isolated / "results").iterdir())
    assert [folder.name for folder in folders] == [plan.run_id for plan in ladder_plans(runs_dir)]
    assert result.stdout.count("done, ") == 3
    assert not list(isolated.rglob("plan.json"))


def test_a_lost_connection_is_made_again_and_nothing_is_counted_twice(
        runs_dir: Path, there: LoginNode, isolated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(runs_dir)
    there.__init__([300])  # type: ignore[misc]
    monkeypatch.setattr(host, "persistently", functools.partial(host.persistently, pauses_s=[0.0] * 5))
    result = does(RUN_ID, "--host", ALIAS)
    assert len(there.started) == 2  # one for each connection
    assert "5 files, " in result.stderr
    assert (isolated / "results" / RUN_ID / "engine" / "engine.log").read_bytes() == run.engine_log.read_bytes()


def test_an_error_there_is_the_same_error_here(runs_dir: Path, there: LoginNode, isolated: Path) -> None:
    result = does("nonsense", "--host", ALIAS, code=2)
    assert "error: here: 'nonsense' is no run id\n  → its form is" in result.stderr
    assert not (isolated / "results").exists()


@pytest.mark.parametrize("run_id", ["../../x", "/etc", ""])
def test_a_run_id_that_leads_elsewhere_is_refused(there: LoginNode, monkeypatch: pytest.MonkeyPatch,
                                                 isolated: Path, run_id: str) -> None:
    answer = msgspec.json.encode({"schema": "x", "runs": [some_run(run_id=run_id)], "rows": []})
    monkeypatch.setattr(LoginNode, "run", lambda *_, **__: Done(returncode=0, stdout=answer, stderr=b""))
    does("latest", "--host", ALIAS, code=2)
    assert not (isolated / "results").exists()


@pytest.mark.parametrize("stdout", [b"[]", b"{}", b'{"runs": 3}', b'{"runs": [{}]}'])
def test_an_answer_that_is_none_is_an_error_of_the_host(monkeypatch: pytest.MonkeyPatch, stdout: bytes) -> None:
    monkeypatch.setattr(LoginNode, "run", lambda *_, **__: Done(returncode=0, stdout=stdout, stderr=b""))
    with pytest.raises(HostError, match="cannot be understood"):
        OverSsh(LoginNode(), {}).find(["latest"], whole_ladder=False)


def test_this_version_is_put_there_first_if_that_is_asked_for(runs_dir: Path, there: LoginNode,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(runs_dir)
    sent: list[str] = []
    monkeypatch.setattr(deploy, "deploy", lambda alias, say: sent.append(alias))
    does("latest", "--host", ALIAS)
    assert sent == []
    does("latest", "--host", ALIAS, "--deploy")
    assert sent == [ALIAS]


def test_somebody_at_a_terminal_sees_how_far_it_is(monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    with progress.bar() as nobody:
        assert nobody is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress.bar() as bar:
        assert bar
        bar.advance(5)
        for total in (100, 200_000_000):
            bar.begin(total)
            bar.advance(total)
    shown = capsys.readouterr()
    assert "200.0/200.0 MB" in shown.err
    assert shown.out == ""


# On this machine.


def test_what_is_excluded_stays_on_this_machine_too(runs_dir: Path, isolated: Path) -> None:
    a_run(runs_dir)
    does("latest", "--exclude", "engine/*", "--exclude", "*.jsonl")
    here = isolated / "results" / RUN_ID
    assert (here / "plan.json").exists()
    assert not (here / "engine").exists()
    assert not list(here.rglob("*.jsonl"))


# Following.


class Pauses:
    """What happens in each pause, one after another; after the last one nobody may wait."""

    def __init__(self, *acts: Callable[[], object]) -> None:
        self._acts = list(acts)

    def __call__(self, _seconds: float) -> None:
        """Do what is next."""
        self._acts.pop(0)()


@pytest.mark.parametrize("far", [False, True])
def test_a_run_is_followed_until_its_own_files_say_that_it_has_ended(runs_dir: Path, isolated: Path, far: bool) -> None:
    run = a_run(runs_dir, done=False)
    node = LoginNode()
    here = isolated / "results"

    def grow() -> None:
        assert (here / "engine" / "engine.log").read_bytes() == run.engine_log.read_bytes()
        with open(run.engine_log, "a") as log:
            log.write("more\n")

    told: list[Run] = []
    pauses = Pauses(grow, grow, lambda: run.record("serve", "done"))
    with OverSsh(node, {}) as over:
        source = over if far else ThisMachine(Runs(runs_dir, "there"), None)
        found = sources.follow(source, status.read(run), here, told.append, pauses)
    assert found.state == "done"
    assert told == [found]
    assert (here / "engine" / "engine.log").read_bytes() == run.engine_log.read_bytes()
    assert node.asked == [("status", "--json", RUN_ID)] * far


def test_a_run_that_falls_silent_is_asked_for_at_the_site(runs_dir: Path, isolated: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(runs_dir, done=False)
    states: Iterator[State] = iter(["ready", "unknown"])
    monkeypatch.setattr(status, "read", lambda *_: some_run(next(states), run_id=RUN_ID, directory=str(run.path)))
    monkeypatch.setattr(sources, "QUIET_S", -1.0)
    waits: list[float] = []
    source = ThisMachine(Runs(runs_dir, "there"), None)
    found = sources.follow(source, some_run("ready", directory=str(run.path)), isolated / "x", lambda _: None,
                           waits.append)
    assert found.state == "unknown"
    assert waits == [sources.FOLLOW_S]


def test_a_run_that_has_ended_is_not_waited_for(runs_dir: Path, there: LoginNode,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(runs_dir)
    monkeypatch.setattr(sources, "FOLLOW_S", 1e6)
    result = does("latest", "--follow", "--host", ALIAS)
    assert f"{RUN_ID}: done, " in result.stderr
    assert "5 files, " in result.stderr


def test_a_connection_that_is_lost_again_and_again_is_an_error(runs_dir: Path, there: LoginNode,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(runs_dir)
    there.__init__([1] * 20)  # type: ignore[misc]
    monkeypatch.setattr(host, "persistently", functools.partial(host.persistently, pauses_s=[0.0] * 5))
    does("latest", "--host", ALIAS, code=ConnectionLostError.exit_code)
