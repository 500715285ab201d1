"""The sandbox: the same scripts and the same loop as on a cluster, as processes of this machine."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.sandbox.conftest import Newcomer
from tests.support.waiting import wait_until

QUICK = ("--set", "bench.concurrency=[64, 128]")


def test_status_logs_and_collect_take_the_local_job_ids(newcomer: Newcomer) -> None:
    (run_id,) = newcomer.starts("dp4", *QUICK)
    job = newcomer.waits_for(run_id, "done")["jobs"]["serve"]
    assert job.startswith("local-")
    assert newcomer.run_of(job)["run_id"] == run_id
    assert "simulated" in newcomer.does("logs", job).stdout
    assert newcomer.asks("collect", job)["rows"]
    assert (newcomer.home / "results" / run_id / "results.csv").is_file()


def test_cancel_ends_the_running_rung_only_and_the_next_has_its_turn(newcomer: Newcomer) -> None:
    first, second = newcomer.starts("tp4", "dp4", *QUICK, "--set", "engine.extra_args=[--sim-fault, hang]")
    newcomer.waits_for(first, "loading", "ready", "measuring")
    newcomer.asks("cancel", first)
    assert newcomer.run_of(first)["state"] == "cancelled"
    newcomer.waits_for(second, "loading", "ready", "measuring")
    newcomer.asks("cancel", "--ladder", first)
    assert [newcomer.run_of(rung)["state"] for rung in (first, second)] == ["cancelled", "cancelled"]


def test_a_cancelled_rung_that_waits_never_starts(newcomer: Newcomer) -> None:
    first, second, third = newcomer.starts("tp4", "dp4", "dp4-humming", *QUICK)
    newcomer.asks("cancel", second)
    newcomer.waits_for(third, "done")
    assert newcomer.run_of(first)["state"] == "done"
    assert newcomer.run_of(second)["state"] == "cancelled"
    assert not newcomer.events(second, "serve")


def test_rungs_whose_controller_was_killed_are_failed_and_the_running_one_goes_on(newcomer: Newcomer) -> None:
    first, second = newcomer.starts("tp4", "dp4", *QUICK)
    newcomer.waits_for(first, "loading", "ready", "measuring")
    controller = psutil.Process(int(newcomer.run_of(second)["jobs"]["controller"].split("-")[1]))
    controller.kill()
    assert newcomer.waits_for(second, "failed")["reason"] == "the process that was to run it has ended"
    assert newcomer.waits_for(first, "done")["points_done"] == 2


@pytest.mark.parametrize("fault", ["die-at-start", "die-in-point=2:0", "die-in-point=2:-9"])
def test_an_engine_that_dies_is_a_failed_run_whatever_its_exit_code(newcomer: Newcomer, fault: str) -> None:
    (run_id,) = newcomer.starts("dp4", "--set", "bench.concurrency=[64, 512, 1024]",
                                "--set", f"engine.extra_args=[--sim-fault, '{fault}']")
    run = newcomer.waits_for(run_id, "failed")
    assert "the engine ended by itself" in run["reason"]
    kept = 0 if fault == "die-at-start" else 1
    assert [row["concurrency"] for row in newcomer.asks("collect", run_id)["rows"]] == [64][:kept]


FAULTS = {
    "fail-requests=0.5": {"completed", "none_failed", "tokens_out"}, "slow-client": {"in_flight"},
    "warm-prefix-cache": {"prefix_hits"}, "odd-rank": {"expected"}, "compile-in-window": {"compiled"},
    "throttle": {"throttled"}, "broken-output": {"outputs"},
}


def test_a_row_that_may_be_wrong_says_why_everywhere(newcomer: Newcomer) -> None:
    words = [word for fault in FAULTS for word in ("--sim-fault", fault)]
    (run_id,) = newcomer.starts("dp4", "--set", "bench.concurrency=[64]",
                                "--set", f"engine.extra_args={json.dumps(words)}")
    newcomer.waits_for(run_id, "done")
    row = newcomer.asks("status", run_id)["rows"][0]
    reasons = set.union(*FAULTS.values())
    assert (row["valid"], set(row["reasons"])) == (False, reasons)
    assert row["details"]["expected"] == "DP rank 1, TP rank 0 has moe_backend humming, not marlin"
    assert "1 NOT VALID" in newcomer.does("status").stdout
    shown = newcomer.does("collect", "--require-valid", run_id, check=False)
    assert shown.returncode == 1
    csv = (newcomer.home / "results" / run_id / "results.csv").read_text()
    for reason in reasons:
        assert f"NO: {reason} - " in shown.stdout
        assert reason in csv
    assert json.loads((newcomer.home / "results" / run_id / "results.json").read_text())["rows"] == [row]


def test_two_rungs_are_compared_by_their_answers_too(newcomer: Newcomer) -> None:
    rungs = newcomer.starts("dp4", "dp4-humming", "--set", "bench.concurrency=[64]")
    for rung in rungs:
        newcomer.waits_for(rung, "done")
    document = newcomer.asks("compare", *rungs)
    assert document["factors"]["throughput"] > 1
    assert 0 < document["same"] < 1
    assert "engine.args.moe-backend" in [change["key"] for change in document["changes"]]
    assert newcomer.asks("compare", rungs[0], rungs[0])["same"] == 1
    assert "parts at token" in newcomer.does("compare", *rungs).stdout


def test_a_row_that_was_measured_for_too_short_a_time_is_not_valid(newcomer: Newcomer) -> None:
    (run_id,) = newcomer.starts("dp4", "--set", "bench.concurrency=[64]", "--set", "bench.min_window=10h")
    newcomer.waits_for(run_id, "done")
    assert newcomer.asks("collect", run_id)["rows"][0]["reasons"] == ["window"]


def test_a_lost_run_is_resumed_without_measuring_a_valid_point_again(newcomer: Newcomer) -> None:
    (lost,) = newcomer.starts("dp4", "--set", "bench.concurrency=[64, 512, 1024]",
                              "--set", "engine.extra_args=[--sim-fault, 'die-in-point=2']")
    newcomer.waits_for(lost, "failed")
    (resumed,) = newcomer.starts("--resume", lost)
    newcomer.waits_for(resumed, "failed")
    rows = newcomer.asks("collect", resumed)["rows"]
    # The new engine dies in its second point too: one point was taken over, one was measured.
    assert [(row["concurrency"], row["run_id"]) for row in rows] == [(64, lost), (512, resumed)]
    assert all(row["valid"] for row in rows)


def test_a_search_that_was_lost_goes_on_where_it_stood_and_repeats_nothing(newcomer: Newcomer) -> None:
    (lost,) = newcomer.starts("dp4", "--set", "bench.repeats=3")
    wait_until(lambda: newcomer.run_of(lost)["points_done"], 60, "a point to be kept")
    newcomer.does("cancel", lost)
    measured = newcomer.asks("collect", lost)["rows"]
    (resumed,) = newcomer.starts("--resume", lost)
    newcomer.waits_for(resumed, "done")
    rows = newcomer.asks("collect", resumed)["rows"]
    assert [row for row in rows if row["run_id"] == lost] == measured
    assert [row["repeat"] for row in rows] == [1, 2, 3]
    assert rows[-1]["run_id"] == resumed
    scouts = [path.read_text() for path in (newcomer.runs / resumed / "search").glob("0001.jsonl")]
    assert not any('"scout"' in text for text in scouts)


def test_a_run_with_nothing_left_to_measure_is_not_resumed(newcomer: Newcomer) -> None:
    (run_id,) = newcomer.starts("dp4", "--set", "bench.concurrency=[64]")
    newcomer.waits_for(run_id, "done")
    refused = newcomer.does("submit", "--resume", run_id, check=False)
    assert refused.returncode == 2
    assert "no point left" in refused.stderr


def test_what_may_cost_more_than_is_allowed_is_refused(newcomer: Newcomer) -> None:
    refused = newcomer.does("submit", "tp4", "dp4", "--max-node-hours", "7.9", check=False)
    assert refused.returncode == 1
    assert "8 node-hours" in refused.stderr
    assert not newcomer.runs.exists()


def test_an_engine_that_hangs_never_becomes_ready_and_is_given_up(newcomer: Newcomer) -> None:
    (run_id,) = newcomer.starts("dp4", *QUICK, "--set", "engine.extra_args=[--sim-fault, hang]",
                                "--set", "resources.load_limit=3s")
    assert "not ready within 3 s" in newcomer.waits_for(run_id, "failed")["reason"]


def test_measuring_inside_needs_no_sweep(newcomer: Newcomer) -> None:
    (run_id,) = newcomer.starts("dp4", *QUICK, "--placement", "inside")
    run = newcomer.waits_for(run_id, "done")
    assert set(run["jobs"]) == {"serve", "controller"}
    assert [event["event"] for event in newcomer.events(run_id, "inside")][-1] == "finished"


def test_people_are_served_on_loopback_to_whoever_has_the_key_until_it_is_cancelled(newcomer: Newcomer) -> None:
    (run_id,) = newcomer.starts("dp4", "--serve", "--wait")
    run = newcomer.run_of(run_id)
    assert run["url"].startswith("http://127.0.0.1:")
    key = Path(run["key_file"])
    assert key.stat().st_mode & 0o777 == 0o600

    def models(*headers: str) -> int:
        request = urllib.request.Request(f"{run['url']}/v1/models", headers=dict(pair.split(": ") for pair in headers))
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert (models(), models(f"Authorization: Bearer {key.read_text()}")) == (401, 200)
    assert list(run["jobs"]) == ["serve", "controller"]
    beside = newcomer.does("attach", run_id, "--", "sh", "-c", 'echo "$OPENAI_BASE_URL ${#OPENAI_API_KEY}"; exit 7',
                           check=False)
    assert (beside.returncode, beside.stdout) == (7, f"{run['url']}/v1 {len(key.read_text())}\n")
    newcomer.asks("cancel", run_id)
    assert newcomer.waits_for(run_id, "cancelled")["url"] is None


def test_rungs_on_one_node_measure_from_inside_and_one_that_fails_stops_no_other(newcomer: Newcomer) -> None:
    first, second = newcomer.starts("tp4", "dp4", *QUICK, "--same-node")
    newcomer.asks("cancel", first)
    assert newcomer.waits_for(second, "done")["points_done"] == 2
    assert newcomer.run_of(first)["state"] == "cancelled"
    assert newcomer.events(second, "inside")[-1]["event"] == "finished"
    refused = newcomer.does("submit", "tp4", "dp4", "--same-node", "--placement", "dependent", check=False)
    assert refused.returncode == 2


def test_a_profile_is_taken_instead_of_points_and_its_traces_are_collected(newcomer: Newcomer) -> None:
    # Long enough for its steps to be seen: the simulated engine takes a hundred in the time of a look.
    (run_id,) = newcomer.starts("dp4", "--profile-at", "256", "--set", "bench.osl=16384",
                                "--set", "engine.args.max-model-len=32768")
    assert newcomer.waits_for(run_id, "done")["reason"] == "30 steps at concurrency 256 recorded: 4 traces"
    assert newcomer.asks("collect", run_id)["rows"] == []
    assert len(list((newcomer.home / "results" / run_id / "profile").glob("rank*.pt.trace.json.gz"))) == 4
    # A simulated engine has no kernels: that is said, and nothing made up.
    told = newcomer.does("trace", run_id, check=False)
    assert (told.returncode, told.stdout) == (1, "")
    assert f"{run_id}: holds no GPU kernels" in told.stderr


def test_a_server_for_people_is_measured_when_asked_and_a_point_that_others_disturb_is_not_valid(
        newcomer: Newcomer) -> None:
    (run_id,) = newcomer.starts("dp4", "--serve", "--wait")
    newcomer.asks("sweep", run_id, "--concurrency", "64,128")

    def measured(points: int) -> dict[str, Any] | None:
        run = newcomer.run_of(run_id)
        return run if (run["state"], run["points_done"]) == ("ready", points) else None

    wait_until(lambda: measured(2), 60, "two points")
    assert [row["valid"] for row in newcomer.asks("status", run_id)["rows"]] == [True, True]
    run = newcomer.run_of(run_id)
    headers = {"Authorization": f"Bearer {Path(run['key_file']).read_text()}", "Content-Type": "application/json"}
    body = json.dumps({"model": "deepseek-ai/DeepSeek-V4-Flash", "prompt": "a b", "max_tokens": 1}).encode()
    newcomer.asks("sweep", run_id, "--concurrency", "64")
    row = newcomer.runs / run_id / "points/c0064.r2/row.json"
    while not row.exists():  # somebody else asks too, all the while
        with urllib.request.urlopen(urllib.request.Request(f"{run['url']}/v1/completions", body, headers), timeout=30):
            pass
    wait_until(lambda: measured(3), 60, "the server to be ready again")
    rows = newcomer.asks("collect", run_id)["rows"]
    assert [(row["concurrency"], row["repeat"], row["reasons"]) for row in rows] == [
        (64, 1, []), (64, 2, ["alone"]), (128, 1, [])]
    newcomer.asks("cancel", run_id)
