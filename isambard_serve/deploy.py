"""Puts this very version on a login node: an environment of its own there, made by ``bootstrap``."""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from packaging.requirements import Requirement

from isambard_serve import bootstrap, host, process, shipped, wheel
from isambard_serve import site as sites
from isambard_serve.errors import HostError, ServeError, UsageError
from isambard_serve.host import Host
from isambard_serve.records import Record
from isambard_serve.site import Site

FOLDER = ".local/share/isambard-serve"
NEEDED_BYTES = 512 << 20
"""The memory that the installation wants. Its largest process took 75 MiB (``ru_maxrss``, x86-64, Python 3.11), and it
writes 170 MB, which count as the user's until they are on disk."""

INSTALL_S = 1800.0
JOB_TIME = "00:20:00"
KILLED = 137
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))

Say = Callable[[str], None]


class Facts(Record, frozen=True):
    """What a login node is like: see templates/look.sh. ``memory`` is in bytes, ``tag`` is Python's ``3.12``."""

    home: str
    memory: int
    python: str | None = None
    tag: str = ""
    full: str = ""
    machine: str = ""
    glibc: str = ""
    versions: tuple[str, ...] = ()
    exists: tuple[str, ...] = ()


class Deployed(Record, frozen=True):
    """What ``deploy`` did. ``new``: this version was not there before."""

    host: str
    version: str
    command: str
    new: bool


def parse_facts(text: str) -> Facts:
    """The lines that templates/look.sh prints."""
    pairs = [(key, value) for key, space, value in (line.partition(" ") for line in text.splitlines()) if space]
    said = dict(pairs)
    return Facts(
        home=said["home"], memory=int(said["memory"]), python=said.get("python"), tag=said.get("tag", ""),
        full=said.get("full", ""), machine=said.get("machine", ""), glibc=said.get("glibc", ""),
        versions=tuple(value for key, value in pairs if key == "version"),
        exists=tuple(value for key, value in pairs if key == "exists"),
    )


def look(there: Host) -> Facts:
    """What the login node is like.

    Raises:
        HostError: it does not say.
    """
    known = [site.detect for site in _sites() if site.detect]
    # This login shell, which is to know `module`, has its own words too, and may read what it finds on stdin.
    done = there.run(["bash", "-c", 'exec bash -lc ". /dev/fd/3" bash "$@" 3<&0 </dev/null', "bash", *known],
                     stdin=(shipped.folder("templates") / "look.sh").read_bytes(), timeout_s=300)
    try:
        return parse_facts(done.stdout.decode(errors="replace").partition("look begins\n")[2])
    except (LookupError, ValueError) as error:
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise HostError(f"its login shell does not say what it is like{said and ': '}{said}", where=there.name,
                        remedy="look at what its ~/.bashrc and ~/.bash_profile do") from error


def _sites() -> Iterable[Site]:
    for name in sites.names():
        try:
            yield sites.load(name)
        except UsageError:
            continue  # a broken file is named to whoever names it


def deploy(alias: str, *, say: Say, site: str | None = None, in_job: bool | None = None,
           wheelhouse: bool = False) -> Deployed:
    """Has this version on ``alias``, and ``current`` point to it there. Done already, it does nothing else.

    Args:
        say: told of each step.
        site: whose job is asked for; otherwise the known site that the host belongs to.
        in_job: whether to install in a small job. None: if the login node's memory is short.
        wheelhouse: whether to send all that is needed. It is sent in any case where the host reaches no index.

    Raises:
        HostError: the host cannot be reached, has no fitting Python, or the installation failed.
    """
    content = wheel.files()
    version = wheel.identity(content)
    with host.connected(alias) as there:
        facts = look(there)
        folder = f"{facts.home}/{FOLDER}"
        new = version not in facts.versions or not _works(there, f"{folder}/versions/{version}")
        if new:
            _install(there, facts, folder, version, content, say=say, wheelhouse=wheelhouse,
                     step=_step(facts, site, in_job))
        else:
            there.run(["ln", "-sfn", f"versions/{version}", f"{folder}/current"])
    return Deployed(host=alias, version=version, command=f"{folder}/current/bin/isambard-serve", new=new)


def _works(there: Host, environment: str) -> bool:
    """Whether what was installed there still starts: a cleaner of old files, or a full quota, may have been at it."""
    return there.run([f"{environment}/bin/isambard-serve", "--version"], timeout_s=INSTALL_S).returncode == 0


def _step(facts: Facts, site: str | None, in_job: bool | None) -> list[str]:
    """The words before the installation's own command: none, or those of a small job."""
    short = facts.memory < NEEDED_BYTES
    if not (short if in_job is None else in_job):
        return []
    chosen = sites.load(site) if site else next(
        (known for known in _sites() if known.detect in facts.exists and known.scheduler == "slurm"), None)
    if chosen:
        return job(chosen)
    if in_job:
        raise UsageError("the host belongs to none of the known sites", where="--in-job", remedy="name one: --site")
    return []


def job(site: Site) -> list[str]:
    """The smallest job that ``site`` lets run, as words before a command."""
    directives = msgspec.to_builtins(site.directives)
    passed = {name: value for name, value in directives.items() if not name.startswith("mail")}
    wanted = {"partition": site.partition, **passed, "nodes": "1", "ntasks": "1",
              "gpus": str(site.sweep.gpus) if site.sweep.gpus else None, "time": JOB_TIME}
    return ["srun", *(f"--{name}={value}" for name, value in wanted.items() if value)]


def _install(there: Host, facts: Facts, folder: str, version: str, content: dict[str, bytes], *, say: Say,
             wheelhouse: bool, step: Sequence[str]) -> None:
    if facts.python is None:
        raise HostError("there is no Python 3.11 or newer that can make environments", where=there.name,
                        remedy="load a module that has one in ~/.bash_profile, or install uv there")
    sent = f"{folder}/incoming/{version}.{secrets.token_hex(4)}"
    package = {wheel.NAME: wheel.build(content), "requirements.txt": content[wheel.REQUIREMENTS],
               "bootstrap.py": content["isambard_serve/bootstrap.py"]}
    command = [*step, facts.python, f"{sent}/bootstrap.py", folder, version]
    try:
        _send(there, sent, package)
        say(f"{there.name}: installing {version} with {facts.python}{' in a job' if step else ''}")
        done = None if wheelhouse else there.run(command, timeout_s=INSTALL_S)
        if done is None or done.returncode == bootstrap.CANNOT_FETCH:
            with tempfile.TemporaryDirectory() as house:
                say(f"fetching wheels for {facts.machine}, Python {facts.tag}" +
                    ("" if wheelhouse else f": {there.name} reaches no package index"))
                fetch_wheels(facts, content[wheel.REQUIREMENTS].decode(), Path(house))
                wheels = {path.name: path.read_bytes() for path in Path(house).iterdir()}
            say(f"sending {len(wheels)} wheels, {sum(map(len, wheels.values())) / 1e6:.0f} MB")
            _send(there, sent, wheels)
            done = there.run([*command, "--offline"], timeout_s=INSTALL_S)
    finally:
        there.run(["rm", "-rf", sent])
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        remedy = "the login node's memory may be short: --in-job" if done.returncode == KILLED else _make_room(said)
        raise HostError(f"the installation ended with {done.returncode}: {said[-2000:]}", where=there.name,
                        remedy=remedy)


def _send(there: Host, folder: str, files: dict[str, bytes]) -> None:
    """Writes ``files`` below ``folder`` there, in one go."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    script = 'umask 077; mkdir -p "$0" && tar -xf - -C "$0"'
    done = there.run(["sh", "-c", script, folder], stdin=archive.getvalue(), timeout_s=INSTALL_S)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise HostError(f"cannot be written: {said[-2000:]}", where=f"{there.name}:{folder}", remedy=_make_room(said))


def _make_room(said: str) -> str | None:
    return "make room in your home there" if any(word in said for word in _FULL) else None


def pip_options(facts: Facts) -> list[str]:
    """What tells pip to fetch for another machine: its Python, and the oldest to the newest C library that fits."""
    abi = f"cp{facts.tag.replace('.', '')}"
    newest = re.fullmatch(r"2\.(\d+)", facts.glibc)
    platforms = [f"manylinux2014_{facts.machine}",
                 *(f"manylinux_2_{minor}_{facts.machine}" for minor in range(17, int(newest[1]) + 1 if newest else 18))]
    return ["--implementation=cp", f"--python-version={facts.tag}", f"--abi={abi}", "--abi=abi3", "--abi=none",
            *(f"--platform={platform}" for platform in platforms)]


def requirements_for(facts: Facts, pinned: str) -> str:
    """Those of the ``pinned`` requirements that hold there. pip itself would ask the Python that it runs in."""
    machine = {"python_version": facts.tag, "python_full_version": facts.full, "platform_machine": facts.machine,
               "sys_platform": "linux", "platform_system": "Linux", "os_name": "posix",
               "platform_python_implementation": "CPython", "implementation_name": "cpython"}
    kept = []
    for line in re.sub(r"\\\n\s*", "", pinned).splitlines():
        text, _, hashes = line.partition(" --hash=")
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(machine):
            kept.append(f"{requirement.name}{requirement.specifier} --hash={hashes}")
    return "\n".join(kept) + "\n"


def fetch_wheels(facts: Facts, pinned: str, folder: Path) -> None:
    """Has pip fetch what the login node needs into ``folder``, from the index that this machine uses.

    Raises:
        ServeError: pip is missing or could not.
    """
    with tempfile.TemporaryDirectory() as here:
        wanted = Path(here) / "requirements.txt"
        wanted.write_text(requirements_for(facts, pinned))
        done = process.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input",
             "--no-deps", "--require-hashes", "--only-binary=:all:", *pip_options(facts), "-r", str(wanted),
             "-d", str(folder)], env=os.environ, timeout_s=INSTALL_S)
    if done.returncode != 0:
        raise ServeError(f"pip could not fetch what {facts.machine} needs: {done.stderr.strip()[-2000:]}",
                         remedy="it is run as `python -m pip` here, with your own configuration")
