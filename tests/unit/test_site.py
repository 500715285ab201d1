"""Sites: which one is meant, and where its variables come from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from isambard_serve import config, shipped, site
from isambard_serve.errors import UsageError
from tests.unit.helpers import PRETEND

Write = Callable[[str, str], Path]


def pretend(detect: Path | None = None) -> str:
    """The text of a site; ``detect``: the path that gives it away."""
    return PRETEND.read_text() + (f"detect: {detect}\n" if detect else "")


def test_the_flag_goes_before_the_environment_the_settings_and_what_is_detected(
        user_file: Write, tmp_path: Path) -> None:
    for name in ("by-flag", "by-env", "by-config"):
        user_file(f"sites/{name}.yaml", pretend())
    user_file("sites/detected.yaml", pretend(tmp_path))
    environ = {"ISAMBARD_SERVE_SITE": "by-env"}
    assert site.choose(None, {}).name == "detected"
    user_file("config.yaml", "site: by-config")
    assert site.choose(None, {}).name == "by-config"
    assert site.choose(None, environ).name == "by-env"
    assert site.choose("by-flag", environ).name == "by-flag"


def test_the_environment_is_this_process_own_unless_given(user_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    user_file("sites/mine.yaml", pretend())
    monkeypatch.setenv("ISAMBARD_SERVE_SITE", "mine")
    assert site.choose(None).name == "mine"


def test_a_machine_of_no_known_site_is_an_error_that_says_how_to_name_one(user_file: Write, tmp_path: Path) -> None:
    user_file("sites/other.yaml", pretend(tmp_path / "not here"))
    with pytest.raises(UsageError) as caught:
        site.choose(None, {})
    assert "--site isambard-ai|other" in str(caught.value)
    assert "config.yaml" in str(caught.value)


def test_a_broken_site_file_does_not_stop_the_detection_of_others_and_is_told_to_whoever_names_it(
        user_file: Write, tmp_path: Path) -> None:
    user_file("sites/a-broken.yaml", "extends: [")
    user_file("sites/a-wrong.yaml", pretend(tmp_path).replace("poll_interval_s: 10", "poll_interval_s: soon"))
    user_file("sites/detected.yaml", pretend(tmp_path))
    assert site.choose(None, {}).name == "detected"
    for named in ("a-broken", "a-wrong"):
        with pytest.raises(UsageError, match=rf"{named}\.yaml"):
            site.choose(named, {})
        with pytest.raises(UsageError, match=rf"{named}\.yaml"):
            site.choose(None, {"ISAMBARD_SERVE_SITE": named})
    user_file("sites/detected.yaml", pretend(tmp_path / "not here"))
    with pytest.raises(UsageError, match="this machine is none of the known sites"):
        site.choose(None, {})


def test_an_unknown_site_is_answered_with_the_nearest_known_one() -> None:
    with pytest.raises(UsageError, match="did you mean 'isambard-ai'"):
        site.load("isambard_ai")
    with pytest.raises(UsageError, match="known sites: isambard-ai"):
        site.load("qqqqq")


def test_a_site_that_extends_itself_alone_is_not_told_its_own_name(user_file: Write) -> None:
    user_file("sites/mine.yaml", "extends: mine\n")
    with pytest.raises(UsageError, match=r"no other site is called 'mine'\n  → known sites: "):
        site.load("mine")


def test_a_site_may_be_named_by_its_file(write: Write) -> None:
    path = write("mine.yaml", pretend())
    assert site.load(str(path)).name == "mine"
    with pytest.raises(UsageError, match=r"none\.yaml: no such site file"):
        site.load(str(path.parent / "none.yaml"))


def test_a_users_site_extends_the_shipped_one_of_the_same_name(user_file: Write) -> None:
    user_file("sites/isambard-ai.yaml", "extends: isambard-ai\ndirectives: {account: brics.mine, mail-type: END}")
    own = site.load("isambard-ai")
    assert own.name == "isambard-ai"
    assert own.directives.account == "brics.mine"
    assert own.partition == "workq"


def test_a_site_file_extends_a_named_site_or_a_file_beside_it(write: Write) -> None:
    write("base.yaml", pretend())
    assert site.load(str(write("mine.yaml", "extends: ./base.yaml\nopen_files: 7"))).open_files == 7
    assert site.load(str(write("mine.yaml", "extends: base\nopen_files: 7"))).open_files == 7
    assert site.load(str(write("own.yaml", "extends: isambard-ai\nopen_files: 8"))).partition == "workq"


def test_an_unknown_directive_names_the_nearest_known_one(write: Write) -> None:
    path = write("mine.yaml", pretend().replace("mail-user", "mail_user"))
    with pytest.raises(UsageError, match=r"mine\.yaml: directives: .*mail_user.*\n.*did you mean 'mail-user'"):
        site.load(str(path))


@pytest.mark.parametrize(("addition", "key"), [
    ("set: {'A B': x}", "set"), ("unset: ['$(touch x)']", "unset"), ("export: ['A,B=1']", "export"),
])
def test_a_variable_must_have_a_name_that_a_shell_knows(write: Write, addition: str, key: str) -> None:
    text = "\n".join(line for line in pretend().splitlines() if not line.startswith(f"{key}:"))
    with pytest.raises(UsageError, match=rf"mine\.yaml: {key}: .* is no name for a variable"):
        site.load(str(write("mine.yaml", f"{text}\n{addition}\n")))


def test_variables_are_filled_from_the_environment() -> None:
    environ = {"SCRATCHDIR": "/scratch/p/u", "PROJECTDIR": "/projects/p"}
    filled, assumed = site.resolved(site.load("isambard-ai"), environ)
    assert assumed == []
    assert filled.runs_dir == "/scratch/p/u/isambard-serve/runs"
    assert filled.container.images_dir == "/scratch/p/u/isambard-serve/images"
    assert filled.container.binds == ("/scratch/p/u", "/projects/p")
    assert filled.container.local == f"/local/user/{os.getuid()}"
    assert filled.set["HF_HOME"] == "/scratch/p/u/huggingface"


@pytest.mark.parametrize("from_afar", [False, True])
def test_a_real_value_is_never_replaced_by_an_example(from_afar: bool) -> None:
    environ = {"SCRATCHDIR": "/real", "PROJECTDIR": "/real", "UID": "7"}
    filled, assumed = site.resolved(site.load("isambard-ai"), environ, from_afar=from_afar)
    assert (filled.container.binds, assumed) == (("/real", "/real"), [])


def test_where_the_site_is_a_plan_has_the_same_values_as_a_submission() -> None:
    environ = {"SCRATCHDIR": "/real", "PROJECTDIR": "/real"}  # UID: shells export it to nobody
    assert site.resolved(site.load("isambard-ai"), environ, from_afar=True) == site.resolved(
        site.load("isambard-ai"), environ)


def test_example_values_stand_in_only_from_afar_and_are_named() -> None:
    shown = site.load("isambard-ai")
    filled, assumed = site.resolved(shown, {"PROJECTDIR": "/real"}, from_afar=True)
    assert assumed == ["SCRATCHDIR", "UID"]
    assert filled.container.binds == (shown.example["SCRATCHDIR"], "/real")
    with pytest.raises(UsageError, match=r"site isambard-ai: \$SCRATCHDIR is not set"):
        site.resolved(shown, {"PROJECTDIR": "/real"})


def test_an_empty_variable_is_no_value() -> None:
    with pytest.raises(UsageError, match=r"\$SCRATCHDIR is not set"):
        site.resolved(site.load("isambard-ai"), {"SCRATCHDIR": "", "PROJECTDIR": "/real"})


def test_both_ways_to_write_a_variable_are_filled() -> None:
    written = msgspec.structs.replace(site.load(str(PRETEND)), runs_dir="$A/${B}x/$A_/end")
    filled, _ = site.resolved(written, {"A": "/a", "B": "b", "A_": "c"})
    assert filled.runs_dir == "/a/bx/c/end"


def test_a_variable_without_an_example_is_an_error_from_afar_too() -> None:
    written = msgspec.structs.replace(site.load(str(PRETEND)), runs_dir="$NOWHERE/runs")
    with pytest.raises(UsageError, match=r"\$NOWHERE is not set"):
        site.resolved(written, {}, from_afar=True)


def test_the_settings_are_strict_and_optional(user_file: Write) -> None:
    assert config.load() == config.Config()
    user_file("config.yaml", "# site: mine\n")
    assert config.load() == config.Config()
    user_file("config.yaml", "stie: mine\n")
    with pytest.raises(UsageError, match=r"config\.yaml: .*stie.*\n.*did you mean 'site'"):
        config.load()


@pytest.mark.parametrize("name", ["jobs", "templates", "sites", "engine_flags"])
def test_what_is_shipped_is_there(name: str) -> None:
    assert any(shipped.folder(name).iterdir())


def test_a_users_site_may_extend_another_of_the_users_own(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    own = tmp_path / "isambard-serve" / "sites"
    own.mkdir(parents=True)
    (own / "isambard-ai.yaml").write_text("extends: isambard-ai\npoll_interval_s: 77\n")
    (own / "mine.yaml").write_text("extends: isambard-ai\npartition: other\n")
    mine = site.load("mine")
    assert (mine.partition, mine.poll_interval_s, mine.node.gpus) == ("other", 77, 4)


def test_where_runs_lie_may_start_at_the_home_folder(tmp_path: Path) -> None:
    written = msgspec.structs.replace(site.load(str(PRETEND)), runs_dir="~/runs")
    assert site.resolved(written, {})[0].runs_dir == str(tmp_path / "home" / "runs")
    written = msgspec.structs.replace(written, runs_dir="$A/runs")
    assert site.resolved(written, {"A": "~"})[0].runs_dir == str(tmp_path / "home" / "runs")


@pytest.mark.parametrize("folder", ["runs", "./runs", "../runs", "", "$A/runs"])
def test_where_runs_lie_does_not_depend_on_where_one_stands(folder: str) -> None:
    written = msgspec.structs.replace(site.load(str(PRETEND)), runs_dir=folder)
    with pytest.raises(UsageError, match=r"site pretend: runs_dir: .* is no absolute path"):
        site.resolved(written, {"A": "relative"})


@pytest.mark.parametrize(("addition", "key"), [
    ("ceilings: {bf16_tflop_s: 0}", "ceilings.bf16_tflop_s"), ("ceilings: {copy_tb_s: -4}", "ceilings.copy_tb_s"),
    ("ceilings: {peer_gb_s: 1.0e+308}", "ceilings.peer_gb_s"),
    ("node: {gpus: 4, cpus: 288, gpu_gib: 0}", "node.gpu_gib")])
def test_what_no_gpu_can_reach_is_not_expected_of_one(write: Write, addition: str, key: str) -> None:
    path = write("mine.yaml", f"extends: {PRETEND}\n{addition}\n")
    with pytest.raises(UsageError) as caught:
        site.load(str(path))
    assert str(caught.value.where).endswith(f": {key}")
