"""A real Slurm on one machine that pretends to be four quad-GH200 nodes, nid001 to nid004.

Everything it needs lies in one folder and on ports of its own, so that several clusters, and a system-wide
Slurm, can stand side by side. It needs Debian's packages and root (for four `slurmd`, character devices, and
an ordinary user to act as). For tests there is the fixture `cluster`; by hand:

    python -m tests.cluster.pretend FOLDER

Unless accounting is asked for there is none: `sacct` answers with an error, as on a real cluster in an outage.
"""

import os
import pwd
import re
import resource
import secrets
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, TypeVar

from tests.cluster import accounting as books
from tests.cluster import slurm_conf
from tests.support import packages, processes, users
from tests.support.users import USER
from tests.support.waiting import wait_until

T = TypeVar("T")
Argv = Sequence[str | Path]
Completed = subprocess.CompletedProcess[str]

PACKAGES = ("munge", "slurm-client", "slurm-wlm-basic-plugins", "slurmctld", "slurmd")
NODES = ("nid001", "nid002", "nid003", "nid004")
DAEMONS = ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd")
NOFILE = 524_288  # the hard limit that systemd gives its services


class Job(NamedTuple):
    """One line of `squeue`."""

    job_id: str
    name: str
    state: str


@dataclass(frozen=True)
class PretendCluster:
    """A running cluster: act on it as its ordinary user (`run`, `popen`) or as root (`admin`).

    `daemons` holds munged, slurmctld and each node's slurmd (as nid001 …), with accounting also mariadbd and
    slurmdbd, for tests that break things; `outage` stops one and starts it again.
    """

    folder: Path
    user: pwd.struct_passwd
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _commands: dict[str, Argv] = field(default_factory=dict)
    _children: list[subprocess.Popen[str]] = field(default_factory=list)

    @classmethod
    @contextmanager
    def boot(
        cls, folder: Path, *, partition: str = "workq", extra_slurm_conf: str = "", accounting: bool = False,
        tiny: bool = False,
    ) -> Iterator[Self]:
        """Boot a cluster in `folder` and yield it with its nodes idle; take everything down on leaving.

        Lines of `extra_slurm_conf` replace those with the same key ("KillWait=2"), or remove them if they
        give no value ("JobSubmitPlugins="). With `accounting` there are slurmdbd and its database, and the
        user has an account. The nodes of a `tiny` one have two CPUs, as this machine has, and processes are
        really bound to them. Configuration, logs and the user's home stay in the folder afterwards. Raises
        `SystemExit(2)` where packages or root are missing, `ValueError` for a folder that will not do, and
        `RuntimeError` when a daemon dies at once.
        """
        packages.need(*PACKAGES, *(books.PACKAGES if accounting else ()))
        packages.need_root("a pretend cluster runs Slurm's daemons and acts as another user")
        folder = folder.resolve()
        _check(folder)
        cluster = cls(folder, users.ordinary_user())
        with ExitStack() as down:
            down.callback(cluster._clear)
            cluster._lay_out(partition, extra_slurm_conf, accounting, tiny)
            down.callback(processes.kill_all, cluster._leftovers)
            down.callback(cluster._stop_daemons)
            cluster._start_daemons(accounting)
            down.callback(cluster._end_jobs)
            yield cluster

    @property
    def conf(self) -> Path:
        """This cluster's slurm.conf, the value of `SLURM_CONF`."""
        return self.folder / "etc" / "slurm.conf"

    @property
    def home(self) -> Path:
        """The ordinary user's `HOME`, private to this cluster."""
        return self.folder / "home" / USER

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment in which the ordinary user's commands run."""
        return {
            "HOME": str(self.home),
            "USER": USER,
            "LOGNAME": USER,
            "SHELL": "/bin/bash",
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(self.conf),
        }

    def run(
        self,
        argv: Argv,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        input: str = "",  # noqa: A002  as subprocess.run calls it
        timeout: float = 60,
        check: bool = True,
    ) -> Completed:
        """Run a command as the ordinary user and capture its output.

        It runs in the home unless `cwd` says otherwise, with `env` laid over `environment`. The
        error of a failed check shows what the command wrote to stderr.
        """
        return _run(argv, self._as_user(env, cwd), input, timeout, check)

    def admin(self, argv: Argv, *, timeout: float = 60, check: bool = True) -> Completed:
        """Run a command as root on this cluster: `scontrol update`, another user's `scancel`."""
        return _run(argv, {"env": self._root_environment}, "", timeout, check)

    def popen(
        self,
        argv: Argv,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] = subprocess.PIPE,
        stderr: int | IO[Any] = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start a command as `run` does, in a session of its own; it ends with the cluster at the latest."""
        child: subprocess.Popen[str] = subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
            **self._as_user(env, cwd),
        )
        self._children.append(child)
        return child

    def queue(self) -> list[Job]:
        """List the jobs that have not ended, one array task a line."""
        answer = self.admin(["squeue", "--all", "--array", "--noheader", "--format=%i %T %j"]).stdout
        lines = [line.split(" ", 2) for line in answer.splitlines()]
        return [Job(job_id, name, state) for job_id, state, name in lines]

    def show(self, job_id: str) -> dict[str, str]:
        """Return what `scontrol show job` knows of a job; it forgets one 300 s after its end."""
        answer = self.admin(["scontrol", "--oneliner", "show", "job", job_id]).stdout
        pairs = re.split(r"\s+(?=[A-Z][A-Za-z:/]*=)", answer.strip())
        return {key: value for key, _, value in (pair.partition("=") for pair in pairs)}

    @contextmanager
    def outage(self, name: str) -> Iterator[None]:
        """Stop one of `daemons`, and start it again on leaving; that does not wait until it answers."""
        processes.stop(self.daemons[name])
        try:
            yield
        finally:
            self._start(name, self._commands[name])

    def cancel_all(self, timeout_s: float = 2 * slurm_conf.KILL_WAIT_S + 10) -> None:
        """Cancel every job of every user and wait until the queue is empty."""

        def queue_is_empty() -> bool:
            jobs = self.queue()
            # A pending job may wait `after:` another, whose cancelling would start it: it goes first.
            for job in sorted(jobs, key=lambda job: job.state != "PENDING"):
                if job.state != "COMPLETING":
                    self.admin(["scancel", job.job_id], check=False)
            return not jobs

        self.wait_until(queue_is_empty, timeout_s, "an empty queue")

    def wait_until(self, predicate: Callable[[], T], timeout_s: float, what: str = "the cluster") -> T:
        """Return the first true answer of `predicate`; the `TimeoutError` otherwise shows the queue."""
        try:
            return wait_until(predicate, timeout_s, what)
        except TimeoutError as error:
            error.add_note(f"in the queue: {self.queue()}")
            raise

    @property
    def _root_environment(self) -> dict[str, str]:
        root = {"HOME": "/root", "USER": "root", "LOGNAME": "root", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        return self.environment | root

    def _as_user(self, env: Mapping[str, str] | None, cwd: Path | None) -> dict[str, Any]:
        return {
            "user": self.user.pw_uid,
            "group": self.user.pw_gid,
            "extra_groups": [],
            "umask": 0o022,
            "cwd": cwd or self.home,
            "env": self.environment | dict(env or {}),
        }

    def _lay_out(self, partition: str, extra_slurm_conf: str, accounting: bool, tiny: bool) -> None:
        self._clear()
        for name in ("dev", "etc", "home", "log", "munge", "run", "spool", "state"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
            (self.folder / name).chmod(0o755)
        self.folder.chmod(0o755)
        self.home.mkdir(exist_ok=True)
        os.chown(self.home, self.user.pw_uid, self.user.pw_gid)
        for index in range(4):  # they stand for GPUs and behave as /dev/null
            os.mknod(self.folder / "dev" / f"nvidia{index}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        key = self.folder / "munge" / "key-file"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        host = socket.gethostname().partition(".")[0]
        port = _free_ports(1 + len(NODES) + accounting)
        files = slurm_conf.render(self.folder, host, port, partition, extra_slurm_conf, accounting, tiny)
        for name, text in files.items():
            (self.folder / "etc" / name).write_text(text)
        if accounting:
            (self.folder / "etc" / "slurmdbd.conf").chmod(0o600)
            books.lay_out(self._database)

    def _start_daemons(self, accounting: bool) -> None:
        munge = self.folder / "munge"
        names = ("socket", "key-file", "pid-file", "seed-file", "log-file")
        options = [f"--{name}={munge / name}" for name in names]
        self._start("munged", ["/usr/sbin/munged", "--foreground", "--force", *options])
        self._wait_for_daemons((munge / "socket").exists, "munged's socket")
        if accounting:
            self._start_accounting()
        self._start("slurmctld", ["/usr/sbin/slurmctld", "-D", "-f", self.conf])
        for node in NODES:
            self._start(node, ["/usr/sbin/slurmd", "-D", "-N", node, "-f", self.conf])
        self._wait_for_daemons(self._all_idle, "four idle nodes")

    def _start_accounting(self) -> None:
        self._start("mariadbd", books.mariadbd(self._database))
        self._wait_for_daemons(books.socket(self._database).exists, "MariaDB's socket")
        self._start("slurmdbd", books.slurmdbd(self._database))
        answers = ["sacctmgr", "--noheader", "show", "cluster"]
        self._wait_for_daemons(lambda: self.admin(answers, check=False).returncode == 0, "slurmdbd")
        for addition in books.additions(USER):  # before slurmctld, which registers with its cluster
            self.admin(addition)

    def _start(self, name: str, argv: Argv) -> None:
        with self._output(name).open("wb") as output:
            daemon = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us
                umask=0o022,
                cwd="/",
                env=self._root_environment,
            )
        self.daemons[name], self._commands[name] = daemon, argv
        with suppress(PermissionError):  # in a container the limit may be the most there is
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (NOFILE, NOFILE))

    def _wait_for_daemons(self, ready: Callable[[], bool], what: str) -> None:
        def ready_or_dead() -> bool:
            for name, daemon in self.daemons.items():
                if daemon.poll() is not None:
                    words = self._output(name).read_text(errors="replace")
                    raise RuntimeError(f"{name} ended with status {daemon.returncode}:\n{words[-2000:]}")
            return ready()

        wait_until(ready_or_dead, 60, what)

    def _all_idle(self) -> bool:
        answer = self.admin(["sinfo", "--noheader", "--Node", "--format=%N %T"], check=False).stdout
        return set(answer.splitlines()) == {f"{node} idle" for node in NODES}

    @property
    def _database(self) -> Path:
        return self.folder / "database"

    def _output(self, name: str) -> Path:
        return self.folder / "log" / f"{name}.out"

    def _end_jobs(self) -> None:
        for child in self._children:
            processes.stop(child)
        for daemon in self.daemons.values():
            daemon.send_signal(signal.SIGCONT)
        with suppress(TimeoutError, subprocess.SubprocessError):  # a broken controller: kill, then
            if self.daemons["slurmctld"].poll() is None:
                self.cancel_all()

    def _stop_daemons(self) -> None:
        for name in reversed(self.daemons):
            processes.stop(self.daemons[name])

    def _leftovers(self) -> list[processes.Process]:
        found = processes.using(self.folder)
        return [each for each in found if each.uid == self.user.pw_uid or each.name == "slurmstepd"]

    def _clear(self) -> None:
        for name in ("database", "dev", "munge", "run", "spool", "state"):
            shutil.rmtree(self.folder / name, ignore_errors=True)


def _run(argv: Argv, identity: dict[str, Any], typed: str, timeout: float, check: bool) -> Completed:
    result: Completed = subprocess.run(
        argv, input=typed, capture_output=True, text=True, timeout=timeout, check=False, **identity
    )
    if check and result.returncode != 0:
        error = subprocess.CalledProcessError(result.returncode, argv, result.stdout, result.stderr)
        error.add_note(result.stderr)
        raise error
    return result


def _check(folder: Path) -> None:
    # slurm.conf has its syntax, and a socket's path at most 108 bytes.
    if not re.fullmatch(r"[\w./+-]{1,70}", str(folder)):
        raise ValueError(f"the path of a cluster must be short and plain: {folder}")
    for parent in folder.parents:
        if parent.exists() and not parent.stat().st_mode & stat.S_IXOTH:
            raise ValueError(f"the ordinary user cannot enter {parent}")
    # What it holds will be deleted: it must be empty or left by a cluster.
    conf = folder / "etc" / "slurm.conf"
    ours = conf.exists() and conf.read_text().startswith("ClusterName=pretend\n")
    if not ours and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is neither empty nor a cluster's")
    if running := [each.pid for each in processes.using(folder) if each.name in DAEMONS]:
        raise ValueError(f"a cluster runs in {folder} already: processes {running}")


def _free_ports(count: int) -> int:
    """Return the first of `count` free ports in a row, below those that the kernel hands out itself."""
    while True:
        first = secrets.choice(range(20_000, 32_000))
        with ExitStack() as sockets, suppress(OSError):
            for port in range(first, first + count):
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def main(folder: str) -> None:
    """Boot a cluster in `folder` for use by hand, until Ctrl-C or TERM."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)
    with suppress(KeyboardInterrupt), PretendCluster.boot(Path(folder)) as cluster:
        user = f"setpriv --reuid={USER} --regid={USER} --clear-groups"
        settings = shlex.join(f"{name}={value}" for name, value in cluster.environment.items())
        sys.stdout.write(f"""\
export SLURM_CONF={cluster.conf}
# a shell as the ordinary user:
cd {cluster.home} && {user} env -i TERM=$TERM {settings} bash
# Ctrl-C takes it down
""")
        sys.stdout.flush()
        signal.pause()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.cluster.pretend FOLDER")
    main(sys.argv[1])
