"""Commands given on a laptop and done on a login node, by the sandbox there."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import termios
from pathlib import Path

import psutil
import pytest

from tests.ssh.commands import SERVE, asks, does, waits
from tests.ssh.world import ALIAS, Laptop, World
from tests.support.waiting import wait_until

QUICK = ("--set", "bench.concurrency=[64]")


def runs_there(world: World) -> Path:
    return world.home / ".local/share/isambard-serve/runs"


def test_a_recipe_of_the_laptop_alone_is_run_there_and_told_of_here(laptop: Laptop, installed: World) -> None:
    (laptop.folder / "jobs").mkdir()
    (laptop.folder / "jobs" / "mine.yaml").write_text("extends: dp4\ndescription: it's \"mine\" $(alone)\n")
    (run,) = asks(laptop, "submit", "mine", *QUICK, "--time", "2h")["runs"]
    assert run["recipe"] == "mine"
    assert run["directory"].startswith(str(runs_there(installed)))
    assert waits(laptop, run["run_id"], "done")["points_done"] == 1
    lock = (Path(run["directory"]) / "recipe.lock.yaml").read_text()
    assert "it's \"mine\" $(alone)" in lock
    assert "time: 2h" in lock
    assert not (laptop.folder / ".local").exists()
    text = does(laptop, "status", run["run_id"])
    assert "SIMULATED" in text.stdout
    assert "Welcome" not in text.stdout
    assert "be careful" not in text.stderr
    assert "simulated" in does(laptop, "logs", run["run_id"]).stdout
    assert does(laptop, "logs", "-f", run["run_id"]).stdout == does(laptop, "logs", run["run_id"]).stdout


def test_waiting_shows_how_it_goes_and_how_it_ends(laptop: Laptop, installed: World) -> None:
    done = does(laptop, "submit", "dp4", *QUICK, "--wait", "--json")
    assert json.loads(done.stdout)["runs"][0]["state"] == "done"
    assert "dp4: measuring" in done.stderr
    failed = does(laptop, "submit", "dp4", *QUICK, "--wait", "--set", "engine.extra_args=[--sim-fault, die-at-start]",
                  check=False)
    assert failed.returncode == 1
    assert "failed" in failed.stderr


@pytest.mark.parametrize(("words", "code", "said"), [
    (("status", "20200101-000000-none-0000"), 2, "no run"),
    (("submit", "dp4", "--max-node-hours", "0.1"), 1, "node-hours"),
    (("submit", "no-such-recipe"), 2, "no recipe is called"),
    (("submit", "dp4", "--set", "engine.version=[1]"), 2, "must be text"),
    (("submit",), 2, "name a recipe"),
])
def test_exit_codes_and_errors_are_those_of_the_command(laptop: Laptop, installed: World, words: tuple[str, ...],
                                                        code: int, said: str) -> None:
    done = does(laptop, *words, check=False)
    assert done.returncode == code
    assert done.stderr.count("error:") == 1
    assert said in done.stderr
    assert done.stdout == ""


def test_a_plan_has_the_login_nodes_own_paths(laptop: Laptop, installed: World) -> None:
    (plan,) = asks(laptop, "plan", "dp4")["plans"]
    assert plan["run_dir"].startswith(str(runs_there(installed)))


def test_a_run_is_cancelled_there(laptop: Laptop, installed: World) -> None:
    (run,) = asks(laptop, "submit", "dp4", *QUICK, "--set", "engine.extra_args=[--sim-fault, hang]")["runs"]
    waits(laptop, run["run_id"], "loading", "ready", "measuring")
    assert asks(laptop, "cancel", run["run_id"])["runs"][0]["state"] == "cancelled"


def test_a_followed_log_goes_on_after_a_cut_with_nothing_lost_or_twice(laptop: Laptop, installed: World) -> None:
    (run,) = asks(laptop, "submit", "dp4", *QUICK, "--set", "engine.extra_args=[--sim-fault, hang]")["runs"]
    waits(laptop, run["run_id"], "loading")
    log = Path(run["directory"]) / "engine" / "engine.log"
    heard = laptop.folder / "heard"
    with heard.open("wb") as out:
        follower = subprocess.Popen(
            installed.laptop.command([*SERVE, "logs", "-f", run["run_id"], "--host", ALIAS, "--site", "sandbox"]),
            stdout=out, stderr=subprocess.PIPE, env=laptop.environment, cwd=laptop.folder, start_new_session=True)
    wait_until(lambda: heard.read_bytes(), 30, "the log's beginning")
    installed.cut_sessions()
    with log.open("a") as file:
        file.write("said after the cut\n")
    wait_until(lambda: b"said after the cut" in heard.read_bytes(), 30, "what was said after the cut")
    asks(laptop, "cancel", run["run_id"])
    assert follower.wait(60) == 0
    assert follower.stderr
    follower.stderr.close()
    assert heard.read_bytes() == log.read_bytes()


def test_nothing_goes_on_there_for_a_caller_who_has_gone(laptop: Laptop, installed: World) -> None:
    (run,) = asks(laptop, "submit", "dp4", *QUICK, "--set", "engine.extra_args=[--sim-fault, hang]")["runs"]
    follower = subprocess.Popen(
        installed.laptop.command([*SERVE, "logs", "-f", run["run_id"], "--host", ALIAS, "--site", "sandbox"]),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=laptop.environment, start_new_session=True)

    def followers() -> list[int]:
        return [pid for pid in installed.login.processes() if "logs" in (cmdline(pid) or [])]

    wait_until(followers, 30, "somebody to follow")
    os.kill(follower.pid, signal.SIGKILL)
    follower.wait()
    wait_until(lambda: not followers(), 30, "nobody to follow")
    asks(laptop, "cancel", run["run_id"])


def cmdline(pid: int) -> list[str] | None:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return None


def test_a_wait_that_is_cut_off_says_that_the_run_goes_on(laptop: Laptop, installed: World) -> None:
    waiting = subprocess.Popen(
        installed.laptop.command([*SERVE, "submit", "dp4", *QUICK, "--wait", "--host", ALIAS, "--site", "sandbox",
                                  "--set", "engine.extra_args=[--sim-fault, hang]"]),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=laptop.environment, start_new_session=True)
    assert waiting.stdout
    run_id = waiting.stdout.readline().partition(":")[0]
    installed.cut_sessions()
    _, said = waiting.communicate(timeout=60)
    assert waiting.returncode == 3
    assert "the connection was lost" in said
    assert f"isambard-serve status --host {ALIAS}" in said
    assert waits(laptop, run_id, "loading", "ready")
    asks(laptop, "cancel", run_id)


def test_an_encrypted_key_ends_a_command_without_a_terminal_and_is_asked_for_once_at_one(laptop: Laptop,
                                                                                        installed: World) -> None:
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", laptop.key], check=True,
                   capture_output=True)
    refused = does(laptop, "status", check=False)
    assert refused.returncode == 3
    assert "is encrypted, and there is no terminal to ask for its passphrase" in refused.stderr
    here, terminal = os.openpty()
    asked = subprocess.Popen(
        installed.laptop.command([*SERVE, "status", "--host", ALIAS, "--site", "sandbox", "--json"]), stdin=terminal,
        stdout=subprocess.PIPE, stderr=terminal, env=laptop.environment, cwd=laptop.folder, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(terminal, termios.TIOCSCTTY, 0))
    os.close(terminal)
    said = b""
    while b"Passphrase for" not in said:
        said += os.read(here, 1 << 12)
    os.write(here, b"secret\n")
    out, _ = asked.communicate(timeout=60)
    assert json.loads(out)["schema"].startswith("isambard-serve/status/")
    assert said.count(b"Passphrase for") == 1
    os.close(here)


def test_the_host_may_be_a_setting(laptop: Laptop, installed: World) -> None:
    settings = laptop.folder / ".config/isambard-serve/config.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"host: {ALIAS}\n")
    here = laptop.run([*SERVE, "status", "--site", "sandbox"])
    assert str(laptop.folder) in here.stderr  # the sandbox is this machine, whatever the settings say
    there = laptop.run([*SERVE, "status"], check=False)
    assert "this machine is none of the known sites" in there.stderr  # said by the login node, which is none
    assert there.returncode == 2
