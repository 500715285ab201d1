"""What a login node is like, and what that means for an installation there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from isambard_serve import bootstrap, deploy, host, shipped, site, wheel
from isambard_serve.deploy import Facts
from isambard_serve.errors import HostError, UsageError
from isambard_serve.host import Done
from tests.unit.helpers import pretend_site

GRACE = Facts(home="/home/me", memory=4 << 30, python="/usr/bin/python3.12", tag="3.12", full="3.12.3",
              machine="aarch64", glibc="2.38")
PINNED = """\
click==8.1.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
numpy==1.0 ; python_full_version < '3.12' \\
    --hash=sha256:cc
numpy==2.0 ; python_full_version >= '3.12' \\
    --hash=sha256:dd
cffi==1.0 ; platform_python_implementation != 'PyPy' \\
    --hash=sha256:ee
winner==1.0 ; sys_platform == 'win32' \\
    --hash=sha256:ff
"""


def test_the_script_that_looks_is_good_bash() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    script = shipped.folder("templates") / "look.sh"
    subprocess.run([shellcheck, "--norc", "--shell=bash", script], check=True)


def test_what_it_prints_here_is_understood() -> None:
    script = (shipped.folder("templates") / "look.sh").read_text()
    done = subprocess.run(["bash", "-s", "--", "/usr", "/no/such/path"], input=script, capture_output=True, text=True,
                          check=True)
    facts = deploy.parse_facts(done.stdout.partition("look begins\n")[2])
    assert facts.exists == ("/usr",)
    assert facts.memory > 0


def test_facts_are_read_line_by_line() -> None:
    facts = deploy.parse_facts("home /home/a user\nexists /lus\nversion 1-a\nversion 1-b\nmemory 42\npython /p y\n"
                               "tag 3.12\nfull 3.12.3\nmachine aarch64\nglibc 2.31\nnonsense\n")
    assert facts == Facts(home="/home/a user", memory=42, python="/p y", tag="3.12", full="3.12.3", machine="aarch64",
                          glibc="2.31", versions=("1-a", "1-b"), exists=("/lus",))


def test_the_requirements_are_those_that_hold_there_and_not_here() -> None:
    assert deploy.requirements_for(GRACE, PINNED) == (
        "click==8.1.0 --hash=sha256:aa --hash=sha256:bb\nnumpy==2.0 --hash=sha256:dd\ncffi==1.0 --hash=sha256:ee\n")


def test_all_of_the_packages_own_requirements_are_understood() -> None:
    pinned = wheel.files()[wheel.REQUIREMENTS].decode()
    names = [line.partition("==")[0] for line in deploy.requirements_for(GRACE, pinned).splitlines()]
    assert len(names) == len(set(names))
    assert {"click", "numpy", "paramiko", "submitit"} <= set(names)


def test_wheels_are_fetched_for_the_other_machine() -> None:
    options = deploy.pip_options(GRACE)
    assert "--python-version=3.12" in options
    assert "--abi=cp312" in options
    platforms = [option for option in options if option.startswith("--platform=")]
    assert platforms[0] == "--platform=manylinux2014_aarch64"
    assert platforms[-1] == "--platform=manylinux_2_38_aarch64"


def test_the_small_job_is_what_the_site_lets_run() -> None:
    isambard = site.load("isambard-ai")
    assert deploy.job(isambard) == ["srun", "--partition=workq", "--nodes=1", "--ntasks=1", "--gpus=1",
                                    "--time=00:20:00"]
    named = pretend_site(directives=site.Directives(account="brics.p", mail_user="me@example.org"))
    assert "--account=brics.p" in deploy.job(named)
    assert "me@example.org" not in " ".join(deploy.job(named))


class FakeHost:
    """A login node that answers as told, and remembers what was run."""

    name = "there"

    def __init__(self, answers: Callable[[list[str]], Done]) -> None:
        self.runs: list[list[str]] = []
        self._answers = answers

    def run(self, argv: list[str], *, stdin: bytes = b"", timeout_s: float | None = None) -> Done:
        """Remember, and answer."""
        self.runs.append(list(argv))
        return self._answers(list(argv))

    def close(self) -> None:
        """There is nothing to close."""


def facts_text(memory: int = 4 << 30, python: bool = True, more: str = "") -> bytes:
    found = "python /opt/python\ntag 3.12\nfull 3.12.3\nmachine aarch64\nglibc 2.38\n" if python else ""
    return f"Welcome\nlook begins\nhome /home/me\n{more}memory {memory}\n{found}".encode()


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeHost]:
    """Connect to a fake login node that says such facts, and whose installation ends so."""
    def make(facts: bytes, *codes: int, broken: tuple[str, ...] = ()) -> FakeHost:
        left = list(codes)

        def answer(argv: list[str]) -> Done:
            if argv[0] == "bash":
                return Done(returncode=0, stdout=facts, stderr=b"")
            if any(word.endswith("/bootstrap.py") for word in argv):
                return Done(returncode=left.pop(0), stdout=b"", stderr=b"pip says no")
            return Done(returncode=1 if argv[0] in broken else 0, stdout=b"", stderr=b"")

        fake = FakeHost(answer)
        monkeypatch.setattr(host, "connect", lambda alias, bulk=False: fake)
        return fake

    return make


def installations(fake: FakeHost) -> list[list[str]]:
    return [argv for argv in fake.runs if any(word.endswith("/bootstrap.py") for word in argv)]


def test_memory_that_is_short_makes_it_a_job_of_the_site_that_the_host_is(there: Callable[..., FakeHost]) -> None:
    fake = there(facts_text(memory=1 << 20, more="exists /lus/lfs1aip2\n"), 0)
    deploy.deploy("there", say=lambda _: None)
    assert installations(fake)[0][:2] == ["srun", "--partition=workq"]


def test_memory_that_is_short_where_no_site_is_known_is_tried_all_the_same(there: Callable[..., FakeHost]) -> None:
    fake = there(facts_text(memory=1 << 20), 0)
    deploy.deploy("there", say=lambda _: None)
    assert installations(fake)[0][0] == "/opt/python"


def test_a_job_at_no_known_site_is_refused(there: Callable[..., FakeHost]) -> None:
    there(facts_text())
    with pytest.raises(UsageError, match="none of the known sites"):
        deploy.deploy("there", say=lambda _: None, in_job=True)


def test_an_index_that_is_not_reached_makes_it_a_wheelhouse(there: Callable[..., FakeHost],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    fake = there(facts_text(), bootstrap.CANNOT_FETCH, 0)
    fetched: list[Facts] = []

    def fetch(facts: Facts, pinned: str, folder: Path) -> None:
        fetched.append(facts)
        (folder / "click.whl").write_bytes(b"wheel")

    monkeypatch.setattr(deploy, "fetch_wheels", fetch)
    said: list[str] = []
    assert deploy.deploy("there", say=said.append).new
    assert [facts.machine for facts in fetched] == ["aarch64"]
    assert [argv[-1] == "--offline" for argv in installations(fake)] == [False, True]
    assert "sending 1 wheels, 0 MB" in said
    assert fake.runs[-1][:2] == ["rm", "-rf"]


def test_an_installation_that_was_killed_names_the_memory(there: Callable[..., FakeHost]) -> None:
    there(facts_text(), deploy.KILLED)
    with pytest.raises(HostError, match=r"ended with 137: pip says no") as caught:
        deploy.deploy("there", say=lambda _: None)
    assert "--in-job" in str(caught.value.remedy)


def test_what_is_there_already_is_only_pointed_to(there: Callable[..., FakeHost]) -> None:
    version = wheel.identity(wheel.files())
    fake = there(facts_text(more=f"version {version}\n"))
    assert not deploy.deploy("there", say=lambda _: None).new
    assert fake.runs[-1] == ["ln", "-sfn", f"versions/{version}", "/home/me/.local/share/isambard-serve/current"]


def test_what_is_there_and_works_no_more_is_put_there_again(there: Callable[..., FakeHost]) -> None:
    version = wheel.identity(wheel.files())
    command = f"/home/me/.local/share/isambard-serve/versions/{version}/bin/isambard-serve"
    fake = there(facts_text(more=f"version {version}\n"), 0, broken=(command,))
    assert deploy.deploy("there", say=lambda _: None).new
    assert len(installations(fake)) == 1


def test_a_host_whose_shell_says_nothing_is_named(there: Callable[..., FakeHost]) -> None:
    there(b"Welcome\n")
    with pytest.raises(HostError, match=r"there: its login shell does not say what it is like\n.*~/\.bash_profile"):
        deploy.deploy("there", say=lambda _: None)


def test_a_host_without_a_python_is_told_what_helps(there: Callable[..., FakeHost]) -> None:
    there(facts_text(python=False))
    with pytest.raises(HostError, match=r"no Python 3\.11 or newer") as caught:
        deploy.deploy("there", say=lambda _: None)
    assert "uv" in str(caught.value.remedy)


def test_an_installation_that_cannot_be_written_says_where_and_nothing_more(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "versions").write_text("a file where a folder must be")
    monkeypatch.setattr(sys, "argv", ["bootstrap.py", str(tmp_path), "1"])
    monkeypatch.setattr(os, "umask", lambda _: 0)  # it would stay so for all tests
    assert bootstrap.main() == 1
    assert capsys.readouterr().err == f"{tmp_path}/versions: File exists\n"
    (tmp_path / "versions").unlink()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert bootstrap.main() == 1
    assert re.fullmatch(r"/bin/false -m venv \S+ ended with 1\n", capsys.readouterr().err)


def test_a_link_that_cannot_be_moved_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "current").mkdir()
    with pytest.raises(IsADirectoryError):
        bootstrap.point(tmp_path / "current", "versions/1")
    assert not list(tmp_path.glob(".current*"))


def test_a_full_home_is_named(there: Callable[..., FakeHost]) -> None:
    fake = there(facts_text(), 1)
    answers = fake._answers

    def full(argv: list[str]) -> Done:
        done = answers(argv)
        return Done(returncode=done.returncode, stdout=done.stdout,
                    stderr=b"/home/me/.local: Disk quota exceeded\n" if done.returncode else b"")

    fake._answers = full
    with pytest.raises(HostError, match=r"Disk quota exceeded\n.*make room"):
        deploy.deploy("there", say=lambda _: None)


def test_a_link_is_moved_from_one_version_to_the_next(tmp_path: Path) -> None:
    for version in ("1", "2"):
        bootstrap.point(tmp_path / "current", f"versions/{version}")
    assert str((tmp_path / "current").readlink()) == "versions/2"
    assert not list(tmp_path.glob(".current*"))
