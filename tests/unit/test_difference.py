"""Differences between recipes: what a person would type, in the order in which the second recipe has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from isambard_serve import difference
from isambard_serve.difference import Change
from isambard_serve.errors import UsageError
from tests.unit.helpers import SMALL

Write = Callable[[str, str], Path]

ARTICLE = """\
- --tensor-parallel-size 4
+ --tensor-parallel-size 1
+ --data-parallel-size 4
- --gpu-memory-utilization 0.92
+ --gpu-memory-utilization 0.95
- --max-num-seqs 2048
+ --max-num-seqs 1024
+ --compilation-config '{"max_cudagraph_capture_size":1024}'
"""
KERNELS = """\
- --moe-backend marlin
+ --moe-backend humming
+ VLLM_HUMMING_MOE_GEMM_TYPE=indexed
+ VLLM_HUMMING_INPUT_QUANT_CONFIG='{"dtype":"float8e4m3","input_scale_group_size":128}'
"""


def engines(first: str, second: str) -> str:
    """What differs between two recipes' engines, as it is shown."""
    changes = [change for change in difference.between(first, second) if change.engine]
    return "".join(f"{line}\n" for change in changes for line in change.lines())


@pytest.mark.parametrize(("first", "second", "shown"), [
    ("tp4", "dp4", ARTICLE), ("dp4", "dp4-humming", KERNELS), ("dp4", "dp4", "")])
def test_the_steps_of_the_article_are_its_own_diffs(first: str, second: str, shown: str) -> None:
    assert engines(first, second) == shown


def test_the_way_back_takes_out_what_the_way_there_put_in() -> None:
    there, back = (difference.between(*names) for names in (("tp4", "dp4"), ("dp4", "tp4")))
    assert {change.key: (change.before, change.after) for change in there} == {
        change.key: (change.after, change.before) for change in back}


def test_what_is_not_the_engines_is_told_apart_and_a_name_is_no_difference() -> None:
    others = [change.key for change in difference.between("tp4", "dp4") if not change.engine]
    assert others == ["description"]


def test_a_flag_that_is_taken_out_an_empty_one_and_one_without_a_value_are_shown_as_they_are_typed(
        write: Write) -> None:
    first = write("first.yaml", SMALL.replace("{version: 0.33.0}", """
  version: 0.33.0
  args: {numa-bind: true, enable-prefix-caching: true, chat-template: a b.jinja}
  env: {A: it's}
"""))
    second = write("second.yaml", """\
extends: ./first.yaml
engine:
  args: {enable-prefix-caching: false, numa-bind: null, middleware: [x, y]}
  env: {A: ""}
  extra_args: [--sim-fault, hang]
resources: {gpus: 2}
""")
    assert engines(str(first), str(second)).splitlines() == [
        "- --enable-prefix-caching", "+ --no-enable-prefix-caching", "- --numa-bind", "+ --middleware x y",
        """- A='it'"'"'s'""", "+ A=''", "- engine.extra_args: []", '+ engine.extra_args: ["--sim-fault", "hang"]']
    (resources,) = [change for change in difference.between(str(first), str(second)) if not change.engine]
    assert resources == Change(key="resources.gpus", before=1, after=2, engine=False)
    assert resources.lines() == ["- resources.gpus: 1", "+ resources.gpus: 2"]


def test_a_recipe_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="no recipe is called 'dp5'"):
        difference.between("tp4", "dp5")
