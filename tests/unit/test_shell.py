"""A person's shell: the exact commands, what they get to know, and that no key is in any of them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from isambard_serve import plan as plans
from isambard_serve import process, shell
from isambard_serve import site as sites
from isambard_serve.cli import main, options
from isambard_serve.errors import HostError, NoProgramError
from isambard_serve.prepare import node_facts
from isambard_serve.run import RunDir, Runs, write_whole
from isambard_serve.site import Container, Directives, Site
from isambard_serve.slurm import Slurm
from tests.unit.helpers import (
    PRETEND,
    RUN_ID,
    SMALL,
    FakeSlurm,
    pretend_site,
    ready,
    said,
    small_plan,
    small_recipe,
    submitted,
    written_run,
)

KEY = "secret-key"
ENVIRON = {"PATH": "/bin", "TERM": "xterm", "SLURM_JOB_ID": "9", "SBATCH_GPUS": "2", "TMPDIR": "/local/1"}
STEP = ["srun", "--jobid=101", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--cpus-per-task=2",
        "--cpu-bind=none", "--export=ALL"]


def served(tmp_path: Path, site: Site, over: Mapping[str, Any] | None = None) -> RunDir:
    """A run whose engine is ready."""
    run = written_run(small_plan(tmp_path / "runs", over, site))
    write_whole(run.jobs, msgspec.json.encode(submitted()))
    write_whole(run.key, KEY)
    ready(run)
    return run


def attached(run: RunDir, site: Site, *command: str, over: Mapping[str, Any] | None = None, terminal: bool = False
             ) -> tuple[list[str], dict[str, str]]:
    return shell.attach(run, site, small_recipe(over), "101", command, ENVIRON, terminal=terminal)


def test_a_shell_beside_an_engine_is_an_overlapping_step_with_the_terminal(tmp_path: Path) -> None:
    site = pretend_site(unset=("TMPDIR",))
    run = served(tmp_path, site, {"engine": {"env": {"VLLM_X": "1"}}})
    argv, env = attached(run, site, terminal=True)
    assert argv == [*STEP, "--pty", "bash"]
    assert env == {"PATH": "/bin", "TERM": "xterm", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1", "VLLM_X": "1",
                   "OPENAI_BASE_URL": "http://127.0.0.1:4711/v1", "OPENAI_API_KEY": KEY, "VLLM_API_KEY": KEY}


def test_a_command_beside_an_engine_needs_no_terminal(tmp_path: Path) -> None:
    site = pretend_site()
    assert attached(served(tmp_path, site), site, "hostname", "-f")[0] == [*STEP, "hostname", "-f"]


@pytest.mark.parametrize(("runtime", "terminal", "first"), [
    ("apptainer", True, ["apptainer", "exec", "--pid", "--nv"]),
    ("podman-hpc", True, ["podman-hpc", "run", "--rm", "--init", "--interactive", "--tty"]),
    ("podman-hpc", False, ["podman-hpc", "run", "--rm", "--init", "--interactive",
                           f"--label=isambard-serve.run={RUN_ID}"]),
])
def test_it_is_in_the_recipes_container_and_reads_what_is_typed(
        tmp_path: Path, runtime: Any, terminal: bool, first: list[str]) -> None:
    site = pretend_site(container=Container(runtime=runtime, images_dir="/images", args=("--nv",)))
    over = {"image": "vllm/vllm-openai:v1", "engine": {"overlay": "/shared/patched"}}
    argv, _ = attached(served(tmp_path, site, over), site, over=over, terminal=terminal)
    inside = argv[len(STEP) + terminal:]
    assert inside[:len(first)] == first
    run_dir = tmp_path / "runs" / RUN_ID
    words = shlex.join(inside)
    assert f"{run_dir}/inengine/enter.sh" in words
    assert words.endswith("--interactive env PYTHONPATH=/shared/patched bash")
    assert ("--env=OPENAI_BASE_URL" in inside) == (runtime == "podman-hpc")
    assert KEY not in words


def test_it_keeps_the_memory_beside_the_cores_as_the_engine_does(tmp_path: Path) -> None:
    site = pretend_site()
    run = served(tmp_path, site)
    facts = node_facts(small_plan(tmp_path))
    bound = {**facts.slots, "membind": ["numactl", "--membind=0-3"]}
    write_whole(run.node, msgspec.json.encode(msgspec.structs.replace(facts, slots=bound)))
    assert attached(run, site, "hostname")[0] == [*STEP, "numactl", "--membind=0-3", "hostname"]


def test_beside_an_engine_that_is_not_ready_there_is_no_key_yet(tmp_path: Path) -> None:
    run = written_run(small_plan(tmp_path / "runs"))
    assert not {"OPENAI_API_KEY", "VLLM_API_KEY"} & attached(run, pretend_site())[1].keys()


def test_an_interactive_job_asks_for_what_the_site_says_and_holds_what_the_recipe_needs() -> None:
    site = pretend_site(directives=Directives(account="a", mail_user="x@y.z"))
    assert shell.asked(site, 1, 3600) == [["--account=a", "--nodes=1", "--gpus=1", "--time=01:00:00",
                                           "--partition=batch"]]
    isambard = sites.resolved(sites.load("isambard-ai"), {}, from_afar=True)[0]
    ways = shell.asked(isambard, 4, 1800)
    assert ways[0] == ["--nodes=1", "--gpus=4", "--cpus-per-task=288", "--exclusive", "--time=00:30:00",
                       "--partition=interactive", "--reservation=interactive"]
    assert [way[5:] for way in ways] == [["--partition=interactive", "--reservation=interactive"],
                                         ["--reservation=interactive"], ["--partition=workq"]]


def test_the_first_way_that_slurm_accepts_is_taken() -> None:
    def sbatch(argv: tuple[str, ...]) -> object:
        return said() if argv[2] == "--b" else said(stderr=f"no {argv[2]}", returncode=1)

    fake = FakeSlurm(sbatch=sbatch)
    assert shell.accepted([["--a"], ["--b"], ["--c"]], Slurm({}, fake)) == ["--b"]
    assert fake.calls == [("sbatch", "--test-only", way, "--wrap=true") for way in ("--a", "--b")]
    with pytest.raises(HostError, match="no --c"):
        shell.accepted([["--a"], ["--c"]], Slurm({}, fake))


def test_a_node_of_ones_own_is_asked_for_with_all_its_cores_unbound() -> None:
    argv, env = shell.open_on_node(pretend_site(), ["--gpus=1"], ["bash"], ENVIRON, terminal=True)
    assert argv == ["srun", "--gpus=1", "--ntasks=1", "--cpu-bind=none", "--export=ALL", "--pty", "bash"]
    assert env == {"PATH": "/bin", "TERM": "xterm", "TMPDIR": "/local/1"}


def test_the_commands_are_told_ready_to_be_typed(tmp_path: Path) -> None:
    plan = small_plan(tmp_path, {"engine": {"args": {"numa-bind": True, "compilation-config": {"a": 1}}}})
    slots: dict[str, str | list[str]] = {"port": "4711", "membind": [], "numa_bind": ["--numa-bind"]}
    _, _, engine, _, load = shell.introduction(plan, slots, "nid001").splitlines()
    words = shlex.split(engine)
    assert words == plans.filled(plan.engine_argv, lists={"numa_bind": ["--numa-bind"]}, port="4711")
    assert shlex.split(load)[:3] == ["/opt/engine/bin/vllm", "bench", "serve"]
    assert "--max-concurrency 1" in load


class Machine:
    """Somebody at a machine without Slurm. ``given`` keeps what was started, and does not start it."""

    def __init__(self, runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs_dir = runs_dir
        self.given: list[tuple[Sequence[str], Mapping[str, str]]] = []
        monkeypatch.setattr(process, "attended", self._attended)

    def _attended(self, argv: Sequence[str], *, env: Mapping[str, str]) -> int:
        self.given.append((argv, env))
        self.files = sorted(path.name for path in self.runs_dir.glob(".shells/*/*"))
        return 3

    def __call__(self, *words: str, code: int) -> Result:
        """Run the command ``words``, which must end with ``code``."""
        result = CliRunner().invoke(main, words)
        assert result.exit_code == code, (result.output, result.exception)
        return result


@pytest.fixture
def machine(tmp_path: Path, user_file: Any, monkeypatch: pytest.MonkeyPatch) -> Machine:
    runs_dir = tmp_path / "runs"
    user_file("sites/here.yaml", PRETEND.read_text().replace("/shared/runs", str(runs_dir)))
    user_file("config.yaml", "site: here")
    user_file("jobs/small.yaml", SMALL)
    monkeypatch.setattr(options, "open_slurm", lambda _: Slurm({}, FakeSlurm()))
    return Machine(runs_dir, monkeypatch)


def test_shell_asks_for_a_node_and_leaves_nothing_behind(machine: Machine) -> None:
    result = machine("shell", "small", "--", "nvidia-smi", "-L", code=3)
    ((argv, _),) = machine.given
    assert result.stderr.startswith("asking for a node: srun --account=pretend ")
    assert argv[0] == "srun"
    inner = list(argv)[list(argv).index(sys.executable):]
    assert inner[1:3] == ["-m", "isambard_serve.shell"]
    assert (inner[4:6], inner[-2:]) == (["--", "env"], ["nvidia-smi", "-L"])
    assert machine.files == ["inengine", "plan.json"]
    assert not list(machine.runs_dir.glob(".shells/*"))
    machine("shell", code=3)
    assert machine.given[1][0][-1] == "bash"


def test_attach_goes_to_the_runs_own_job_and_only_while_it_has_one(machine: Machine) -> None:
    assert CliRunner().invoke(main, ["submit", "small"]).exit_code == 0
    (run,) = Runs(machine.runs_dir, "here").newest(1)
    assert "no engine of it runs: it is submitted" in machine("attach", "101", code=4).stderr
    write_whole(run.key, KEY)
    ready(run)
    machine("attach", run.run_id, "--", "hostname", code=3)
    argv, env = machine.given[0]
    assert (argv[1], argv[-1], env["OPENAI_API_KEY"]) == ("--jobid=101", "hostname", KEY)
    assert not [word for word in argv if KEY in word]


def test_on_the_node_a_command_is_run_as_the_engine_would_be(
        tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan(tmp_path / "runs", {"engine": {"env": {"VLLM_X": "1"}}}, pretend_site(unset=("TMPDIR",)))
    script = 'echo "$VLLM_X|$OPENAI_BASE_URL|${#VLLM_API_KEY}|${SLURM_JOB_ID-}|${TMPDIR-}"; exit 5'
    monkeypatch.setattr("sys.argv", ["shell", plan.run_dir, "--", "sh", "-c", script])
    monkeypatch.setenv("TMPDIR", "/local/1")
    with shell.written(plan), pytest.raises(SystemExit) as ended:
        shell.main()
    assert ended.value.code == 5
    said_by_it = capfd.readouterr().out.splitlines()
    assert said_by_it[0].startswith("On ")
    assert said_by_it[-1].startswith("1|http://127.0.0.1:")
    assert said_by_it[-1].endswith("/v1|43||")


def test_an_attended_program_has_the_terminal_and_ctrl_c_for_itself() -> None:
    ours = "import os, signal; os.kill(os.getppid(), signal.SIGINT); print(signal.getsignal(signal.SIGINT).__name__)"
    code = ("import sys; from isambard_serve import process\n"
            f"sys.exit(process.attended([sys.executable, '-c', {ours!r}], env={{}}))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          cwd=PRETEND.parents[3], env=os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "default_int_handler\n", "")
    assert process.attended(["sh", "-c", "kill -9 $$"], env={"PATH": os.environ["PATH"]}) == 128 + signal.SIGKILL
    with pytest.raises(NoProgramError):
        process.attended(["no-such-program"], env={})
