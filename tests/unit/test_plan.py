"""Plans: everything about a run that is known before it, worked out from recipe and site alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from isambard_serve import plan as plans
from isambard_serve import site as sites
from isambard_serve.container import Need
from isambard_serve.errors import UsageError
from isambard_serve.plan import Plan, Slot
from isambard_serve.site import Directives, Site
from tests.unit.helpers import RUN_ID, loaded, pretend_site, small_plan

RUNS = Path("/shared/runs")


def isambard() -> Site:
    """Isambard-AI as it looks from afar."""
    return sites.resolved(sites.load("isambard-ai"), {}, from_afar=True)[0]


def made(name: str, site: Site) -> Plan:
    return plans.make(loaded(name), site, run_id=RUN_ID, runs_dir=str(RUNS), python="/opt/python")


def test_the_same_input_gives_the_same_plan() -> None:
    assert msgspec.json.encode(small_plan(RUNS)) == msgspec.json.encode(small_plan(RUNS))


def test_a_plan_is_read_back_from_its_json_unchanged() -> None:
    plan = made("dp4-humming", isambard())
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_a_point_sends_twice_its_concurrency_in_prompts_with_a_seed_of_its_own() -> None:
    points = small_plan(RUNS, {"bench": {"concurrency": [512, 2048], "repeats": 2}}).points
    assert [point.name for point in points] == ["c0512.r1", "c0512.r2", "c2048.r1", "c2048.r2"]
    assert [point.prompts for point in points] == [1024, 1024, 4096, 4096]
    assert len({point.seed for point in points}) == 4


def test_a_whole_node_is_held_alone_with_all_its_cores() -> None:
    directives = made("tp4", isambard()).serve_directives
    assert directives["exclusive"] is True
    assert (directives["nodes"], directives["gpus"], directives["cpus-per-task"]) == ("1", "4", "288")


def test_a_part_of_a_node_asks_for_its_gpus_alone() -> None:
    directives = small_plan(RUNS).serve_directives
    assert (directives["nodes"], directives["gpus"]) == ("1", "1")
    assert not directives.keys() & {"exclusive", "cpus-per-task", "mem"}


def test_every_job_asks_for_gpus_and_is_never_requeued() -> None:
    plan = made("tp4", isambard())
    for directives in (plan.serve_directives, plan.sweep_directives):
        assert int(str(directives["gpus"])) >= 1
        assert directives["no-requeue"] is True
        assert directives["export"] == "HOME,USER,LOGNAME,PATH,LANG,SCRATCHDIR,PROJECTDIR"


def test_directives_that_the_site_gives_are_passed_to_both_jobs() -> None:
    plan = small_plan(RUNS)
    for directives in (plan.serve_directives, plan.sweep_directives):
        assert directives["account"] == "pretend"
        assert directives["mail-user"] == "someone@example.org"
        assert directives["partition"] == "batch"


def test_a_directive_that_nobody_gave_is_left_out() -> None:
    assert "partition" not in small_plan(RUNS, site=pretend_site(partition=None)).serve_directives
    assert "account" not in made("tp4", isambard()).sweep_directives


@pytest.mark.parametrize(("time", "clock", "minutes"), [
    ("4h", "04:00:00", 240), ("90s", "00:02:00", 2), ("1s", "00:01:00", 1), ("2-00:00:00", "48:00:00", 2880),
])
def test_a_time_limit_is_written_in_whole_minutes_rounded_up(time: str, clock: str, minutes: int) -> None:
    plan = small_plan(RUNS, {"resources": {"time": time}})
    assert plan.serve_directives["time"] == clock
    assert plan.sweep_minutes == minutes


def test_the_cost_is_the_share_of_the_node_that_each_job_holds() -> None:
    assert made("tp4", isambard()).node_hours == plans.NodeHours(inside=4.0, dependent=5.0)
    assert small_plan(RUNS).node_hours == plans.NodeHours(inside=0.25, dependent=0.25)


def test_the_sweep_is_due_when_the_engine_usually_is_ready() -> None:
    assert made("tp4", isambard()).sweep_after_min == 10
    assert small_plan(RUNS).sweep_after_min == 0


def test_more_gpus_than_a_node_has_are_refused() -> None:
    with pytest.raises(UsageError, match="needs 8 GPUs, a node of pretend has 4"):
        small_plan(RUNS, {"resources": {"gpus": 8}})


def weights(plan: Plan) -> list[Need]:
    """What ``plan`` needs for its model."""
    return [need for need in plan.needs if need.what == "the model's weights"]


def test_an_engine_that_may_not_ask_the_hub_needs_the_weights_in_its_cache() -> None:
    plan = made("tp4", isambard())
    (need,) = weights(plan)
    cache = "/scratch/PROJECT/USER.PROJECT/huggingface"
    assert need.path == f"{cache}/hub/models--deepseek-ai--DeepSeek-V4-Flash"
    assert [each.what for each in plan.needs] == ["the engine's image", "the model's weights"]


def test_what_is_said_of_missing_weights_names_the_command_that_fetches_them_and_the_revision() -> None:
    (need,) = weights(small_plan(RUNS, {"image": "/mine.sif", "engine": {"args": {"revision": "v2"}}}, isambard()))
    assert need.remedy.startswith("isambard-serve weights fetch small")
    assert need.revision == "v2"
    (need,) = weights(made("tp4", isambard()))
    assert need.revision == "main"


@pytest.mark.parametrize("variables", [
    {}, {"HF_HOME": "/cache"}, {"HF_HUB_OFFLINE": "1"}, {"HF_HOME": "/cache", "HF_HUB_OFFLINE": "0"}])
def test_weights_that_the_engine_may_fetch_or_keeps_elsewhere_are_not_needed(variables: dict[str, str]) -> None:
    assert small_plan(RUNS, site=pretend_site(set=variables)).needs == ()


def test_the_variables_that_decide_whether_weights_are_needed_are_those_of_the_engine() -> None:
    site = pretend_site(set={"HF_HOME": "/cache", "HF_HUB_OFFLINE": "1"})
    assert [need.path for need in small_plan(RUNS, site=site).needs] == ["/cache/hub/models--small-model"]
    assert small_plan(RUNS, {"engine": {"env": {"HF_HUB_OFFLINE": "0"}}}, site).needs == ()
    (need,) = small_plan(RUNS, {"engine": {"env": {"HF_HOME": "/own"}}}, site).needs
    assert need.path == "/own/hub/models--small-model"
    assert small_plan(RUNS, {"model": "/models/small"}, site).needs == ()


def test_an_overlay_must_be_there_and_goes_before_the_installed_packages() -> None:
    plan = small_plan(RUNS, {"engine": {"overlay": "/patched", "env": {"PYTHONPATH": "/mine"}}})
    assert [(need.what, need.path) for need in plan.needs] == [("the overlay of Python packages", "/patched")]
    assert f"PYTHONPATH={RUNS}/{RUN_ID}/inengine:/patched:/mine" in plan.inside_argv


def test_the_load_generators_run_in_the_engines_container() -> None:
    plan = small_plan(RUNS, {"image": "/mine.sif"}, isambard())
    for command in (plan.container_argv, plan.client_command, plan.bench_command):
        assert command[:3] == ("apptainer", "exec", "--pid")
        assert "/mine.sif" in command
    assert plan.client_command[-4:] == (
        "--interactive", "python3", f"{RUNS}/{RUN_ID}/inclient/bench_client.py", "vllm.benchmarks.serve")
    assert plan.bench_command[-4:] == (f"{RUNS}/{RUN_ID}/inengine/enter.sh", "vllm", "bench", "serve")


def test_the_engine_listens_on_loopback_at_a_port_that_the_node_finds() -> None:
    plan = small_plan(RUNS, {"engine": {"args": {"max-num-seqs": 4}, "extra_args": ["--more", "x y"]}})
    assert plans.filled(plan.engine_argv, port="4711") == [
        "/opt/engine/bin/vllm", "serve", "small-model", "--host", "127.0.0.1", "--port", "4711",
        "--middleware", "isambard_serve_inengine.guard.Guard", "--jit-monitor-verbose",
        "--max-num-seqs", "4", "--more", "x y"]


def test_a_recipe_that_asks_for_binding_leaves_it_to_the_node() -> None:
    plan = made("dp4", isambard())
    assert plan.numa_bind
    assert plan.launcher_argv == (Slot(slot="membind", many=True),)
    assert plan.engine_argv[-1] == Slot(slot="numa_bind", many=True)
    assert plan.lists == ("membind", "numa_bind")
    filled = plans.filled((*plan.launcher_argv, *plan.engine_argv), port="1",
                          lists={"membind": ["numactl", "--membind=0"], "numa_bind": []})
    assert filled[:3] == ["numactl", "--membind=0", "vllm"]
    assert not [word for word in filled if "numa-bind" in word]


@pytest.mark.parametrize(("args", "words"), [
    ({}, ()),
    ({"numa-bind": False}, ("--no-numa-bind",)),
    ({"numa-bind": True, "numa-bind-nodes": [0, 1]}, ("--numa-bind", "--numa-bind-nodes", "0", "1")),
    ({"numa-bind": True, "numa-bind-cpus": ["0-7"]}, ("--numa-bind", "--numa-bind-cpus", "0-7")),
])
def test_a_recipe_that_does_not_ask_for_binding_or_says_itself_where_gets_what_it_says(
        args: dict[str, object], words: tuple[str, ...]) -> None:
    plan = small_plan(RUNS, {"engine": {"args": args}})
    assert not plan.numa_bind
    assert (plan.launcher_argv, plan.lists, plan.engine_argv[10:]) == ((), (), words)


@pytest.mark.parametrize(("engine", "words"), [
    ({"args": {"jit-monitor-verbose": False}}, {"--no-jit-monitor-verbose"}),
    ({"args": {"jit-monitor-verbose": True}}, {"--jit-monitor-verbose"}),
    ({"version": "0.99.0"}, set()),  # whose flags are not known
])
def test_the_engine_names_what_it_compiles_if_it_can_and_the_recipe_does_not_say_otherwise(
        engine: dict[str, object], words: set[str]) -> None:
    argv = [word for word in small_plan(RUNS, {"engine": engine}).engine_argv if isinstance(word, str)]
    assert [word for word in argv if "jit-monitor" in word] == sorted(words)


def test_what_runs_inside_the_engine_gets_its_variables_in_front_of_it_alone() -> None:
    plan = small_plan(RUNS)
    assert plan.inside_argv == (
        "env", f"PYTHONPATH={RUNS}/{RUN_ID}/inengine", f"ISAMBARD_SERVE_FACTS={RUNS}/{RUN_ID}/engine/facts",
        "ISAMBARD_SERVE_SHOWN=NO_COLOR PYTHONUNBUFFERED")
    assert not {"PYTHONPATH", "ISAMBARD_SERVE_FACTS"} & set(plan.environment)


def test_a_python_path_of_the_recipe_stays_behind_the_plugin() -> None:
    plan = small_plan(RUNS, {"engine": {"env": {"PYTHONPATH": "/mine"}}})
    assert f"PYTHONPATH={RUNS}/{RUN_ID}/inengine:/mine" in plan.inside_argv
    assert plan.environment["PYTHONPATH"] == "/mine"  # and the load generator has it alone


def test_the_recipes_variables_win_over_the_sites() -> None:
    site = pretend_site(set={"A": "site", "B": "site", "NO_COLOR": "0"})
    plan = small_plan(RUNS, {"engine": {"env": {"B": "recipe"}}}, site)
    assert plan.environment == {"NO_COLOR": "0", "PYTHONUNBUFFERED": "1", "A": "site", "B": "recipe"}


def test_the_load_generators_step_overlaps_the_serve_job_and_takes_no_gpu_and_no_binding() -> None:
    assert plans.filled(small_plan(RUNS).step_argv, serve_job="101") == [
        "srun", "--jobid=101", "--overlap", "--nodes=1", "--ntasks=1", "--gpus=0", "--mem=0", "--cpus-per-task=2",
        "--cpu-bind=none", "--export=ALL"]


def test_a_slot_fills_the_rest_of_its_word() -> None:
    assert plans.filled(["a", Slot(slot="port", before="http://x:")], port="1") == ["a", "http://x:1"]


@pytest.mark.parametrize("value", ["two\nlines", "a\x00b", "tab\there", "a\rb", "\x1b[0m", "next\x85line", "\u2028"])
def test_a_directive_that_would_break_its_line_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match=r"site pretend: account: .* cannot be printed"):
        small_plan(RUNS, site=pretend_site(directives=Directives(account=value)))


def test_a_runs_folder_that_would_break_a_directives_line_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be printed"):
        small_plan(Path("/shared/two\nlines"))


@pytest.mark.parametrize("folder", ["/shared/%j", "/shared/100%", "/shared/%%"])
def test_a_runs_folder_in_which_slurm_would_fill_something_in_is_refused(folder: str) -> None:
    with pytest.raises(UsageError, match=r"runs_dir: .* cannot be where runs lie"):
        small_plan(Path(folder))
