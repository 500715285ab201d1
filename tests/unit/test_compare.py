"""Two runs side by side: the best valid rows, the factors of their ratio, what was changed, where answers part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from isambard_serve import cli, compare, recipe
from isambard_serve.compare import Factors
from isambard_serve.records import Outputs, Row
from isambard_serve.run import RunDir, write_whole
from tests.unit.helpers import RUNG_IDS, keep_row, ladder_plans, small_recipe, some_outputs, some_row, written_run

SLOW = some_row(concurrency=1, output_tok_s=100.0, tok_s_per_user=50.0)
FAST = some_row(concurrency=2, output_tok_s=300.0, tok_s_per_user=60.0, kv_cache_usage_max=1.0)


@pytest.fixture
def rungs(tmp_path: Path) -> tuple[RunDir, RunDir]:
    """Two runs that differ by one flag and one variable."""
    first, second = (written_run(plan) for plan in ladder_plans(tmp_path, 2))
    changed = {"engine": {"args": {"moe-backend": "humming"}, "env": {"VLLM_X": "1"}}, "description": "another"}
    for run, made in ((first, small_recipe()), (second, small_recipe(changed))):
        write_whole(run.lock, recipe.locked(made))
    return first, second


def kept(run: RunDir, *rows: Row, outputs: Outputs | None = None) -> None:
    for row in rows:
        keep_row(run, row)
    if outputs:
        write_whole(run.outputs, msgspec.json.encode(outputs))


def test_the_best_valid_rows_are_compared_and_their_ratio_has_two_factors(rungs: tuple[RunDir, RunDir]) -> None:
    kept(rungs[0], SLOW, some_row(concurrency=4, output_tok_s=900.0, valid=False))
    kept(rungs[1], FAST, some_row(concurrency=1, output_tok_s=200.0))
    made = compare.runs(*rungs)
    assert made.rows == (SLOW, FAST)
    assert made.factors == Factors(throughput=3.0, speed=1.2, under_way=2.5)
    assert (made.partings, made.same, made.agree) == (None, None, None)
    assert [(change.key, change.before, change.after) for change in made.changes] == [
        ("engine.args.moe-backend", None, "humming"), ("engine.env.VLLM_X", None, "1")]


def test_in_words_the_second_is_told_against_the_first(rungs: tuple[RunDir, RunDir]) -> None:
    kept(rungs[0], SLOW, outputs=some_outputs("a b c d", "e f"))
    kept(rungs[1], FAST, outputs=some_outputs("a b X d", "e f"))
    assert compare.text(compare.runs(*rungs)).splitlines() == [
        f"{RUNG_IDS[0]}: 100 output tok/s at c0001.r1, 50.0 tok/s per user, KV cache 50%",
        f"{RUNG_IDS[1]}: 300 output tok/s at c0002.r1, 60.0 tok/s per user, KV cache 100%",
        "3.00x the output tok/s = 2.50x the requests that decode at once x 1.20x the speed of each",
        "  + --moe-backend humming",
        "  + VLLM_X=1",
        "answers: 1 of 2 are the same to the last token; 67% of the tokens come before the first that differs",
        "  'p0' parts at token 3 of 4:", "    - 'a b c d'", "    + 'a b X d'"]


def test_of_many_answers_that_part_the_first_are_shown(rungs: tuple[RunDir, RunDir]) -> None:
    kept(rungs[0], outputs=some_outputs(*["a b"] * 6))
    kept(rungs[1], outputs=some_outputs(*["a c"] * 6))
    text = compare.text(compare.runs(*rungs))
    assert text.count("parts at token 2 of 2") == 3
    assert text.endswith("and 3 more: --json has them all")


@pytest.mark.parametrize("row", [some_row(valid=False), some_row(output_tok_s=None), some_row(tok_s_per_user=None)])
def test_without_a_valid_row_on_both_sides_there_is_no_ratio(rungs: tuple[RunDir, RunDir], row: Row) -> None:
    kept(rungs[0], SLOW)
    kept(rungs[1], row)
    made = compare.runs(*rungs)
    assert made.factors is None
    assert "the output tok/s =" not in compare.text(made)
    assert "answers: a run has none to the fixed prompts" in compare.text(made)


def test_simulated_runs_are_called_so_first(rungs: tuple[RunDir, RunDir]) -> None:
    kept(rungs[0], msgspec.structs.replace(SLOW, simulated=True))
    assert compare.text(compare.runs(*rungs)).startswith("SIMULATED: ")


def test_the_command_prints_words_or_json(rungs: tuple[RunDir, RunDir], isolated: Path) -> None:
    kept(rungs[0], SLOW, outputs=some_outputs("a b"))
    kept(rungs[1], FAST, outputs=some_outputs("a c"))
    words = [str(run.path) for run in rungs]

    def said(*more: str) -> str:
        done = CliRunner().invoke(cli.main, ["compare", *words, "--site", "sandbox", *more])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert said().splitlines()[2].startswith("3.00x the output tok/s")
    document: dict[str, Any] = json.loads(said("--json"))
    assert document["schema"] == "isambard-serve/compare/1"
    assert (document["factors"]["throughput"], document["same"], document["partings"][0]["agree"]) == (3.0, 0.0, 1)


def test_collected_runs_are_compared_where_no_site_is_known(rungs: tuple[RunDir, RunDir], isolated: Path) -> None:
    collected = isolated / "results"
    collected.mkdir()
    for run, row in zip(rungs, (SLOW, FAST), strict=True):
        kept(run, row)
        run.path.rename(collected / run.run_id)
    for words in ([run.run_id for run in rungs], [f"results/{run.run_id}/" for run in rungs]):
        done = CliRunner().invoke(cli.main, ["compare", *words])
        assert "3.00x the output tok/s" in done.stdout, done.output
    done = CliRunner().invoke(cli.main, ["compare", "results", "results/nothing"])
    assert (done.exit_code, done.stderr.splitlines()[0]) == (2, "error: results: is no run's folder")
