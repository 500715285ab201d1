"""Hosts: whatever way a user's configuration leads there, commands run there and say how they ended."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import paramiko
import pytest

from isambard_serve import host
from isambard_serve.errors import ConnectionLostError, HostError
from isambard_serve.host import Done, Host
from isambard_serve.ssh.keys import Keyring
from isambard_serve.ssh.opensshhost import OpensshHost
from isambard_serve.ssh.paramikohost import HostKeyError, ParamikoHost
from tests.ssh import world as worlds
from tests.ssh.commands import SERVE
from tests.ssh.world import ALIAS, INNER_PORT, JUMP, LOGIN, Laptop, World
from tests.support.waiting import wait_until


def by_paramiko(alias: str = ALIAS, passphrase: str | None = None) -> ParamikoHost:
    with closing(Keyring(lambda _: passphrase)) as keys:
        return ParamikoHost(host.resolve(alias), keys)


HOSTS: list[Callable[[str], Host]] = [by_paramiko, OpensshHost]


@pytest.fixture(params=HOSTS, ids=["paramiko", "openssh"])
def there(request: pytest.FixtureRequest, laptop: Laptop) -> Iterator[Host]:
    """The login node, by each of the two ways."""
    with closing(request.param(ALIAS)) as connected:
        yield connected


def answers(there: Host) -> bool:
    with closing(there):
        return there.run(["echo", "hello"]) == Done(returncode=0, stdout=b"hello\n", stderr=b"")


@pytest.fixture
def agent(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An agent without keys."""
    path = laptop.folder / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        wait_until(path.exists, 10, "the agent")
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        yield path
    finally:
        process.terminate()
        process.wait()


# How one logs in.


@pytest.mark.parametrize("make", HOSTS)
def test_a_key_and_its_certificate_log_in_as_clifton_03_writes_them(laptop: Laptop,
                                                                   make: Callable[[str], Host]) -> None:
    assert answers(make(ALIAS))


@pytest.mark.parametrize("make", HOSTS)
def test_a_certificate_beside_its_key_logs_in_as_clifton_02_writes_it(laptop: Laptop,
                                                                      make: Callable[[str], Host]) -> None:
    laptop.certificate.rename(f"{laptop.key}-cert.pub")
    laptop.configure(worlds.clifton_02(laptop.key, laptop.known_hosts))
    assert answers(make(ALIAS))


@pytest.mark.parametrize("make", HOSTS)
def test_a_key_in_an_agent_logs_in_with_a_certificate_in_a_file(laptop: Laptop, agent: Path,
                                                               make: Callable[[str], Host]) -> None:
    subprocess.run(["ssh-add", "-q", laptop.key], check=True)
    laptop.key.unlink()
    assert answers(make(ALIAS))


@pytest.mark.parametrize("make", HOSTS)
def test_a_key_and_its_certificate_log_in_from_an_agent_alone(laptop: Laptop, agent: Path,
                                                             make: Callable[[str], Host]) -> None:
    laptop.certificate.rename(f"{laptop.key}-cert.pub")
    subprocess.run(["ssh-add", "-q", laptop.key], check=True)
    for path in laptop.folder.glob("id_ed25519*"):
        path.unlink()
    assert answers(make(ALIAS))


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_keys_of_other_kinds_log_in(laptop: Laptop, kind: str) -> None:
    for path in laptop.folder.glob("id_ed25519*"):
        path.unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", laptop.key], check=True)
    laptop.certify(laptop.key)
    assert answers(by_paramiko())


@pytest.mark.parametrize("make", HOSTS)
def test_two_jumps_lead_to_a_host_that_neither_the_laptop_nor_the_first_can_reach(laptop: Laptop,
                                                                                 make: Callable[[str], Host]) -> None:
    laptop.configure(worlds.two_jumps(laptop))
    assert answers(make("hidden"))


@pytest.mark.parametrize("make", HOSTS)
def test_a_proxy_command_leads_there(laptop: Laptop, make: Callable[[str], Host]) -> None:
    text = worlds.clifton_03(laptop.key, laptop.certificate, laptop.known_hosts)
    laptop.configure(text.replace("ProxyJump %r@jump.%n",
                                  f"ProxyCommand ssh -F {laptop.folder}/ssh_config -l %r -W [%h]:%p jump.%n"))
    assert answers(make(ALIAS))


def test_a_hashed_known_hosts_file_elsewhere_with_several_keys_for_a_name_is_read(laptop: Laptop, world: World) -> None:
    others = "".join(f"{name} {world.host_key('inner')}\n" for name in (JUMP, worlds.LOGIN_NAME))
    laptop.known_hosts.write_text(others + world.known_hosts())
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", laptop.known_hosts], check=True, capture_output=True)
    assert worlds.LOGIN_NAME not in laptop.known_hosts.read_text()
    assert answers(by_paramiko())


def test_the_key_of_a_host_on_another_port_is_its_own(laptop: Laptop, world: World) -> None:
    text = worlds.two_jumps(laptop)
    laptop.configure(text.replace("Host inner\n", "Host inner\n\tProxyJump outer\n"))
    assert answers(by_paramiko("inner"))
    laptop.known_hosts.write_text(world.known_hosts().replace(f"[{LOGIN}]:{INNER_PORT}", LOGIN))
    with pytest.raises(HostKeyError, match="not known"):
        by_paramiko("inner")


# An encrypted key.


@pytest.fixture
def encrypted(laptop: Laptop) -> Laptop:
    """A laptop whose key is encrypted."""
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", laptop.key], check=True,
                   capture_output=True)
    return laptop


def test_an_encrypted_keys_passphrase_is_asked_for_once_on_the_whole_way(encrypted: Laptop) -> None:
    asked: list[str] = []

    def prompt(question: str) -> str:
        asked.append(question)
        return "secret"

    assert answers(ParamikoHost(host.resolve(ALIAS), Keyring(prompt)))
    assert asked == [f"Passphrase for {encrypted.key}: "]


def test_an_encrypted_key_that_the_agent_holds_is_not_asked_for(encrypted: Laptop, agent: Path) -> None:
    askpass = encrypted.folder / "askpass"
    askpass.write_text("#!/bin/sh\necho secret\n")
    askpass.chmod(0o700)
    subprocess.run(["ssh-add", "-q", encrypted.key], check=True, stdin=subprocess.DEVNULL,
                   env={**os.environ, "SSH_ASKPASS": str(askpass), "SSH_ASKPASS_REQUIRE": "force"})
    with closing(Keyring(lambda _: pytest.fail("asked"))) as keys:
        assert answers(ParamikoHost(host.resolve(ALIAS), keys))


def test_without_a_terminal_an_encrypted_key_is_an_error_that_says_so(encrypted: Laptop) -> None:
    with pytest.raises(HostError, match=f"{encrypted.key} is encrypted, and there is no terminal") as caught:
        by_paramiko()
    assert "ssh-add" in str(caught.value)


def test_a_wrong_passphrase_is_named(encrypted: Laptop) -> None:
    with pytest.raises(HostError, match=f"not the passphrase of {encrypted.key}"):
        by_paramiko(passphrase="wrong")  # noqa: S106


# What must not log in.


@pytest.mark.parametrize("bulk", [False, True])
def test_an_expired_certificate_is_named_with_its_remedy_and_not_tried_again(laptop: Laptop, bulk: bool) -> None:
    laptop.certify(laptop.key, "-2h:-1h")
    with pytest.raises(HostError, match=r"-cert.pub expired at \d{4}-\d\d-\d\d .* UTC") as caught:
        host.persistently(ALIAS, lambda _: pytest.fail("connected"), bulk=bulk, pauses_s=[60])
    assert not isinstance(caught.value, ConnectionLostError)
    assert caught.value.exit_code == 3
    assert "clifton auth" in str(caught.value.remedy)


def test_a_certificate_that_is_refused_is_no_matter_of_time(laptop: Laptop) -> None:
    subprocess.run(["ssh-keygen", "-q", "-s", laptop.world.folder / "ca", "-I", "x", "-n", "nobody",
                    f"{laptop.key}.pub"], check=True, capture_output=True)
    Path(f"{laptop.key}-cert.pub").rename(laptop.certificate)
    with pytest.raises(HostError, match="none of 2 keys and certificates is accepted"):
        host.connect(ALIAS)


def test_no_key_at_all_is_said(laptop: Laptop) -> None:
    laptop.key.unlink()
    with pytest.raises(HostError, match="no key to log in with"):
        host.connect(ALIAS)


@pytest.mark.parametrize("bulk", [False, True])
def test_a_wrong_host_key_is_refused_loudly(laptop: Laptop, world: World, bulk: bool) -> None:
    laptop.known_hosts.write_text(world.known_hosts().replace(world.host_key("login"), world.host_key("inner")))
    with pytest.raises(HostKeyError, match="NOT THE KNOWN ONE") as caught:
        host.connect(ALIAS, bulk=bulk)
    assert f"ssh-keygen -R '{worlds.LOGIN_NAME}'" in str(caught.value.remedy)


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("checking", ["ask", "no", "accept-new"])
def test_an_unknown_host_is_refused_whatever_the_configuration_says(laptop: Laptop, bulk: bool, checking: str) -> None:
    lines = laptop.known_hosts.read_text().splitlines(keepends=True)
    laptop.known_hosts.write_text("".join(line for line in lines if not line.startswith(worlds.LOGIN_NAME)))
    text = worlds.clifton_03(laptop.key, laptop.certificate, laptop.known_hosts)
    laptop.configure(text + f"\tStrictHostKeyChecking {checking}\n")
    before = laptop.known_hosts.read_text()
    with pytest.raises(HostKeyError, match="not known") as caught:
        host.connect(ALIAS, bulk=bulk)
    assert f"ssh {ALIAS}" in str(caught.value.remedy)
    assert laptop.known_hosts.read_text() == before


def test_who_has_host_keys_forgotten_is_not_sent_to_learn_them(laptop: Laptop) -> None:
    laptop.configure(f"Host *\n\tUserKnownHostsFile /dev/null\n\tGlobalKnownHostsFile none\n\tHostname {JUMP}\n")
    with pytest.raises(HostKeyError, match="not known") as caught:
        host.connect("jump")
    assert "name a file" in str(caught.value.remedy)


def test_a_revoked_host_key_is_refused(laptop: Laptop, world: World) -> None:
    revoked = f"@revoked * {world.host_key('login')}\n"
    laptop.known_hosts.write_text(revoked + world.known_hosts())
    with pytest.raises(HostError):
        host.connect(ALIAS)


def test_a_host_that_is_not_there_is_said_to_be_out_of_reach(laptop: Laptop) -> None:
    laptop.configure(f"Host nowhere\n\tHostname {JUMP}\n\tPort 9\n")
    with pytest.raises(ConnectionLostError, match="cannot be reached: Connection refused"):
        host.connect("nowhere")
    laptop.configure("Host nowhere\n\tHostname nowhere.invalid\n")
    with pytest.raises(ConnectionLostError, match="cannot be reached"):
        host.connect("nowhere")


def test_a_host_behind_a_jump_that_is_not_there_is_said_to_be_out_of_reach(laptop: Laptop) -> None:
    text = worlds.two_jumps(laptop)
    laptop.configure(text.replace("Hostname 127.0.0.1\n", "Hostname 127.0.0.1\n\tPort 9\n"))
    with pytest.raises(ConnectionLostError, match=r"hidden .*cannot be reached"):
        host.connect("hidden")


@pytest.mark.parametrize("program", ["yes hello 2>/dev/null", "sh -c 'echo hello; exit 3'", "/no/such", "true"])
def test_a_way_that_leads_to_no_server_is_named_and_no_library_speaks_of_it(laptop: Laptop, program: str) -> None:
    laptop.configure(f"Host there\n\tProxyCommand {program}\n")
    done = laptop.run([*SERVE, "status", "--host", "there"], check=False)
    assert done.returncode == 3
    assert re.search(r"^error: there \(there:22\): no SSH server answers: .+\n  → see what `ssh there` says\n\Z",
                     done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr


# Which of the two.


def test_commands_go_over_paramiko_and_bulk_over_openssh(laptop: Laptop) -> None:
    with host.connected(ALIAS) as first, host.connected(ALIAS, bulk=True) as second:
        assert isinstance(first, ParamikoHost)
        assert isinstance(second, OpensshHost)


def test_openssh_serves_where_paramiko_cannot_check_the_host(laptop: Laptop, world: World) -> None:
    """A host's certificate: paramiko has no such thing."""
    subprocess.run(["ssh-keygen", "-q", "-s", world.folder / "ca", "-I", "host", "-h", "-n", worlds.LOGIN_NAME,
                    world.folder / "host-login.pub"], check=True, capture_output=True)
    authority = " ".join((world.folder / "ca.pub").read_text().split()[:2])
    laptop.known_hosts.write_text(f"{JUMP} {world.host_key('jump')}\n@cert-authority {worlds.LOGIN_NAME} {authority}\n")
    world.restart("login", f"HostCertificate {world.folder}/host-login-cert.pub")
    try:
        with host.connected(ALIAS) as there:
            assert isinstance(there, OpensshHost)
    finally:
        world.restart("login")


def test_paramiko_serves_bulk_where_openssh_cannot_log_in(encrypted: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isambard_serve.ssh.keys.Keyring", lambda: Keyring(lambda _: "secret"))
    with host.connected(ALIAS, bulk=True) as there:
        assert isinstance(there, ParamikoHost)


# Commands.


def test_every_word_arrives_as_it_is(there: Host) -> None:
    words = ["a b", "'", '"', "$HOME", "`id`", "!x", "\\", "*", "a\nb", "", "é", "-n", "~"]
    done = there.run(["python3", "-c", "import sys; sys.stdout.write(repr(sys.argv[1:]))", *words])
    assert done.stdout.decode() == repr(words)


def test_input_arrives_and_what_is_printed_is_kept_apart(there: Host) -> None:
    done = there.run(["sh", "-c", "cat; echo err >&2; exit 7"], stdin=bytes(range(256)) * 5000)
    assert done == Done(returncode=7, stdout=bytes(range(256)) * 5000, stderr=b"err\n")


def test_a_program_that_wants_none_of_its_input_is_no_error(there: Host) -> None:
    assert there.run(["true"], stdin=b"x" * (1 << 20)).returncode == 0


def test_a_signal_that_ends_a_program_is_told(there: Host) -> None:
    assert there.run(["sh", "-c", "kill -9 $$"]).returncode == 128 + 9


def test_a_program_that_is_not_there_is_told(there: Host) -> None:
    done = there.run(["no-such-program"])
    assert done.returncode == 127
    assert b"no-such-program" in done.stderr


def test_a_program_that_does_not_answer_is_given_up(there: Host) -> None:
    with pytest.raises(HostError, match="no answer within 0 s"):
        there.run(["sleep", "60"], timeout_s=0.3)
    assert there.run(["echo", "on"]).stdout == b"on\n"


def test_a_running_program_can_be_talked_to(there: Host) -> None:
    with there.start(["sh", "-c", 'echo begun >&2; while read line; do echo "got $line"; done; exit 3']) as stream:
        for word in (b"one", b"two"):
            stream.stdin.write(word + b"\n")
            stream.stdin.flush()
            assert stream.stdout.readline() == b"got " + word + b"\n"
        assert wait_until(lambda: stream.stderr, 10, "its stderr") == "begun\n"
        stream.stdin.close()
        assert stream.stdout.read() == b""
        assert stream.wait() == 3


def test_several_programs_share_one_connection(there: Host) -> None:
    script = ["sh", "-c", "echo $SSH_CONNECTION; cat"]
    streams = [there.start(script) for _ in range(5)]
    assert {stream.stdout.readline() for stream in streams} == {there.run(script).stdout}
    for stream in streams:
        stream.close()


def test_what_a_thread_sends_after_a_channels_close_does_not_end_the_connection(
        laptop: Laptop, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[tuple[Any, paramiko.Message]] = []

    def held_up(channel: Any) -> None:
        with channel.lock:
            late.append((channel, channel._send_eof()))

    with closing(by_paramiko()) as there, echo(world) as port:
        with monkeypatch.context() as patch, there.dial(worlds.COMPUTE, port) as stream:
            patch.setattr(paramiko.Channel, "shutdown_write", held_up)
            stream.stdin.close()
        ((channel, message),) = late
        channel.transport.global_request("a round trip", wait=True)  # then the server has forgotten the channel
        channel.transport._send_user_message(message)
        assert there.run(["echo", "hello"]).stdout == b"hello\n"


def test_files_are_written_and_read_by_sftp(there: Host, world: World) -> None:
    data = os.urandom(3 << 20)
    path = str(world.home / "by-sftp")
    with closing(there.sftp()) as sftp:
        with sftp.open(path, "wb") as file:
            file.set_pipelined()
            file.write(data)
        with sftp.open(path, "rb") as file:
            file.prefetch(len(data))
            assert file.read() == data


def test_an_address_that_only_the_far_side_reaches_is_dialled(there: Host, world: World) -> None:
    with echo(world) as port, there.dial(worlds.COMPUTE, port) as stream:
        stream.stdin.write(b"hello")
        stream.stdin.flush()
        assert stream.stdout.read(5) == b"hello"
        stream.stdin.close()
        assert stream.stdout.read() == b""


@contextmanager
def echo(world: World) -> Iterator[int]:
    """A server on the compute node that sends back what it gets."""
    with world.compute.entered():
        listener = socket.create_server((worlds.COMPUTE, 0))

    def serve() -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    with listener:
        yield int(listener.getsockname()[1])
        thread.join()


# Noise.

NOISE = """\
echo "Welcome to Isambard-AI"; echo "   {}"; echo "profile: warning" >&2; printf 'no newline'
read -r eaten; export FROM_PROFILE=yes; trap "echo trapped" EXIT
module load brics/userenv
"""


@pytest.fixture
def noisy(world: World) -> Iterator[None]:
    """A login node that greets, warns, reads, says goodbye, and has no `module` in shells that are not interactive."""
    noise = {".bash_profile": NOISE, ".bashrc": "echo bashrc\n", ".bash_logout": "echo bye; exit 9\n"}
    paths = [world.home / name for name in noise]
    before = {path: path.read_text() for path in paths if path.exists()}
    for path in paths:
        path.write_text(noise[path.name])
    world.restart("login", f"Banner {world.folder}/banner")
    (world.folder / "banner").write_text("*** authorised use only ***\n")
    yield
    for path in paths:
        path.unlink()
    for path, text in before.items():
        path.write_text(text)
    world.restart("login")


@pytest.mark.parametrize("make", HOSTS)
def test_what_a_login_shell_says_of_itself_is_no_part_of_the_answer(laptop: Laptop, noisy: None,
                                                                    make: Callable[[str], Host]) -> None:
    with closing(make(ALIAS)) as there:
        done = there.run(["sh", "-c", 'cat; echo "$FROM_PROFILE"; echo err >&2'], stdin=b"typed ")
        assert done == Done(returncode=0, stdout=b"typed yes\n", stderr=b"err\n")


def test_a_login_shell_that_ends_before_the_command_is_named(laptop: Laptop, world: World) -> None:
    (world.home / ".bash_profile").write_text("echo quota exceeded >&2; exit 4\n")
    try:
        with host.connected(ALIAS) as there, pytest.raises(
                HostError, match=r"ended with 4 .*: quota exceeded") as caught:
            there.run(["true"])
        assert "~/.bash_profile" in str(caught.value.remedy)
    finally:
        (world.home / ".bash_profile").unlink()


@pytest.mark.parametrize("name", ["..", "x" * 300, "\udcff"])
def test_a_name_that_no_host_can_have_is_said_to_be_out_of_reach(laptop: Laptop, name: str) -> None:
    with pytest.raises(HostError, match="cannot be reached"):
        host.connect(name)


# A connection that goes away.


def cut(world: World, after: Path) -> threading.Thread:
    """Kill every session's server once the file ``after`` is there."""
    def kill() -> None:
        wait_until(after.exists, 20, "the program to begin")
        world.cut_sessions()

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.parametrize("make", HOSTS)
def test_a_server_that_goes_away_in_a_command_is_an_error_of_its_own(laptop: Laptop, world: World,
                                                                     make: Callable[[str], Host]) -> None:
    begun = world.home / "begun"
    begun.unlink(missing_ok=True)
    with closing(make(ALIAS)) as there:
        killer = cut(world, begun)
        with pytest.raises(ConnectionLostError, match="connection was lost"):
            there.run(["sh", "-c", 'echo part; touch "$1"; sleep 60', "sh", str(begun)])
        killer.join()


@pytest.mark.parametrize("bulk", [False, True])
def test_what_is_safe_to_repeat_is_done_again_over_a_new_connection(laptop: Laptop, world: World, bulk: bool) -> None:
    begun = world.home / "begun"
    begun.unlink(missing_ok=True)
    killer = cut(world, begun)
    script = 'if test -e "$1"; then echo again; else touch "$1"; sleep 60; fi'
    done = host.persistently(ALIAS, lambda there: there.run(["sh", "-c", script, "sh", str(begun)]), bulk=bulk,
                             pauses_s=[0, 0])
    killer.join()
    assert done.stdout == b"again\n"


def test_a_certificate_that_expires_meanwhile_ends_the_attempts(laptop: Laptop, world: World) -> None:
    def work(there: Host) -> None:
        laptop.certify(laptop.key, "-2h:-1h")
        world.cut_sessions()
        there.run(["true"])

    with pytest.raises(HostError, match="expired") as caught:
        host.persistently(ALIAS, work, pauses_s=[0, 60])
    assert not isinstance(caught.value, ConnectionLostError)


def test_a_connection_that_is_lost_again_and_again_is_given_up(laptop: Laptop, world: World) -> None:
    tries = []

    def work(there: Host) -> None:
        tries.append(there)
        world.cut_sessions()
        there.run(["true"])

    with pytest.raises(ConnectionLostError):
        host.persistently(ALIAS, work, pauses_s=[0, 0])
    assert len(tries) == 3


def test_connections_that_lasted_may_be_lost_any_number_of_times(laptop: Laptop, world: World) -> None:
    tries = []

    def work(there: Host) -> str:
        tries.append(there)
        if len(tries) <= 4:
            world.cut_sessions()
            there.run(["true"])
        return "done"

    assert host.persistently(ALIAS, work, pauses_s=[0], lasting_s=0) == "done"


def test_no_connection_of_openssh_outlives_a_command_that_was_killed(laptop: Laptop, world: World) -> None:
    hold = f"from isambard_serve.ssh import opensshhost as o; x = o.OpensshHost('{ALIAS}'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as command:
        assert command.stdout
        assert command.stdout.readline() == b"\n"
        assert world.laptop.processes("ssh")
        command.kill()
    wait_until(lambda: not world.laptop.processes("ssh"), 10, "the connection to end")


# A long way.


@pytest.mark.parametrize(("delay_s", "mbit_s"), [(0.05, 200), (0.1, 10)])
@pytest.mark.parametrize("make", HOSTS)
def test_a_slow_link_changes_nothing_but_the_time(laptop: Laptop, world: World, make: Callable[[str], Host],
                                                  delay_s: float, mbit_s: float) -> None:
    with world.slow(delay_s, mbit_s) as port:
        laptop.configure(worlds.clifton_03(laptop.key, laptop.certificate, laptop.known_hosts, port))
        laptop.known_hosts.write_text(world.known_hosts(port))
        data = os.urandom(1 << 18)
        with closing(make(ALIAS)) as there:
            assert there.run(["cat"], stdin=data).stdout == data
