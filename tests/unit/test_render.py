"""Scripts: what is sent for each recipe at each site, byte for byte; nothing that is put in can break out.

After a change that is meant, ``UPDATE_GOLDEN=1 pytest tests/unit/test_render.py`` writes the golden files anew.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from isambard_serve import ladder, launch, render, shipped
from isambard_serve import plan as plans
from isambard_serve import site as sites
from isambard_serve.plan import Plan, Slot
from isambard_serve.site import Container, Directives
from tests.unit.helpers import HERE, PRETEND, Stubs, loaded, pretend_site, small_plan

RECIPES = sorted(path.stem for path in shipped.folder("jobs").glob("*.yaml"))
PLACES = {
    "isambard-ai": ("serve.sbatch", "sweep.sbatch", "send.sh"),
    "isambard-ai.inside": ("serve.sbatch", "send.sh"),
    "isambard-ai.people": ("serve.sbatch", "send.sh"),
    "isambard-ai.half": ("serve.sbatch", "sweep.sbatch", "send.sh"),
    "pretend": ("serve.sbatch", "sweep.sbatch", "send.sh"),
    "sandbox": ("serve.sbatch",),
}
"""Site, and the placement where it is not the site's own → the scripts that there are."""

HALF = ("dp4", "isambard-ai.half")
"""Two of a node's four GPUs."""

PEOPLE = ("dp4", "isambard-ai.people")
"""Nothing is measured."""

PAIRS = [(name, place) for name in RECIPES for place in PLACES
         if all(place != other or name == only for only, other in (HALF, PEOPLE))
         if name != "tiny" or "isambard-ai" not in place]
SCRIPTS = [(name, place, script) for name, place in PAIRS for script in PLACES[place]]


def golden_plan(name: str, place: str) -> Plan:
    """The plan of ``name`` at a place, with nothing in it that differs from machine to machine."""
    site_name, _, placement = place.partition(".")
    site = sites.load(str(PRETEND) if site_name == "pretend" else site_name)
    site, _ = sites.resolved(site, {"HOME": "/home/user"}, from_afar=True)
    if placement == "inside":
        site = msgspec.structs.replace(site, placement="inside")
    recipe = loaded(name, *(("resources.gpus=2", "engine.args.data-parallel-size=2") if place == HALF[1] else ()))
    if recipe.model.startswith("/"):
        recipe = msgspec.structs.replace(recipe, model=f"/shared/models/{Path(recipe.model).name}")
    plan = plans.make(recipe, site, run_id=f"20261129-181258-{name}-3f2a", runs_dir="/shared/runs",
                      python="/opt/isambard-serve/bin/python", for_people=place == PEOPLE[1])
    return msgspec.structs.replace(plan, package_version="0.0.0")


@pytest.mark.parametrize(("name", "place", "script"), SCRIPTS)
def test_a_script_is_the_golden_one(name: str, place: str, script: str) -> None:
    text = launch.scripts(golden_plan(name, place))[script]
    golden = HERE / "golden" / f"{name}@{place}.{script}"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize(("name", "place"), PAIRS)
def test_a_script_says_at_its_head_whether_what_it_runs_is_simulated(name: str, place: str) -> None:
    text = launch.scripts(golden_plan(name, place))["serve.sbatch"]
    said = [line for line in text.partition("#SBATCH")[0].splitlines() if line.startswith("# SIMULATED: ")]
    assert len(said) == (place == "sandbox")
    assert ("SIMULATED" in text) is (place == "sandbox")


LADDERS = {"ladder@isambard-ai.ladder.sbatch": ("isambard-ai", ("tp4", "dp4", "dp4-humming"))}
"""The golden file of one job for several rungs → site and recipes."""


def golden_ladder(golden: str) -> str:
    """The script of one job for several rungs."""
    place, names = LADDERS[golden]
    return ladder.script([golden_plan(name, f"{place}.inside") for name in names])


@pytest.mark.parametrize("golden", LADDERS)
def test_the_script_of_a_ladder_on_one_node_is_the_golden_one(golden: str) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        (HERE / "golden" / golden).write_text(golden_ladder(golden))
    assert golden_ladder(golden) == (HERE / "golden" / golden).read_text()


@pytest.mark.parametrize("golden", LADDERS)
def test_bash_and_shellcheck_accept_the_script_of_a_ladder(golden: str, isolated: Path) -> None:
    script = isolated / "ladder.sbatch"
    script.write_text(golden_ladder(golden))
    subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run([Path(sys.executable).with_name("shellcheck"), "--norc", script], check=False,
                          capture_output=True, text=True)
    assert done.stdout + done.stderr == ""


def test_there_is_no_golden_file_too_many() -> None:
    wanted = {f"{name}@{place}.{script}" for name, place, script in SCRIPTS} | set(LADDERS)
    assert {path.name for path in (HERE / "golden").iterdir()} == wanted


@pytest.mark.parametrize(("name", "place"), PAIRS)
def test_bash_and_shellcheck_accept_every_script(name: str, place: str, isolated: Path) -> None:
    texts = launch.scripts(golden_plan(name, place))
    assert tuple(texts) == PLACES[place]
    for script, text in texts.items():
        (isolated / script).write_text(text)
    for script in texts:
        subprocess.run(["bash", "-n", script], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    # SC2154: the slots are assigned by slots.sh, which the node writes.
    argv = [str(shellcheck), "--norc", "--exclude=SC2154", *texts]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert done.stdout + done.stderr == ""


def test_rendering_touches_no_disk(tmp_path: Path) -> None:
    launch.scripts(small_plan(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


HOSTILE = [
    "it's", 'say "hi"', "$(touch x)", "`touch x`", "a; touch x", "a && touch x #", "two\nlines\ntouch x", "${HOME}",
    "\\", "a\\\nb", "'; touch x; '", "\"; touch x; \"", "!!", "*", "~", "-", "", " ", "{a,b}", "a\tb", "é – 測試",
    "<(touch x)", "> x", "EOF", "{{ plan.python }}", "{% raw %}", "%j",
]


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_is_one_word_whatever_it_holds(value: str) -> None:
    assert shlex.split(render.quoted(value)) == [value]


def test_a_slot_is_a_quoted_variable_and_what_stands_before_it_is_quoted_too() -> None:
    assert render.quoted(Slot(slot="port")) == '"${port:?}"'
    assert render.quoted(Slot(slot="numa_bind", many=True)) == '"${numa_bind[@]}"'
    assert render.quoted(Slot(slot="port", before="a b$(x):")) == "'a b$(x):'\"${port:?}\""


SLOTS = {"port": "port=4711", "membind": "membind=(numactl '--membind=0 1')", "numa_bind": "numa_bind=()"}


def python(**changes: str) -> str:
    """A stand-in that fills the slots as :data:`SLOTS` says, and records what the watcher is given."""
    return f"""\
if [ "$2" = isambard_serve.prepare ]; then
  printf '%s\\n' {shlex.join((SLOTS | changes).values())} > "$3/slots.sh"
  printf 'secret' > "$3/api.key"
else
  printf '%s\\0' "$@" > "$RECORD/argv"
  env -0 > "$RECORD/environ"
fi
"""


def hostile_plan(value: str, runs: Path, interpreter: Path) -> Plan:
    """A plan with ``value`` wherever a recipe, a site or a person may write."""
    bound = (value,) if not set(value) & set(":,") else ()  # refused: it would mount another folder
    inner = Container(runtime="apptainer", command=("vllm", value), images_dir=f"/images{value}",
                      args=("--nv", value), binds=bound)
    site = pretend_site(container=inner, set={"FROM_SITE": value}, unset=("DROPPED",), name=f"site {value}")
    over = {"model": value or "x", "image": f"image{value}", "description": value,
            "engine": {"args": {"numa-bind": True, "chat-template": value, "compilation-config": {value: [value]},
                                "middleware": [value, value]},
                       "env": {"FROM_RECIPE": value}, "extra_args": ["--more", value]},
            "bench": {"args": {"label": value}}}
    return msgspec.structs.replace(small_plan(runs, over, site), python=str(interpreter), recipe=value,
                                   package_version=value)


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_value_reaches_the_engine_as_it_is_and_runs_nothing(
        value: str, tmp_path: Path, stubs: Stubs) -> None:
    runs = tmp_path / "it's $(touch x) `touch x` \"runs\""
    plan = hostile_plan(value, runs, stubs.add("it's $(touch x) python", python()))
    here = Path(plan.run_dir)
    here.mkdir(parents=True)
    before = set(tmp_path.rglob("*"))
    environ = {"PATH": os.environ["PATH"], "RECORD": str(tmp_path), "DROPPED": "x"}
    subprocess.run(["bash"], input=render.script("serve.sbatch", plan), text=True, cwd=here, env=environ, check=True)
    argv = (tmp_path / "argv").read_text().split("\0")[:-1]
    bound = {"membind": ["numactl", "--membind=0 1"], "numa_bind": []}
    assert argv == ["-m", "isambard_serve.watch", plan.run_dir, "--", "numactl", "--membind=0 1", *plan.container_argv,
                    *plan.inside_argv, *plans.filled(plan.engine_argv, port="4711", lists=bound)]
    given = dict(entry.split("=", 1) for entry in (tmp_path / "environ").read_text().split("\0")[:-1])
    assert (given["FROM_SITE"], given["FROM_RECIPE"], given["VLLM_API_KEY"]) == (value, value, "secret")
    assert "DROPPED" not in given
    created = {path.name for path in set(tmp_path.rglob("*")) - before}
    assert created == {"argv", "environ", "slots.sh", "api.key"}


@pytest.mark.parametrize(("slot", "filled"), [("port", ""), ("port", "port="), ("membind", ""), ("numa_bind", "")])
def test_a_slot_that_was_not_filled_ends_the_script_before_the_engine_starts(
        slot: str, filled: str, tmp_path: Path, stubs: Stubs) -> None:
    stub = stubs.add("python", python(**{slot: filled}))
    plan = small_plan(tmp_path / "runs", {"engine": {"args": {"numa-bind": True}}}, python=str(stub))
    Path(plan.run_dir).mkdir(parents=True)
    environ = {"PATH": os.environ["PATH"], "RECORD": str(tmp_path)}
    done = subprocess.run(["bash"], input=render.script("serve.sbatch", plan), text=True, env=environ, check=False,
                          capture_output=True)
    assert done.returncode != 0
    assert slot in done.stderr
    assert not (tmp_path / "argv").exists()


@pytest.mark.parametrize("value", [value for value in HOSTILE if value.isprintable()])
def test_a_hostile_directive_stays_on_its_line_and_keeps_its_value(value: str, tmp_path: Path) -> None:
    directives = Directives(account=value, qos=value, reservation=value, exclude=value, mail_user=value)
    folder = tmp_path if "%" in value else tmp_path / value  # Slurm would fill in a % of the runs' own folder
    plan = small_plan(folder / "runs", site=pretend_site(directives=directives, partition=value))
    texts = launch.scripts(plan)
    given = [shlex.split(line.removeprefix("#SBATCH ")) for line in texts["serve.sbatch"].splitlines()
             if line.startswith("#SBATCH ")]
    assert given == [[f"--{name}" if text is True else f"--{name}={text}"]
                     for name, text in plan.serve_directives.items()]
    sweep = texts["sweep.sbatch"]
    for name in ("account", "qos", "reservation", "exclude", "mail-user", "partition"):
        (line,) = [line for line in sweep.splitlines() if line.startswith(f"#SBATCH --{name}=")]
        assert shlex.split(line.removeprefix("#SBATCH ")) == [f"--{name}={value}"]


def test_a_directive_stands_before_the_first_command_where_slurm_looks_for_it(tmp_path: Path) -> None:
    for name in ("serve.sbatch", "sweep.sbatch"):
        lines = launch.scripts(small_plan(tmp_path))[name].splitlines()
        first = next(at for at, line in enumerate(lines) if line and not line.startswith("#"))
        assert not [line for line in lines[first:] if line.startswith("#SBATCH")]


def test_the_sweeps_script_runs_the_planned_python_on_the_runs_folder(tmp_path: Path, stubs: Stubs) -> None:
    python = stubs.add("it's $(touch x) python", 'printf "%s\\0" "$@" > "$RECORD/argv"')
    plan = small_plan(tmp_path / "it's $(touch x) runs", python=str(python))
    environ = {"PATH": os.environ["PATH"], "RECORD": str(tmp_path)}
    text = launch.scripts(plan)["sweep.sbatch"]
    subprocess.run(["bash"], input=text, text=True, cwd=tmp_path, env=environ, check=True)
    argv = (tmp_path / "argv").read_text().split("\0")[:-1]
    assert argv == ["-u", "-m", "submitit.core._submit", f"{plan.run_dir}/submitit"]
    assert not (tmp_path / "x").exists()


def sent(plan: Plan, stubs: Stubs, sbatch: str, **environ: str) -> tuple[int, list[str], Path]:
    """Run ``send.sh`` with a stub of sbatch: its exit code, what was called, and the run's folder."""
    here = Path(plan.run_dir)
    (here / "submitit").mkdir(parents=True)
    (here / "submitit" / "sweep.pkl").touch()
    calls = stubs.folder / "calls"
    stubs.add("sbatch", f'echo "sbatch $* ${{SBATCH_GPUS-}}${{SLURM_JOB_ID-}} ${{SLURM_CONF-}}" >> {calls}\n{sbatch}')
    stubs.add("scancel", f'echo "scancel $*" >> {calls}')
    script = here / "send.sh"
    script.write_text(render.script("send.sh", plan))
    done = subprocess.run(["bash", str(script)], env={**os.environ, **environ}, check=False, capture_output=True)
    return done.returncode, [line.rstrip() for line in calls.read_text().splitlines()], here


ACCEPTS = '[ "${!#}" = serve.sbatch ] && echo "101;cluster" || echo 102'


@pytest.mark.parametrize(("load_time", "after"), [("0m", "after:101"), ("10m", "after:101+10")])
def test_sending_by_hand_sends_the_same_jobs(tmp_path: Path, stubs: Stubs, load_time: str, after: str) -> None:
    plan = small_plan(tmp_path / "some runs", {"resources": {"load_time": load_time}})
    code, calls, here = sent(plan, stubs, ACCEPTS)
    assert code == 0
    assert calls == ["sbatch --parsable serve.sbatch", f"sbatch --parsable --dependency={after} sweep.sbatch"]
    assert (here / "submitit" / "102_submitted.pkl").exists()


def test_sending_by_hand_drops_what_would_override_the_scripts_and_keeps_the_way_to_slurm(
        tmp_path: Path, stubs: Stubs) -> None:
    environ = {"SBATCH_GPUS": "9", "SLURM_JOB_ID": "8", "SLURM_CONF": "/etc/s.conf"}
    _, calls, _ = sent(small_plan(tmp_path), stubs, ACCEPTS, **environ)
    assert calls[0] == "sbatch --parsable serve.sbatch  /etc/s.conf"


def test_sending_by_hand_cancels_the_serve_job_when_the_sweep_is_refused(tmp_path: Path, stubs: Stubs) -> None:
    code, calls, _ = sent(small_plan(tmp_path), stubs, '[ "${!#}" = serve.sbatch ] && echo 101')
    assert code != 0
    assert calls[-1] == "scancel 101"
    assert len(calls) == 3


def test_sending_by_hand_cancels_the_sweep_first_when_its_last_step_fails(tmp_path: Path, stubs: Stubs) -> None:
    code, calls, _ = sent(small_plan(tmp_path), stubs, f"{ACCEPTS}; rm -f submitit/sweep.pkl")
    assert code != 0
    assert calls[2:] == ["scancel 102", "scancel 101"]


def test_a_comment_holds_no_second_line() -> None:
    plan = msgspec.structs.replace(small_plan(Path("/shared/runs")), recipe="a\nb\r\nc\x0bd\u2028e", site="s")
    text = render.script("serve.sbatch", plan)
    assert "# Recipe a b c d e, site s, written by" in text


def test_no_template_prints_a_value_past_the_quoting() -> None:
    for path in shipped.folder("templates").glob("*.j2"):
        text = path.read_text()
        assert "| safe" not in text
        assert set(re.findall(r"\|\s*(\w+)", " ".join(re.findall(r"{{(.*?)}}", text)))) <= {
            "comment", "commented", "directive", "command"}
