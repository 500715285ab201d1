"""The run directory: its file names, ids, and the only ways in which its files are written and read.

Whole files appear by temporary name and rename. Files that grow have one writer each; a last line that was
torn by a crash is dropped when read.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from isambard_serve.errors import ServeError, UsageError
from isambard_serve.records import HOLDERS, EngineFacts, Event, Jobs, Row, Writer

T = TypeVar("T")

UNREADABLE = (msgspec.MsgspecError, RecursionError)
"""What msgspec raises of text that is not what it should be; the second if it is nested too deeply."""

_RUN_ID = re.compile(r"\d{8}-\d{6}-[A-Za-z0-9][A-Za-z0-9._-]*-[0-9a-f]{4}", re.ASCII)
_POINT = re.compile(r"c\d{4,}\.r\d+", re.ASCII)
_STAMP = len("20261129-181258")


FILES = {
    "recipe.lock.yaml": "the recipe, whole and resolved; itself a recipe that loads to the same",
    "plan.json": "everything known before submission: every argument, variable, directive, point and limit",
    "serve.sbatch": "the serve job's script, exactly as sent",
    "sweep.sbatch": "the sweep job's script, exactly as sent",
    "task.sbatch": "a task's script, exactly as sent; such a run has no other",
    "send.sh": "sends both by hand",
    "ceilings.json": "of `submit probe`: what the node's GPUs reach at most",
    "ladder.sbatch": "of a ladder on one node, with its first rung: the job that runs the serve scripts of all",
    "ladder.log": "what that job printed: which rung began when",
    "kernels.json": "of `submit probe` and `image check`: whether the experts' kernels compute what they should",
    "jobs.json": "what was submitted, written before and after each submission",
    "controller.log": "without Slurm: what the process that runs the rungs printed",
    "serve.log": "what the serve job printed",
    "task.log": "what a task printed",
    "submitit/": "submitit's own: the pickled sweep, its log and result",
    "events/": "what happened, one file a writer: submit, serve, sweep, inside, task, cancel",
    "claims/": "who measures: numbered claims (the highest holds) and their heartbeats",
    "node.json": "where the engine runs: node, its GPUs and their health, NUMA map, what is bound where, slots",
    "binding.json": "whether each of the engine's processes is where it belongs, looked at once it is ready",
    "slots.sh": "the slots, for the script",
    "api.key": "the key that the engine demands; never collected",
    "endpoint.json": "where the engine answers, written once it is ready",
    "outputs.json": "the engine's greedy answers to twenty fixed prompts, asked for once it was ready",
    "samples.jsonl": "the engine's metrics, once a second; of a simulated engine ten times",
    "gpus.jsonl": "the clocks, power and temperature of the engine's GPUs, as often",
    "engine/": "the engine's log, facts/: what each of its processes says of itself, from inside, and with podman the "
               "process id of its container",
    "inengine/": "what runs inside the engine: the plugin that writes the facts, the guard of its routes, and the "
                 "first program in its container",
    "intask/": "of a task: this package, for what it runs in the engine's container",
    "used.json": "what the jobs have held, by the site's accounting, once it knows that they have ended",
    "profile/": "traces of the torch profiler, of a run with --profile-at",
    "inclient/": "the load generator's program, as it ran beside the engine",
    "search/": "how the knee was searched: each scout and point, one file a claim",
    "asked.jsonl": "of a server for people: the points that `sweep` asked for",
    "sweep.json": "the knee, what the engine was short of there, and the GPU-seconds that the search took",
    "points/": "one folder a point: bench.json (the benchmark's own), row.json (our record), bench.log, client.json "
               "(how the load generator fared), counters.jsonl (the engine's, right before and right after); and "
               "warmup.log, client.log (what the load generator said between two points)",
}
"""What lies in a run directory. A file that is not there (yet) has not happened."""


def new_id(recipe: str, now: float | None = None) -> str:
    """A run id such as ``20261129-181258-dp4-humming-3f2a`` (UTC time, recipe, four random hex digits)."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return f"{stamp}-{recipe}-{secrets.token_hex(2)}"


def checked_id(run_id: str) -> str:
    """``run_id`` if it has the form of one; it becomes a folder's and a job's name. Raises UsageError otherwise."""
    if not _RUN_ID.fullmatch(run_id):
        raise UsageError(f"{run_id!r} is no run id", remedy="its form is 20261129-181258-RECIPE-3f2a")
    return run_id


def job_name(run_id: str, role: str) -> str:
    """What Slurm calls a run's job: the run id; with the role behind it if the run does not stand and fall with it."""
    return run_id if role in HOLDERS else f"{run_id}-{role}"


def point_name(concurrency: int, repeat: int) -> str:
    """The name of a point: ``c0512.r1``."""
    return f"c{concurrency:04d}.r{repeat}"


def write_whole(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Writes ``path`` so that a reader sees the old file or the new one, never a part, also after a crash."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def write_once(path: Path, content: str | bytes) -> None:
    """Writes ``path``, whole or not at all, unless it exists; of several who try, one succeeds.

    Raises:
        FileExistsError: it exists.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    write_whole(temporary, content)
    try:
        os.link(temporary, path)
    finally:
        temporary.unlink()


def append_line(path: Path, record: msgspec.Struct) -> None:
    """Appends ``record`` as one line of JSON in a single write, so that lines never mix."""
    with open(path, "ab", buffering=0) as file:
        file.write(msgspec.json.encode(record) + b"\n")


def read_record(path: Path, kind: type[T]) -> T:
    """The record in the file ``path``.

    Raises:
        FileNotFoundError: there is no such file.
        ServeError: it does not hold such a record.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except UNREADABLE as error:
        raise ServeError(f"cannot be understood: {error}", where=str(path),
                         remedy="it was damaged, or written by another version of isambard-serve") from error


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """The records in ``path`` (none when there is no such file).

    A last line without its end is still being written, or was torn. One before it that is no record was torn too
    (a full disk cuts a line short, and the next one goes on behind it): both are left out.
    """
    records: list[T] = []
    with contextlib.suppress(FileNotFoundError):
        data = path.read_bytes()
        decoder = msgspec.json.Decoder(kind)
        for line in data[: data.rfind(b"\n") + 1].splitlines():
            with contextlib.suppress(*UNREADABLE):
                records.append(decoder.decode(line))
    return records


class Outline(msgspec.Struct, frozen=True):
    """What of a plan tells how its run is doing: one that serves, or a task."""

    recipe: str
    site: str
    scheduler: Literal["slurm", "local"]
    simulated: bool
    gpus: int
    node_gpus: int
    poll_interval_s: float
    ladder: tuple[str, ...]
    placement: Literal["dependent", "inside", "none"] = "inside"
    same_node: bool = False
    points: tuple[msgspec.Raw, ...] = ()
    search: dict[str, object] | None = None
    isl: int = 0
    osl: int = 0


class RunDir:
    """One run's directory and the names of all files in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / "recipe.lock.yaml"
        self.plan = path / "plan.json"
        self.serve_script = path / "serve.sbatch"
        self.sweep_script = path / "sweep.sbatch"
        self.task_script = path / "task.sbatch"
        self.ladder_script = path / "ladder.sbatch"
        self.ladder_log = path / "ladder.log"
        self.send_script = path / "send.sh"
        self.serve_log = path / "serve.log"
        self.task_log = path / "task.log"
        self.submitit = path / "submitit"
        self.jobs = path / "jobs.json"
        self.events = path / "events"
        self.node = path / "node.json"
        self.binding = path / "binding.json"
        self.slots = path / "slots.sh"
        self.key = path / "api.key"
        self.endpoint = path / "endpoint.json"
        self.outputs = path / "outputs.json"
        self.samples = path / "samples.jsonl"
        self.gpus = path / "gpus.jsonl"
        self.engine = path / "engine"
        self.engine_log = self.engine / "engine.log"
        self.container_pid = self.engine / "container.pid"
        self.facts = self.engine / "facts"
        self.inengine = path / "inengine"
        self.ceilings = path / "ceilings.json"
        self.kernels = path / "kernels.json"
        self.intask = path / "intask"
        self.points = path / "points"
        self.client = path / "inclient" / "bench_client.py"
        self.claims = path / "claims"
        self.search = path / "search"
        self.knee = path / "sweep.json"
        self.asked = path / "asked.jsonl"
        self.used = path / "used.json"
        self.profile = path / "profile"

    @property
    def run_id(self) -> str:
        """The run's id: its directory's name."""
        return self.path.name

    def log(self, which: str) -> Path:
        """The log of the ``engine``, or what the ``serve``, ``sweep`` or ``task`` job printed."""
        if which == "sweep":
            logs = sorted(self.submitit.glob("*_0_log.out"), key=lambda path: path.stat().st_mtime)
            return logs[-1] if logs else self.submitit / "0_0_log.out"
        return {"engine": self.engine_log, "serve": self.serve_log, "task": self.task_log}[which]

    @property
    def is_task(self) -> bool:
        """Whether the run serves nothing."""
        return self.task_script.exists()

    def create(self) -> None:
        """Makes the directory (mode 0700) and its folders. Slurm makes none: a job without them dies unheard.

        Raises:
            UsageError: it exists already.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError as error:
            raise UsageError("this run exists already", where=str(self.path),
                             remedy="leave --run-id out, and each submission gets one of its own") from error
        for folder in (self.submitit, self.events, self.engine, self.points, self.claims, self.search):
            folder.mkdir(mode=0o700)

    def record(self, writer: Writer, event: str, *, reason: str | None = None, job_id: str | None = None,
               point: str | None = None) -> None:
        """Appends an event to ``events/<writer>.jsonl``."""
        append_line(self.events / f"{writer}.jsonl", Event(
            time=time.time(), writer=writer, event=event, reason=reason, job_id=job_id, point=point))

    def read_events(self, writers: Iterable[Writer] = (
            "submit", "serve", "sweep", "inside", "task", "cancel")) -> list[Event]:
        """The events of ``writers``, by time."""
        events = [event for writer in writers for event in read_lines(self.events / f"{writer}.jsonl", Event)]
        return sorted(events, key=lambda event: event.time)

    def read_jobs(self) -> Jobs:
        """What ``jobs.json`` says; nothing submitted when there is none."""
        with contextlib.suppress(FileNotFoundError):
            return read_record(self.jobs, Jobs)
        return Jobs()

    def write_jobs(self, jobs: Jobs) -> None:
        """Replaces ``jobs.json``."""
        write_whole(self.jobs, msgspec.json.format(msgspec.json.encode(jobs), indent=2))

    def job_ids(self) -> dict[str, str]:
        """The run's job ids by role: those that were noted at submission, and those that the jobs wrote themselves.

        The latter also cover a submission that was cut off, and a run that was sent by hand.
        """
        ids: dict[str, str] = {job.role: job.job_id for job in self.read_jobs().jobs if job.job_id}
        events = self.read_events(["serve", "sweep", "task"])
        written: dict[str, str] = {event.writer: event.job_id for event in events if event.job_id}
        return {role: ids.get(role) or written[role] for role in ("serve", "sweep", "task", "controller")
                if role in ids or role in written}

    def kept(self) -> list[Path]:
        """The files of the rows of all kept points."""
        return [path for path in self.points.glob("*/row.json") if _POINT.fullmatch(path.parent.name)]

    def read_rows(self) -> list[Row]:
        """The rows of all kept points, by concurrency and repeat; not of a point's copy under another name."""
        rows = []
        for path in self.kept():
            with contextlib.suppress(ServeError):  # one damaged row hides no other; points_invalid counts it
                row = read_record(path, Row)
                if path.parent.name == point_name(row.concurrency, row.repeat):
                    rows.append(row)
        return sorted(rows, key=lambda row: (row.concurrency, row.repeat))

    def read_facts(self) -> list[EngineFacts]:
        """What the engine's processes have said of themselves so far, by rank; a damaged file hides no other."""
        facts = []
        for path in sorted(self.facts.glob("*.json")):
            with contextlib.suppress(ServeError, FileNotFoundError):
                facts.append(read_record(path, EngineFacts))
        return sorted(facts, key=lambda each: (each.data_parallel_rank or 0, each.rank or 0, each.pid))


def load_of(run: RunDir) -> tuple[int, int, bool] | None:
    """What must be the same for two runs' throughputs to be set against each other: the tokens of a request, in and
    out, and whether the engine was simulated. None: its plan cannot be read.
    """
    with contextlib.suppress(FileNotFoundError, ServeError):
        plan = read_record(run.plan, Outline)
        return plan.isl, plan.osl, plan.simulated
    return None


class Runs:
    """All runs of a site: ``runs_dir``, and its index from job ids to runs (``.jobs/<site>-<job id>``)."""

    def __init__(self, folder: Path, site: str) -> None:
        self.folder = folder
        self.site = site

    def directory(self, run_id: str) -> RunDir:
        """The directory of the run ``run_id``, whether it exists or not."""
        return RunDir(self.folder / checked_id(run_id))

    def remember(self, job_id: str, run_id: str) -> None:
        """Notes in the index that ``job_id`` belongs to ``run_id``."""
        index = self.folder / ".jobs"
        index.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(index / f"{self.site}-{job_id}", run_id)

    def find(self, name: str) -> RunDir:
        """The run that ``name`` names: a run id, any job id of the run, its directory's path, or ``latest``.

        Raises:
            UsageError: there is no such run.
        """
        if name == "latest":
            path = self._latest().path
        elif "/" in name:
            path = Path(name).resolve()
        elif name.isdigit() or name.startswith("local-"):
            entry = self.folder / ".jobs" / f"{self.site}-{name}"
            if not entry.is_file():
                raise UsageError(f"no run has the job {name}", where=str(self.folder),
                                 remedy="isambard-serve status lists the runs")
            path = self.folder / entry.read_text().strip()
        else:
            path = self.folder / checked_id(name)
        if not (path / "plan.json").is_file():
            raise UsageError(f"no run {name!r}", where=str(path.parent), remedy="isambard-serve status lists the runs")
        return RunDir(path)

    def ladder(self, name: str) -> list[RunDir]:
        """All rungs of the ladder that the run ``name`` belongs to, in order; the run alone if it does not."""
        run = self.find(name)
        rungs = read_record(run.plan, Outline).ladder
        return [RunDir(run.path.parent / run_id) for run_id in rungs] or [run]

    def _latest(self) -> RunDir:
        """The newest run; of several that were submitted together the one that runs, or ran last."""
        newest = self.newest(1)
        if not newest:
            raise UsageError("there are no runs yet", where=str(self.folder), remedy="isambard-serve submit RECIPE")
        ladder: tuple[str, ...] = ()
        with contextlib.suppress(ServeError):
            ladder = read_record(newest[0].plan, Outline).ladder
        rungs = [RunDir(self.folder / run_id) for run_id in ladder] or newest
        return next((rung for rung in reversed(rungs) if rung.read_events(["serve"])), rungs[0])

    def count(self) -> int:
        """How many runs there are."""
        return len(self._names())

    def newest(self, count: int) -> list[RunDir]:
        """The ``count`` newest runs, newest first, the rungs of a ladder in their order from the last: one listing."""
        # Rungs share a second; a few more names than asked for settle which were written last.
        names = sorted(self._names(), reverse=True)[: count + 32]
        # One whose writing was cut off has no plan, and nothing to tell.
        runs = [run for run in (RunDir(self.folder / name) for name in names) if run.plan.is_file()]
        runs.sort(key=lambda run: (run.run_id[:_STAMP], run.plan.stat().st_mtime_ns), reverse=True)
        return runs[:count]

    def _names(self) -> list[str]:
        if not self.folder.is_dir():
            return []
        return [entry.name for entry in os.scandir(self.folder) if _RUN_ID.fullmatch(entry.name)]
