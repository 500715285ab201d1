"""`trace` as it is typed: on real recordings, on folders and runs, and on what cannot be broken down."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from isambard_serve import recipe as recipes
from isambard_serve.cli import main
from isambard_serve.run import RunDir, write_whole
from tests.unit import traces
from tests.unit.helpers import HERE, PRETEND, RUN_ID, loaded, small_plan, written_run

Write = Callable[[str, str], Path]

SAMPLES = HERE.parents[1] / "docs" / "samples"
EAGER = SAMPLES / "h200-moe-eager.trace.json.gz"
GRAPH = SAMPLES / "h200-moe-graph.trace.json.gz"
TWO = sorted((HERE / "samples").glob("h200-x2-rank*.trace.json.gz"))

ENGINE = HERE / "samples" / "vllm-0.26-{}.trace.json.gz"
"""A few steps of vLLM 0.26 on an H200, recorded by `submit --profile-at`: DeepSeek-V4-Flash cut to four layers at
concurrency 256, and a dense model of eight layers at 128."""


def typed(*words: str | Path, code: int = 0) -> tuple[str, str]:
    """What `trace` prints to stdout and to stderr."""
    result = CliRunner().invoke(main, ["trace", *map(str, words)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout, result.stderr


def document(*words: str | Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(typed(*words, "--json")[0])
    return read


def test_the_document_has_the_names_that_were_promised() -> None:
    read = document(EAGER)
    assert list(read) == ["schema", "ranks", "steps", "step_ms", "buckets", "unmatched_share"]
    assert read["schema"] == "isambard-serve/trace/1"
    assert {frozenset(bucket) for bucket in read["buckets"]} == {
        frozenset(("name", "ms", "share", "launches", "floor_ms"))}


def test_a_real_decode_loop_launched_kernel_by_kernel() -> None:
    read = document(EAGER)
    (rank,) = read["ranks"]
    assert (rank["found_by"], read["steps"], rank["left_out"], rank["launches"]) == ("marks", 5, 0, 191)
    buckets = {bucket["name"]: bucket["ms"] for bucket in read["buckets"]}
    assert sum(buckets.values()) - buckets["idle"] == pytest.approx(rank["kernel_ms"] / 5, rel=0.005)
    assert read["unmatched_share"] < 0.02
    assert 0.12 < rank["busy_ms"] / read["step_ms"] < 0.14  # the GPU waits for the program to launch


@pytest.mark.parametrize(("model", "launches"), [
    # Two products of the experts in each layer, and an attention of three kernels (plan, split, combination).
    ("v4-marlin", {"MoE GEMM": 8, "attention": 12, "dense GEMM": 48}),
    ("dense", {"MoE GEMM": 0, "attention": 17, "dense GEMM": 33}),
])
def test_of_the_engines_own_steps_every_kernel_has_its_bucket(model: str, launches: dict[str, int]) -> None:
    read = document(str(ENGINE).format(model))
    (rank,) = read["ranks"]
    assert (rank["found_by"], read["steps"], read["unmatched_share"]) == ("marks", 3, 0)
    found = {bucket["name"]: bucket["launches"] for bucket in read["buckets"]}
    assert {name: found.get(name, 0) for name in launches} == launches


def test_a_real_decode_loop_replayed_as_a_cuda_graph() -> None:
    read = document(GRAPH)
    (rank,) = read["ranks"]
    assert (rank["found_by"], read["steps"], rank["left_out"], rank["launches"]) == ("graphs", 50, 0, 183)
    buckets = {bucket["name"]: bucket for bucket in read["buckets"]}
    busy_ms = sum(bucket["ms"] for bucket in buckets.values()) - buckets["idle"]["ms"]
    assert 50 * busy_ms == pytest.approx(rank["kernel_ms"], rel=0.005)
    assert read["unmatched_share"] < 0.02
    assert busy_ms / read["step_ms"] > 0.95
    launches = {name: bucket["launches"] for name, bucket in buckets.items()}
    assert (launches["MoE GEMM"], launches["attention"], launches["KV/indexer"], launches["act+quant"]) == (6, 3, 6, 12)


def test_two_real_gpus_that_reduce_over_nccl() -> None:
    read = document(*TWO)
    first, second = read["ranks"]
    # The first all-reduce waited for the other rank's profiler to begin: that step is none of the steady ones.
    assert (first["steps"], first["left_out"], second["steps"], second["left_out"]) == (7, 1, 8, 0)
    assert first["kernel_ms"] > 3 * second["kernel_ms"]
    assert first["busy_ms"] == pytest.approx(second["busy_ms"], rel=0.02)
    comms = next(bucket for bucket in read["buckets"] if bucket["name"] == "comms")
    assert comms["launches"] == 6
    assert 0.1 < comms["ms"] < 0.3
    assert read["unmatched_share"] < 0.02


def test_the_table_says_all_that_there_is_and_stderr_what_was_read() -> None:
    out, err = typed(EAGER)
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["bucket", "ms", "share", "launches"]
    assert [line[0] for line in lines[2:10]] == ["MoE", "norm/elementwise", "attention", "dense", "act+quant",
                                                "sampling", "copies", "idle"]
    assert "5 steady steps of 15.153 ms with 191 kernels each, on 1 × NVIDIA H200; found by the program's marks" in out
    assert err == f"read {EAGER.name}\n"


def test_floors_stand_beside_what_is_and_are_drawn(write: Write, tmp_path: Path) -> None:
    floors = write("floors.json", '{"MoE GEMM": 0.3, "idle": 0}')
    out, _ = typed(EAGER, "--floors", floors, "--plot", tmp_path / "p.svg")
    rows = {line.split("  ")[0].strip(): line.split()[-2:] for line in out.splitlines() if line}
    assert rows["MoE GEMM"] == ["0.300", "2.3"]
    assert rows["attention"] == ["-", "-"]
    assert rows["idle"] == ["0.000", "-"]
    picture = (tmp_path / "p.svg").read_text()
    assert picture.startswith("<?xml")
    assert {bucket["name"]: bucket["floor_ms"] for bucket in document(EAGER, "--floors", floors)["buckets"]
            if bucket["floor_ms"] is not None} == {"MoE GEMM": 0.3, "idle": 0.0}


@pytest.mark.parametrize(("text", "complaint"), [
    ('{"MoE GEM": 1}', "there is no bucket 'MoE GEM'\n  → did you mean 'MoE GEMM'?"),
    ('{"x": 1}', "there is no bucket 'x'\n  → known buckets: comms, MoE GEMM"),
    ('{"MoE GEMM": "fast"}', "cannot be read"),
    ('{"MoE GEMM": -1}', "'MoE GEMM' cannot take -1 ms"),
    ("[]", "cannot be read"),
])
def test_floors_that_cannot_be_meant_are_refused(text: str, complaint: str, write: Write) -> None:
    assert complaint in typed(EAGER, "--floors", write("floors.json", text), code=2)[1]


def test_a_users_buckets_are_used(write: Write) -> None:
    table = write("own.yaml", "buckets: [{name: router, kernels: [gatherTopK, bitonicSort]}]")
    buckets = {bucket["name"]: bucket["launches"] for bucket in document(EAGER, "--buckets", table)["buckets"]}
    assert (buckets["router"], buckets["norm/elementwise"]) == (6, 139)


def test_all_ranks_of_a_folder_are_shown_together_with_what_differs(tmp_path: Path) -> None:
    for rank in range(2):
        events = traces.steps(6, layers=3 + rank)
        for begin in [event["ts"] for event in events if event["name"] == "nvjet"]:
            events += [traces.kernel("ncclDevKernel_AllReduce", begin + 2.0, 10.0, stream=9),
                       traces.kernel("_who_knows", begin + 14.0, 1.0)]
        traces.write(tmp_path / f"rank{rank}.json", events)
    traces.write(tmp_path / "frontend.json.gz", [traces.call("f")])
    (tmp_path / "rank0.profiler_out.txt").write_text("a table")
    out, err = typed(tmp_path, "--plot", tmp_path / "p.png")
    assert "6 steady steps" in out
    assert "on 2 × a GPU that the trace does not name; found by the kernels that come back" in out
    assert "busiest is rank 1 with 0.156 ms, idlest rank 0 with 0.121 ms" in out
    assert "comms: 0.010 ms a step, 100.0% of it behind other kernels" in out
    assert "0.060 - 0.080" in out
    assert "0.7% of the busy time; most of it on rank" in out
    assert "0.001 ms, 1.0 launches: _who_knows\n  → give them a bucket with --buckets FILE" in out
    assert "frontend.json.gz: no GPU kernels in it" in err
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_is_found_at_the_site_and_before_that_where_it_was_collected(
        write: Write, user_file: Write, tmp_path: Path) -> None:
    site = write("here.yaml", PRETEND.read_text().replace("/shared/runs", str(tmp_path / "runs")))
    user_file("config.yaml", f"site: {site}\n")
    run = written_run(small_plan(tmp_path / "runs"))
    for steps, place in ((4, run), (5, RunDir(Path("results") / RUN_ID))):
        place.profile.mkdir(parents=True)
        traces.write(place.profile / "rank0.json", traces.steps(steps))
        assert document(RUN_ID)["steps"] == steps
    assert document(run.path)["steps"] == 4


def profiled(folder: Path, *assignments: str, site: str = "isambard-ai") -> Path:
    """A profiled run of ``dp4-humming``."""
    run = RunDir(folder)
    run.profile.mkdir(parents=True)
    traces.write(run.profile / "rank0.json", traces.steps(4))
    write_whole(run.lock, recipes.locked(loaded("dp4-humming", *assignments)))
    write_whole(run.plan, json.dumps({"recipe": "dp4-humming", "site": site, "scheduler": "slurm", "simulated": False,
                                      "gpus": 4, "node_gpus": 4, "poll_interval_s": 60, "ladder": []}))
    return folder


def test_beside_a_runs_buckets_stands_the_least_that_the_roofline_has_for_them(tmp_path: Path) -> None:
    run = profiled(tmp_path / "run", "bench.profile_at=2048")
    least = {bucket["name"]: bucket["floor_ms"] for bucket in document(run)["buckets"]}
    # The article's picture of this step has about 3 ms for comms at wire rate.
    assert 2 < least["comms"] < 3.5
    assert least["MoE GEMM"] > least["attention"] > 0
    assert least["idle"] is None
    assert "is reckoned from the site's ceilings, not measured" in typed(run)[1]


def test_a_site_that_is_known_by_its_file_alone_is_named_for_its_ceilings(tmp_path: Path, write: Write) -> None:
    run = profiled(tmp_path / "run", "bench.profile_at=2048", site="mine")
    mine = write("mine.yaml", "extends: isambard-ai\nceilings: {copy_tb_s: 2.0}\n")
    least = {bucket["name"]: bucket["floor_ms"] for bucket in document(run, "--site", mine)["buckets"]}
    known = {bucket["name"]: bucket["floor_ms"] for bucket in document(run, "--site", "isambard-ai")["buckets"]}
    assert least["norm/elementwise"] == pytest.approx(2 * known["norm/elementwise"])
    assert "no site is called" in typed(run, "--site", "nowhere", code=2)[1]


@pytest.mark.parametrize("damaged", ["plan.json", "recipe.lock.yaml"])
def test_a_damaged_run_hides_nothing_of_its_traces(damaged: str, tmp_path: Path) -> None:
    run = profiled(tmp_path / "run", "bench.profile_at=2048")
    (run / damaged).write_text("{}")
    out, told = typed(run)
    assert "MoE GEMM" in out
    assert "note: the least that each bucket could take is not known: " in told
    assert damaged in told


@pytest.mark.parametrize(("assignment", "site"), [
    ("bench.profile_at=null", "isambard-ai"), ("model=them/theirs", "isambard-ai"), ("bench.profile_at=8", "nowhere")])
def test_where_the_least_is_not_known_it_is_left_open(assignment: str, site: str, tmp_path: Path) -> None:
    run = profiled(tmp_path / "run", "bench.profile_at=2048", assignment, site=site)
    assert {bucket["floor_ms"] for bucket in document(run)["buckets"]} == {None}
    several = document(run, profiled(tmp_path / "other", "bench.profile_at=2048"))
    assert {bucket["floor_ms"] for bucket in several["buckets"]} == {None}


@pytest.mark.parametrize("name", ["nowhere.json", "20261129-181258-other-3f2a", "latest"])
def test_what_is_neither_a_path_nor_a_run_is_refused(name: str, user_file: Write) -> None:
    user_file("config.yaml", f"site: {PRETEND}\n")
    assert f"error: {name}: is no file or folder here, and no run that is known here: " in typed(name, code=2)[1]


def test_a_run_that_recorded_no_profile_is_named_and_none_of_its_files_taken_for_a_trace(tmp_path: Path) -> None:
    run = written_run(small_plan(tmp_path))
    write_whole(run.binding, "{}")
    assert typed(run.path, code=2)[1] == (
        f"error: {run.path}: is a run that recorded no profile\n"
        "  → record one: isambard-serve submit RECIPE --profile-at CONCURRENCY\n")


def test_names_are_shown_as_they_are_and_steer_no_terminal(write: Write, tmp_path: Path) -> None:
    path = traces.write(tmp_path / "t.json", [*traces.steps(5), traces.kernel("\x1b[2Jzzz", 0.0, 5.0)])
    own = write("own.yaml", "buckets: [{name: '[red]x[/nope]', kernels: [embedding]}]")
    out = typed(path, "--buckets", own)[0]
    assert "[red]x[/nope]" in out
    assert "?[2Jzzz" in out


def test_a_trace_that_is_named_twice_is_one_rank(tmp_path: Path) -> None:
    path = traces.write(tmp_path / "t.json", traces.steps(5))
    assert len(json.loads(typed(path, tmp_path, "--json")[0])["ranks"]) == 1


def test_a_folder_without_a_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no trace" in typed(tmp_path / "empty", code=2)[1]


def test_a_trace_of_a_cpu_is_read_and_said_to_hold_nothing(tmp_path: Path) -> None:
    path = traces.write(tmp_path / "cpu.json.gz", [traces.call("f"), traces.mark("ProfilerStep#1", 0, 9)])
    out, err = typed(path, code=1)
    assert out == ""
    assert "cpu.json.gz: holds no GPU kernels\n  → it was recorded on a CPU" in err


def test_a_picture_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    assert "p.nonsense: cannot be written" in typed(EAGER, "--plot", tmp_path / "p.nonsense", code=2)[1]


def test_without_matplotlib_the_picture_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert "pip install 'isambard-serve[plot]'" in typed(EAGER, "--plot", tmp_path / "p.png", code=2)[1]
