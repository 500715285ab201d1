"""Node health: what is wrong with a GPU makes its node a bad one; what cannot be tried or asked does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from isambard_serve import health
from isambard_serve.health import BadNode, Health
from isambard_serve.process import Completed
from tests.unit.helpers import Stubs, pretend_site, said

WORKS = said('{"seconds": 1.2, "free_mib": 97000, "total_mib": 97871}\n')
NVLINK = """\
GPU 0: NVIDIA GH200 120GB (UUID: GPU-aa)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA GH200 120GB (UUID: GPU-bb)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""


@pytest.mark.parametrize(("gpu", "tried", "faults"), [
    ({"compute_mode": "Default", "ecc.errors.uncorrected.volatile.total": "0", "nvlinks": "18 of 18",
      "clocks_event_reasons.hw_slowdown": "Not Active"}, WORKS, []),
    ({"compute_mode": "Exclusive_Process", "ecc.errors.uncorrected.volatile.total": "[N/A]", "nvlinks": "0 of 18"},
     WORKS, []),
    ({}, None, ["no answer within 60 s: it hangs"]),
    ({}, said(stderr="cuCtxSynchronize failed: launch failed (719)\n", returncode=1),
     ["cuCtxSynchronize failed: launch failed (719)"]),
    ({}, said(returncode=-11), ["its try ended with -11"]),
    ({"compute_mode": "Prohibited"}, WORKS, ["its compute mode allows no program"]),
    ({"ecc.errors.uncorrected.volatile.total": "3"}, WORKS, ["3 memory errors that could not be corrected"]),
    ({"clocks_event_reasons.hw_slowdown": "Active"}, WORKS, ["the hardware slows its clocks down, at rest"]),
    ({"nvlinks": "17 of 18"}, WORKS, ["only 17 of 18 NVLinks are active"]),
])
def test_a_gpu_is_judged_by_what_it_did_and_what_nvidia_smi_says(
        gpu: dict[str, str], tried: Completed | None, faults: list[str]) -> None:
    assert health.judge(gpu, tried) == (faults, [])


def test_memory_that_somebody_holds_and_a_try_that_could_not_be_made_are_worth_a_remark_alone() -> None:
    held = said('{"seconds": 1.2, "free_mib": 60000, "total_mib": 97871}')
    assert "only 60,000 of 97,871 MiB of its memory are free" in health.judge({}, held)[1][0]
    untried = said(stderr="cannot be tried: no libcuda.so.1", returncode=2)
    assert health.judge({}, untried) == ([], ["cannot be tried: no libcuda.so.1"])


def test_active_nvlinks_are_counted_for_each_gpu() -> None:
    assert health.nvlinks(NVLINK) == {"GPU-aa": (2, 2), "GPU-bb": (1, 2)}
    assert health.nvlinks("Link 0: 26 GB/s\nnonsense") == {}


@pytest.fixture
def node(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> Stubs:
    """A node with two GPUs, of which all is well but an NVLink of the second."""
    said_of = "Default, 4 MiB, 97871 MiB, 0 %, 40, 1980 MHz, 1980 MHz, Not Active, 0"
    stubs.add("nvidia-smi", f"if [ $1 = nvlink ]; then printf '%s' '{NVLINK}'; "
                            f"else echo 'GPU-aa, {said_of}'; echo 'GPU-bb, {said_of}'; fi")
    monkeypatch.setattr(sys, "executable", str(stubs.add("python", f"echo '{WORKS.stdout}'")))
    return stubs


def environment(stubs: Stubs) -> dict[str, str]:
    """Variables that find the stand-ins first."""
    return {"PATH": f"{stubs.folder}:/usr/bin:/bin"}


@pytest.mark.parametrize("words", ["", "null", "{}", "warning: x\n{}", '{"free_mib": "x", "total_mib": 1}'])
def test_a_try_whose_words_are_not_understood_is_worth_a_remark(words: str) -> None:
    faults, (remark,) = health.judge({}, said(words))
    assert faults == []
    assert "cannot be understood" in remark


def test_each_gpu_is_tried_in_a_process_that_sees_it_alone(node: Stubs) -> None:
    node.add("python", f'echo "$CUDA_VISIBLE_DEVICES $*" >> {node.folder}/tried; echo \'{WORKS.stdout}\'')
    found = health.check(["GPU-aa", "GPU-bb"], environment(node))
    assert sorted((node.folder / "tried").read_text().splitlines()) == [
        "GPU-aa -m isambard_serve.gpucheck", "GPU-bb -m isambard_serve.gpucheck"]
    assert found.faults == ("GPU GPU-bb: only 1 of 2 NVLinks are active",)
    assert found.remarks == ()
    assert found.gpus[0]["compute_mode"] == "Default"
    assert (found.gpus[0]["nvlinks"], found.gpus[1]["nvlinks"]) == ("2 of 2", "1 of 2")


def test_a_gpu_that_hangs_holds_nobody_and_is_named(node: Stubs) -> None:
    node.add("python", f'[ "$CUDA_VISIBLE_DEVICES" = GPU-aa ] || exec sleep 60; echo \'{WORKS.stdout}\'')
    found = health.check(["GPU-aa", "GPU-bb"], environment(node), limit_s=2.0)
    assert found.faults == ("GPU GPU-bb: no answer within 2 s: it hangs",
                            "GPU GPU-bb: only 1 of 2 NVLinks are active")
    assert found.seconds < 30
    assert found.gpus[1]["tried"] == "no answer"


def test_an_nvidia_smi_that_hangs_is_a_fault(node: Stubs) -> None:
    node.add("nvidia-smi", "exec sleep 60")
    assert health.check(["GPU-aa"], environment(node), limit_s=1.0).faults == (health.SILENT,)


def test_an_nvidia_smi_that_does_not_understand_the_question_makes_no_bad_node(node: Stubs) -> None:
    node.add("nvidia-smi", "echo 'Field \"x\" is not a valid field to query.'; exit 2")
    found = health.check(["GPU-aa"], environment(node))
    assert found.faults == ()
    assert found.remarks == ("nvidia-smi does not tell of compute mode, errors and clocks",)


def test_the_real_try_without_a_gpu_is_none_and_no_fault(stubs: Stubs) -> None:
    stubs.add("nvidia-smi", "")
    found = health.check(["GPU-00000000-0000-0000-0000-000000000000"], environment(stubs))
    assert found.faults == ()
    assert any("cannot be tried" in remark for remark in found.remarks)


def test_a_node_without_gpus_has_nothing_to_try() -> None:
    assert health.check([], {}) == Health(not_applicable="no GPU is visible here")


def bad(node: str, time: float) -> BadNode:
    return BadNode(node=node, time=time, run_id="r", faults=("GPU x: it hangs",))


def test_a_bad_node_is_remembered_for_some_days(tmp_path: Path) -> None:
    now = 1e9
    assert health.bad_nodes(tmp_path, now) == []
    health.remember(tmp_path, bad("nid003", now - health.EXCLUDE_S + 60))
    health.remember(tmp_path, bad("nid001", now - health.EXCLUDE_S - 60))
    path = health.remember(tmp_path, bad("../x y", now))
    assert path.parent == tmp_path / ".bad-nodes"
    (tmp_path / ".bad-nodes" / "damaged.json").write_text("{")
    assert [node.node for node in health.bad_nodes(tmp_path, now)] == ["../x y", "nid003"]


def test_bad_nodes_are_left_out_beside_those_that_the_site_leaves_out() -> None:
    site = pretend_site()
    assert health.avoiding(site, []) is site
    assert health.avoiding(site, [bad("nid003", 0), bad("nid004", 0)]).directives.exclude == (
        "nid[001-002],nid003,nid004")
