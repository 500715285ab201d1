"""Recipes: the shipped ones are the article's steps flag for flag, and a mistake is an error that names its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isambard_serve import bench, flags, recipe, shipped, yamlfile
from isambard_serve.errors import UsageError
from isambard_serve.recipe import Recipe
from tests.unit.helpers import SMALL, loaded, small_plan

Write = Callable[[str, str], Path]

NAMES = sorted(path.stem for path in shipped.folder("jobs").glob("*.yaml"))

TP4 = """
--trust-remote-code --tensor-parallel-size 4 --enable-expert-parallel --moe-backend marlin --kv-cache-dtype fp8
--block-size 256 --gpu-memory-utilization 0.92 --max-model-len 128000 --max-num-batched-tokens 8192
--max-num-seqs 2048 --tokenizer-mode deepseek_v4 --tool-call-parser deepseek_v4 --enable-auto-tool-choice
--reasoning-parser deepseek_v4 --numa-bind
"""
DP4 = """
--trust-remote-code --tensor-parallel-size 1 --enable-expert-parallel --moe-backend marlin --kv-cache-dtype fp8
--block-size 256 --gpu-memory-utilization 0.95 --max-model-len 128000 --max-num-batched-tokens 8192
--max-num-seqs 1024 --tokenizer-mode deepseek_v4 --tool-call-parser deepseek_v4 --enable-auto-tool-choice
--reasoning-parser deepseek_v4 --numa-bind --data-parallel-size 4
--compilation-config {"max_cudagraph_capture_size":1024}
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_loads_without_a_warning(name: str) -> None:
    assert loaded(name).name == name


@pytest.mark.parametrize(("name", "words", "env"), [
    ("tp4", TP4, {}),
    ("dp4", DP4, {}),
    ("dp4-humming", DP4.replace("marlin", "humming"), {
        "VLLM_HUMMING_MOE_GEMM_TYPE": "indexed",
        "VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype":"float8e4m3","input_scale_group_size":128}',
    }),
])
def test_a_rung_of_the_ladder_has_the_articles_flags_and_variables_and_no_others(
        name: str, words: str, env: dict[str, str]) -> None:
    rung = loaded(name)
    assert flags.argv(rung.engine.args) == words.split()
    assert rung.engine.env == env
    assert rung.engine.extra_args == ()
    assert (rung.model, rung.image) == ("deepseek-ai/DeepSeek-V4-Flash", "vllm-0.33")
    assert (rung.bench.isl, rung.bench.osl, rung.bench.prompts_per_concurrency) == (1024, 1024, 2)
    assert rung.resources.gpus == 4


@pytest.mark.parametrize("name", ["tp4", "dp4", "dp4-humming"])
def test_a_rung_is_measured_where_it_saturates(name: str) -> None:
    assert loaded(name).bench.concurrency == "saturate"


def test_a_recipe_is_looked_for_in_jobs_here_then_in_the_users_folder_then_among_the_shipped(
        write: Write, user_file: Write) -> None:
    assert recipe.locate("tp4") == shipped.folder("jobs") / "tp4.yaml"
    users = user_file("jobs/tp4.yaml", SMALL)
    assert recipe.locate("tp4") == users
    own = write("here/jobs/tp4.yaml", SMALL)
    assert recipe.locate("tp4") == own
    assert recipe.locate("./jobs/tp4.yaml") == own


def test_the_users_folder_follows_xdg_config_home(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("elsewhere/isambard-serve/jobs/mine.yaml", SMALL)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(path.parents[2]))
    assert recipe.locate("mine") == path
    monkeypatch.delenv("XDG_CONFIG_HOME")
    path = write("home/.config/isambard-serve/jobs/mine.yaml", SMALL)
    assert recipe.locate("mine") == path


def test_all_names_that_can_be_run_are_listed_once(write: Write, user_file: Write) -> None:
    write("here/jobs/tp4.yaml", SMALL)
    user_file("jobs/mine.yaml", SMALL)
    assert recipe.names() == sorted([*NAMES, "mine"])


def test_a_path_may_start_at_the_home_folder(write: Write) -> None:
    path = write("home/mine.yaml", SMALL)
    assert recipe.locate("~/mine.yaml") == path


def test_an_unknown_name_is_answered_with_the_nearest_known_one() -> None:
    with pytest.raises(UsageError) as caught:
        recipe.locate("dp4-huming")
    assert caught.value.remedy == "did you mean 'dp4-humming'?"
    with pytest.raises(UsageError, match="known recipes: dp4, dp4-humming"):
        recipe.locate("qqqqqq")


def test_a_path_without_a_recipe_is_named() -> None:
    with pytest.raises(UsageError, match=r"nowhere/x\.yaml: no such recipe file"):
        recipe.locate("nowhere/x.yaml")


def test_a_recipe_extends_one_beside_it_or_a_shipped_one(write: Write) -> None:
    write("own/parent.yaml", SMALL)
    child = write("own/child.yaml", "extends: parent\nbench: {concurrency: [7]}")
    assert loaded(str(child)).bench.concurrency == (7,)
    rung = loaded(str(write("own/rung.yaml", "extends: tp4\nengine: {args: {numa-bind: null}}")))
    assert "numa-bind" not in rung.engine.args
    assert rung.engine.args["block-size"] == 256


def test_what_is_inherited_keeps_its_model_path_and_not_its_name(write: Write) -> None:
    write("theirs/parent.yaml", SMALL.replace("small-model", "./weights") + "name: parents-name\n")
    child = loaded(str(write("ours/child.yaml", "extends: ../theirs/parent.yaml")))
    assert child.model == str(write("theirs/weights/config.json", "{}").parent)
    assert child.name == "child"


def test_a_model_path_is_meant_from_where_it_is_written(write: Write, isolated: Path) -> None:
    path = write("own/mine.yaml", SMALL.replace("small-model", "./weights"))
    assert loaded(str(path)).model == str(path.parent / "weights")
    assert loaded(str(path), "model=../other").model == str(isolated.parent / "other")
    assert loaded(str(path), "model=/abs/x").model == "/abs/x"
    assert loaded(str(path), "model=org/name").model == "org/name"


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_is_a_recipe_that_loads_to_the_same(write: Write, name: str) -> None:
    first = loaded(name, "resources.time='4:00:00'", "engine.env.WORD='no'", "engine.extra_args=['--x', 'a b']")
    again = loaded(str(write("recipe.lock.yaml", recipe.locked(first))))
    assert again == first


@pytest.mark.parametrize(("text", "seconds"), [
    ("90s", 90), ("45m", 2700), ("4h", 14400), ("1h30m", 5400), ("1h0m1s", 3601), ("4:00:00", 14400),
    ("1-00:00:00", 86400), ("0m", 0), ("36:00:00", 129600),
])
def test_a_length_of_time_may_be_written_in_words_or_as_slurm_does(text: str, seconds: int) -> None:
    assert recipe.seconds(text, "x") == seconds


@pytest.mark.parametrize("text", ["", "4", "4 h", "h", "4:00", "-1h", "1.5h", "1m1h", "1d", "4h x", "∞"])
def test_any_other_length_of_time_is_refused_with_how_to_write_it(text: str) -> None:
    with pytest.raises(UsageError, match=r'place: .* is not a length of time\n.*write "4h"'):
        recipe.seconds(text, "place")


@pytest.mark.parametrize(("change", "where", "message"), [
    ("engine.args.max-num-seq=5", "engine.args.max-num-seq", "did you mean 'max-num-seqs'?"),
    ("engine.args.max_num_seqs=5", "engine.args.max_num_seqs", "did you mean 'max-num-seqs'?"),
    ("engine.args.load-format=false", "engine.args.load-format", "no flag --no-load-format"),
    ("engine.args.zzzzqqqq=1", "engine.args.zzzzqqqq", "engine.extra_args"),
    ("engine.args.port=1", "engine.args.port", "set by isambard-serve itself"),
    ("engine.args.api-key=x", "engine.args.api-key", "take it out"),
    ("engine.args.tensor-parallel-size=2", "resources.gpus", "needs 2 GPUs, it asks for 1"),
    ("engine.args={tensor-parallel-size: 2, data-parallel-size: 2, pipeline-parallel-size: 2}", "resources.gpus",
     "set resources.gpus=8"),
    ("engine.env.'A-B'='1'", "engine.env", "no name for a variable"),
    ("engine.env={'A=$(touch x)': '1'}", "engine.env", "no name for a variable"),
    ("engine.env={\"A\\n\": '1'}", "engine.env", "no name for a variable"),
    ("bench.concurrency=[4, 8, 4]", "bench.concurrency", "bench.repeats"),
    ("bench.concurrency=[]", "bench.concurrency", "length >= 1"),
    ("bench.concurrency=[0]", "bench.concurrency[0]", ">= 1"),
    ("bench.point_limit=soon", "bench.point_limit", "is not a length of time"),
    ("bench.point_limit=0s", "bench.point_limit", "longer than 0 s"),
    ("bench.sweep_limit=0m", "bench.sweep_limit", "longer than 0 s"),
    ("resources.idle_timeout=0s", "resources.idle_timeout", "longer than 0 s"),
    ("resources.time=99999999999999999999h", "resources.time", "is not a length of time"),
    ("bench.concurrency=[99999999999999]", "bench.concurrency[0]", "<= 1000000"),
    ("bench.args.max-concurrenc=5", "bench.args.max-concurrenc", "--max-concurrency is set by isambard-serve itself"),
    ("engine.args.data-parallel-size=0", "engine.args.data-parallel-size", "a whole number from 1 to 1,024, not 0"),
    ("engine.args.data-parallel-size='4'", "engine.args.data-parallel-size", "not '4'"),
    ("engine.args.tensor-parallel-size=-4", "engine.args.tensor-parallel-size", "not -4"),
    ("engine.args.max-num-seqs=true", "engine.args.max-num-seqs", "not True"),
    ("engine.args.max-num-batched-tokens=0", "engine.args.max-num-batched-tokens", "not 0"),
    ("engine.args.block-size=0", "engine.args.block-size", "not 0"),
    ("model=''", "model", "no name or path of a model"),
    ("model=--help", "model", "no name or path of a model"),
    ("resources.time='180s'", "resources.time", "longer than 180 s"),
    ("resources.idle_timeout=never", "resources.idle_timeout", "is not a length of time"),
    ("resources.gpus=0", "resources.gpus", ">= 1"),
    ("resources.gpu=1", "resources", "did you mean 'gpus'?"),
    ("bench.args.max-concurrency=5", "bench.args.max-concurrency", "--max-concurrency is set by isambard-serve itself"),
    ("bench.args.ignore-eos=false", "bench.args.ignore-eos", "use the keys of bench instead"),
    ("engine.args.max-model-len=11", "bench", "isl + osl is 12 tokens, the engine takes 11 (max-model-len)"),
    ("name='../x'", "name", "cannot name a job"),
    ('name="x\\n"', "name", "cannot name a job"),
    ("name=''", "name", "cannot name a job"),
])
def test_a_mistake_in_a_recipe_is_an_error_with_its_key_path(
        write: Write, change: str, where: str, message: str) -> None:
    path = write("mine.yaml", SMALL)
    with pytest.raises(UsageError) as caught:
        recipe.load(str(path), (change,))
    assert caught.value.where == f"{path} with --set {change}: {where}"
    assert message in str(caught.value)


@pytest.mark.parametrize(("text", "where"), [
    (SMALL.replace("isl: 8", "isl: x"), "bench.isl"),
    (SMALL.replace("min_window: 1s", "min_window: soon"), "bench.min_window"),
    (SMALL.replace("min_window: 1s", "args: {seed: 1}"), "bench.args.seed"),
])
def test_a_mistake_names_the_assignments_only_if_there_are_any_and_then_all(
        write: Write, text: str, where: str) -> None:
    path = write("mine.yaml", text)
    with pytest.raises(UsageError) as caught:
        recipe.load(str(path))
    assert caught.value.where == f"{path}: {where}"
    with pytest.raises(UsageError) as caught:
        recipe.load(str(path), ("resources.gpus=2", "bench.osl=5"))
    assert caught.value.where == f"{path} with --set resources.gpus=2 bench.osl=5: {where}"


@pytest.mark.parametrize("name", sorted(flags.BENCH_OWNED))
def test_a_flag_of_the_benchmark_that_says_what_a_row_means_is_refused(write: Write, name: str) -> None:
    path = write("mine.yaml", SMALL)
    for value in ("1", "false", "x"):
        with pytest.raises(UsageError, match=f": bench.args.{name}: --{name} is set by isambard-serve itself"):
            recipe.load(str(path), (f"bench.args.{name}={value}",))


def test_every_flag_that_the_benchmark_is_given_anyway_is_one_that_a_recipe_may_not_give(tmp_path: Path) -> None:
    plan = small_plan(tmp_path)
    argv = bench.words(plan, plan.points[0], url="http://x:1", folder=tmp_path)
    assert {word.removeprefix("--") for word in argv if word.startswith("--")} <= flags.BENCH_OWNED


def test_other_flags_of_the_benchmark_are_passed_on(write: Write) -> None:
    path = write("mine.yaml", SMALL)
    assert loaded(str(path), "bench.args={burstiness: 2, label: x}").bench.args == {"burstiness": 2, "label": "x"}


@pytest.mark.parametrize("length", ["12", "13", "auto", "128k", "true"])
def test_requests_that_fit_and_a_length_that_only_the_engine_can_tell_are_no_mistake(
        write: Write, length: str) -> None:
    path = write("mine.yaml", SMALL)
    assert "max-model-len" in loaded(str(path), f"engine.args.max-model-len={length}").engine.args


def test_extra_args_are_passed_unchecked(write: Write) -> None:
    path = write("mine.yaml", SMALL)
    assert loaded(str(path), "engine.extra_args=[--brand-new, 'x y']").engine.extra_args == ("--brand-new", "x y")


def test_a_version_without_a_list_of_flags_warns_that_nothing_was_checked(write: Write) -> None:
    path = write("mine.yaml", SMALL)
    read, warnings = recipe.load(str(path), ("engine.version='9.9.9'", "engine.args.anything=1"))
    assert read.engine.version == "9.9.9"
    assert len(warnings) == 1
    assert "no list of flags for engine 9.9.9" in warnings[0]
    assert "0.33.0" in warnings[0]


@pytest.mark.parametrize(("shape", "used"), [
    ("{tensor-parallel-size: 2}", 2), ("{}", 1), ("{pipeline-parallel-size: 3}", 3)])
def test_a_shape_that_leaves_gpus_idle_is_allowed_with_a_warning(write: Write, shape: str, used: int) -> None:
    path = write("mine.yaml", SMALL)
    read, warnings = recipe.load(str(path), ("resources.gpus=4", f"engine.args={shape}"))
    assert read.resources.gpus == 4
    assert warnings == [f"its parallel shape uses {used} of the 4 GPUs that it asks for"]


def test_all_that_there_is_to_warn_of_is_said(write: Write) -> None:
    _, warnings = recipe.load(str(write("mine.yaml", SMALL)), ("resources.gpus=4", "engine.version='9.9.9'"))
    assert len(warnings) == 2


def test_a_shape_that_fills_its_gpus_gives_no_warning(write: Write) -> None:
    path = write("mine.yaml", SMALL)
    shape = "engine.args={tensor-parallel-size: 2, data-parallel-size: 2}"
    assert loaded(str(path), "resources.gpus=4", shape).resources.gpus == 4


def test_a_recipe_is_immutable() -> None:
    value: Any = yamlfile.convert({"name": "x", **yamlfile.parse(SMALL, "SMALL")}, Recipe, "SMALL")
    with pytest.raises(AttributeError):
        value.name = "y"


@pytest.mark.parametrize("word", ["a\\0b", "a\ud800b"])
@pytest.mark.parametrize("change", [
    'model="{}"', 'engine.env.A="{}"', 'engine.extra_args=["{}"]', 'engine.args.chat-template="{}"',
    'bench.args.label="{}"', 'description="{}"'])
def test_what_no_argument_and_no_file_can_hold_is_refused(write: Write, change: str, word: str) -> None:
    path = write("mine.yaml", SMALL)
    with pytest.raises(UsageError):
        recipe.load(str(path), (change.format(word),))


@pytest.mark.parametrize("name", ["~nosuchuser/x.yaml", "a\0b.yaml", "a\0b/c"])
def test_a_path_that_cannot_be_one_is_named_as_one_that_is_not_there(name: str) -> None:
    with pytest.raises(UsageError, match="no such recipe file") as caught:
        recipe.locate(name)
    assert caught.value.where == name


def test_a_folder_that_is_named_like_a_recipe_is_none(isolated: Path) -> None:
    for name in ("dir", "tp4"):
        (isolated / "jobs" / f"{name}.yaml").mkdir(parents=True)
    assert recipe.names() == NAMES
    assert recipe.locate("tp4") == shipped.folder("jobs") / "tp4.yaml"
    for name in ("dir", "jobs/dir.yaml"):
        with pytest.raises(UsageError):
            recipe.locate(name)


@pytest.mark.parametrize("name", ["HF_TOKEN", "hf_token", "MY_API_KEY", "DB_PASSWORD", "X_SECRET",
                                  "AWS_SECRET_ACCESS_KEY", "GOOGLE_CREDENTIALS_JSON"])
def test_a_secret_has_no_place_in_a_recipe(write: Write, name: str) -> None:
    path = write("mine.yaml", SMALL.replace("version: 0.33.0", f"version: 0.33.0, env: {{{name}: x}}"))
    with pytest.raises(UsageError, match=rf"engine\.env\.{name}: a secret would be written.*\n.*HF_TOKEN_PATH"):
        recipe.load(str(path))


@pytest.mark.parametrize(("assignment", "place"), [
    ("engine.args.hf-token=hf_x", "args.hf-token"),
    ("engine.args.model-loader-extra-config={a: 'https://me:pw@host/'}", "args.model-loader-extra-config"),
    ("engine.env.HTTPS_PROXY='http://me:pw@host:3128'", "env.HTTPS_PROXY"),
    ("engine.extra_args=[--hf-token, hf_x]", "extra_args"),
    ("engine.extra_args=[--hf_tok=hf_x]", "extra_args"),
    ("engine.extra_args=[--api-key=sk-x]", "extra_args"),
])
def test_no_flag_gives_the_engine_a_secret(write: Write, assignment: str, place: str) -> None:
    """Everybody on the node sees its words in the list of processes."""
    with pytest.raises(UsageError, match=rf"engine\.{place}: a secret would be written"):
        recipe.load(str(write("mine.yaml", SMALL)), (assignment,))


@pytest.mark.parametrize("assignment", [
    "engine.args.hf-token=true", "engine.args.max-num-batched-tokens=64", "engine.env.TOKENIZERS_PARALLELISM='1'",
    "engine.env.HTTPS_PROXY='http://host:3128'", "engine.env.VLLM_PER_TOKEN_QUANT='1'", "engine.extra_args=[--headed]",
])
def test_what_only_sounds_like_a_secret_is_none(write: Write, assignment: str) -> None:
    recipe.load(str(write("mine.yaml", SMALL)), (assignment,))


def test_a_secrets_file_may_be_named(write: Write) -> None:
    path = write("mine.yaml", SMALL.replace("version: 0.33.0", "version: 0.33.0, env: {HF_TOKEN_PATH: /home/me/token}"))
    assert recipe.load(str(path))[0].engine.env == {"HF_TOKEN_PATH": "/home/me/token"}


def test_the_paths_of_a_sif_and_of_an_overlay_are_found_from_the_recipes_folder(write: Write) -> None:
    path = write("deep/mine.yaml", SMALL.replace("version: 0.33.0", "version: 0.33.0, overlay: ./patched")
                 + "image: ../mine.sif\n")
    loaded_one, _ = recipe.load(str(path))
    assert loaded_one.image == str(path.parent.parent / "mine.sif")
    assert loaded_one.engine.overlay == str(path.parent / "patched")


@pytest.mark.parametrize("overlay", ["patched", "'/a:b'", '"/a\\nb"', "''"])
def test_an_overlay_that_cannot_be_on_the_path_of_modules_is_refused(write: Write, overlay: str) -> None:
    path = write("mine.yaml", SMALL.replace("version: 0.33.0", f"version: 0.33.0, overlay: {overlay}"))
    with pytest.raises(UsageError, match=r"engine\.overlay: .* is no path"):
        recipe.load(str(path))
