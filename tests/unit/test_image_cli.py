"""``image`` and ``weights``: what is sent, what is said, and what is refused before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from isambard_serve import registry
from isambard_serve.cli import main, options
from isambard_serve.run import RunDir, read_record
from isambard_serve.slurm import Slurm
from isambard_serve.task import TaskPlan
from tests.unit.helpers import PRETEND, SMALL, FakeSlurm

Write = Callable[[str, str], Path]
DIGEST = "sha256:" + "0123456789abcdef" * 4
MINE = f"description: my own\nbase: vllm/vllm-openai:v0.33.0\ndigest: {DIGEST}\n"


class Person:
    """Somebody at a login node whose site runs containers with apptainer; Slurm is none."""

    def __init__(self, runs_dir: Path, images_dir: Path, slurm: FakeSlurm) -> None:
        self.runs_dir = runs_dir
        self.images_dir = images_dir
        self.slurm = slurm

    def __call__(self, *words: str, code: int = 0) -> Result:
        """Run the command ``words``, which must end with ``code``."""
        result = CliRunner().invoke(main, words)
        assert result.exit_code == code, (result.output, result.exception)
        return result

    def sent(self) -> TaskPlan:
        """The task that was sent."""
        (run_dir,) = [path for path in self.runs_dir.iterdir() if path.name != ".jobs"]
        assert self.slurm.calls == [("sbatch", "--parsable", f"{run_dir}/task.sbatch")]
        return read_record(RunDir(run_dir).plan, TaskPlan)


@pytest.fixture
def person(user_file: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Person:
    runs_dir, images_dir = tmp_path / "runs", tmp_path / "images"
    text = PRETEND.read_text().replace("/shared/runs", str(runs_dir)).replace("runtime: none", "runtime: apptainer")
    text = text.replace("  command: [/opt/engine/bin/vllm]\n", f"  images_dir: {images_dir}\n")
    user_file("sites/here.yaml", text + "set: {HF_HOME: /cache, HF_HUB_OFFLINE: '1'}\n")
    user_file("config.yaml", "site: here")
    user_file("jobs/small.yaml", SMALL + "image: mine\n")
    user_file("images/mine.yaml", MINE)
    fake = FakeSlurm()
    monkeypatch.setattr(options, "open_slurm", lambda site: Slurm({}, fake))
    return Person(runs_dir, images_dir, fake)


def built(person: Person) -> None:
    person.images_dir.mkdir()
    (person.images_dir / "mine.sif").touch()


def test_an_image_is_built_in_a_job_and_it_is_said_how_to_follow_it(person: Person) -> None:
    result = person("image", "build", "mine", "--time", "1h")
    plan = person.sent()
    assert plan.recipe == "image-mine"
    assert plan.directives["time"] == "01:00:00"
    assert result.stdout == ""
    assert f"{plan.run_id}: job 101, at most" in result.stderr
    assert f"isambard-serve logs -f {plan.run_id}" in result.stderr


def test_an_image_without_a_digest_is_refused_before_anything_is_sent(person: Person) -> None:
    assert "isambard-serve image resolve vllm-0.33" in person("image", "build", "vllm-0.33", code=2).stderr
    assert person.slurm.calls == []


def test_a_digest_is_printed_and_written(person: Person, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    def digest(reference: str, platform: str) -> str:
        asked.append((reference, platform))
        return DIGEST

    monkeypatch.setattr(registry, "digest", digest)
    result = person("image", "resolve", "vllm-0.33")
    assert asked == [("vllm/vllm-openai:v0.33.0", "linux/arm64")]
    assert result.stdout == f"{DIGEST}\n"
    own = tmp_path / "home/config/isambard-serve/images/vllm-0.33.yaml"
    assert str(own) in result.stderr
    assert own.is_file()
    document = json.loads(person("image", "resolve", "vllm-0.33", "--json").stdout)
    assert (document["schema"], document["digest"], document["file"]) == ("isambard-serve/digest/1", DIGEST, str(own))
    person("image", "build", "vllm-0.33")


def test_the_images_are_listed_with_what_is_amiss(person: Person) -> None:
    assert person("image", "list").stdout.splitlines() == [
        "mine       not built: my own", "vllm-0.33  not built, without a digest: vLLM 0.33.0 for Arm, with numactl"]
    built(person)
    assert person("image", "list").stdout.startswith("mine       built, not checked: my own")
    check = {"passed": False, "time": 1.0, "machine": "aarch64", "findings": [], "versions": {},
             "schema": "isambard-serve/imagecheck/1"}
    (person.images_dir / "mine.check.json").write_text(json.dumps(check))
    assert "built, DOES NOT WORK: my own" in person("image", "list").stdout
    document = json.loads(person("image", "list", "--json").stdout)
    assert document["schema"] == "isambard-serve/images/1"
    assert [each["image"] for each in document["images"]] == ["mine", "vllm-0.33"]
    assert document["images"][0]["check"]["passed"] is False


def test_an_image_is_tried_once_it_is_there(person: Person) -> None:
    missing = person("image", "check", "small", code=2).stderr
    assert "mine.sif: the engine's image not found\n  → isambard-serve image build mine" in missing
    built(person)
    document = json.loads(person("image", "check", "small", "--json").stdout)
    assert [run["state"] for run in document["runs"]] == ["submitted"]
    assert any("isambard_serve.imagecheck" in command for command in person.sent().commands)


def test_weights_are_fetched_in_a_job_with_the_token_by_its_file(
        person: Person, user_file: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built(person)
    token = tmp_path / "home/.cache/huggingface/token"
    token.parent.mkdir(parents=True)
    token.write_text("s3cret")
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    person("weights", "fetch", "small")
    plan = person.sent()
    assert plan.environment["HF_TOKEN_PATH"] == str(token)
    for path in Path(plan.run_dir).rglob("*"):
        assert not path.is_file() or "s3cret" not in path.read_text()


def test_a_token_in_a_variable_alone_is_passed_to_nobody_and_it_is_said(
        person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    built(person)
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    assert "HF_TOKEN is passed to no job" in person("weights", "fetch", "small").stderr
    assert "HF_TOKEN_PATH" not in person.sent().environment


def test_a_model_that_is_a_folder_has_nothing_to_fetch(person: Person) -> None:
    result = person("weights", "fetch", "small", "--set", "model=/models/mine", code=2)
    assert "a folder of this machine" in result.stderr


def test_a_task_that_is_waited_for_shows_its_log_and_its_failure_is_the_exit_code(
        person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    built(person)
    send = options.open_slurm

    def ended(chosen: object) -> Slurm | None:
        """Slurm, whose job has run by the time that anybody asks."""
        slurm = send(chosen)  # type: ignore[arg-type]
        original = slurm.submit if slurm else None

        def submit(script: Path, *, dependency: str | None = None) -> str:
            assert original is not None
            job_id = original(script, dependency=dependency)
            run = RunDir(script.parent)
            run.task_log.write_text("fetching\n")
            run.record("task", "failed", reason="vllm ended with 1", job_id=job_id)
            return job_id

        monkeypatch.setattr(slurm, "submit", submit)
        return slurm

    monkeypatch.setattr(options, "open_slurm", ended)
    result = person("image", "check", "small", "--wait", code=1)
    assert result.stdout == "fetching\n"
    assert "vllm ended with 1" in result.stderr
