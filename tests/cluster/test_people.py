"""People on a real Slurm: a server of theirs, a shell beside it, a node of their own; and no secret in sight."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

import pytest

from tests.cluster.person import Person

LOOK = """
cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '
echo
echo "at $SLURM_JOB_ID $OPENAI_BASE_URL"
exit 7
"""
ASK = """
import os, urllib.request
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/models")
request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
print(urllib.request.urlopen(request).status)
"""


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(simulating: Person) -> Iterator[None]:
    yield
    simulating.cluster.cancel_all()


def test_people_are_served_and_helped_beside_it_and_nobody_sees_the_key(simulating: Person) -> None:
    (run,) = simulating.asks("submit", "tiny", "--serve", "--wait")["runs"]
    run_id, job = run["run_id"], run["jobs"]["serve"]
    assert (run["state"], list(run["jobs"])) == ("ready", ["serve"])
    folder = simulating.runs / run_id
    key = (folder / "api.key").read_text()
    assert run["key_file"] == str(folder / "api.key")
    assert (folder / "api.key").stat().st_mode & 0o777 == 0o600
    assert json.loads((folder / "endpoint.json").read_text())["url"] == run["url"]

    looked = simulating.does("attach", run_id, "--", "sh", "-c", LOOK, check=False)
    assert looked.returncode == 7, looked.stderr
    processes, _, last = looked.stdout.rpartition("\nat ")
    assert last.split() == [job, f"{run['url']}/v1"]
    assert "isambard_serve.watch" in processes
    assert "--overlap" in processes
    assert key not in looked.stdout + looked.stderr
    asked = simulating.does("attach", job, "--", str(simulating.bin / "python"), "-c", ASK)
    assert asked.stdout == "200\n"

    simulating.asks("collect", run_id)
    collected = simulating.cluster.home / "results" / run_id
    for place, holders in ((folder, [folder / "api.key"]), (collected, [])):
        assert [path for path in place.rglob("*") if path.is_file() and key.encode() in path.read_bytes()] == holders

    assert simulating.asks("cancel", run_id)["runs"][0]["state"] == "cancelled"
    simulating.waits_for_an_empty_queue()
    assert "no engine of it runs: it is cancelled" in simulating.does("attach", run_id, check=False).stderr


def test_a_shell_on_a_node_of_ones_own_is_asked_for_in_the_way_that_the_site_takes(simulating: Person) -> None:
    sites = simulating.cluster.home / ".config/isambard-serve/sites"
    simulating.cluster.run(["tee", sites / "shells.yaml"], input=(
        "extends: simulated\ninteractive: [{partition: interactive, reservation: interactive}, {partition: workq}]\n"))
    done = simulating.does("shell", "tiny", "--site=shells", "--", "sh", "-c", 'echo "job $SLURM_JOB_ID"; exit 7',
                           check=False)
    assert done.returncode == 7, done.stderr
    assert "--partition=workq" in done.stderr.splitlines()[0]
    lines = done.stdout.splitlines()
    assert "isambard_serve.sim serve" in lines[2]
    assert "isambard_serve.sim bench serve" in lines[4]
    assert lines[-1].startswith("job ")
    simulating.waits_for_an_empty_queue()
    assert not list(simulating.runs.glob(".shells/*"))


def test_a_shell_at_a_terminal_is_at_one_on_the_node_too(simulating: Person) -> None:
    """util-linux's ``script`` makes the terminal, as a person's has one."""
    typed = shlex.join([str(simulating.bin / "isambard-serve"), "shell", "tiny", "--site", simulating.site])
    done = simulating.cluster.run(["script", "--quiet", "--return", "--command", typed, "/dev/null"],
                                  input="tty; echo job $SLURM_JOB_ID; exit 7\n", check=False)
    assert done.returncode == 7, done.stdout
    assert any(line.startswith("/dev/pts/") for line in done.stdout.splitlines()), done.stdout
    simulating.waits_for_an_empty_queue()
