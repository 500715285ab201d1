"""What `ssh -G` says, and what it leaves to be worked out."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from isambard_serve.errors import UsageError
from isambard_serve.ssh import config
from isambard_serve.ssh.config import Hop

ANSWERS = {
    "site": "user me.project\nhostname login.example\nport 22\nproxyjump %r@jump.%n\nidentityfile ~/.ssh/id\n",
    "jump.site": "user {user}\nhostname jump.example\nport 22\n",
    "two": "user me\nhostname two.example\nport 22\nproxyjump a@first:2201,ssh://second:2202\n",
    "first": "user {user}\nhostname 10.0.0.1\nport {port}\n",
    "second": "user me\nhostname 10.0.0.2\nport {port}\nproxyjump ignored\n",
    "nested": "user me\nhostname nested.example\nport 22\nproxyjump middle\n",
    "middle": "user me\nhostname middle.example\nport 22\nproxyjump first\n",
    "loop": "user me\nhostname loop.example\nport 22\nproxyjump loop\n",
    "six": "user me\nhostname six.example\nport 22\nproxyjump [::1]:2206\n",
    "::1": "user me\nhostname ::1\nport {port}\n",
    "wrong": "user me\nhostname wrong.example\nport 22\nproxyjump %q@x\n",
}


def ask(arguments: Sequence[str]) -> str:
    options = dict(zip(arguments[:-2:2], arguments[1:-2:2], strict=True))
    assert arguments[-2] == "--"
    return ANSWERS[arguments[-1]].format(user=options.get("-l", "me"), port=options.get("-p", "22"))


def ways(alias: str) -> list[str]:
    return [f"{hop.user}@{hop.hostname}:{hop.port}" for hop in config.route(alias, ask)]


def test_the_tokens_of_a_jump_are_those_of_its_target() -> None:
    assert ways("site") == ["me.project@jump.example:22", "me.project@login.example:22"]


def test_a_list_of_jumps_is_visited_in_its_order_whatever_its_last_host_says() -> None:
    assert ways("two") == ["a@10.0.0.1:2201", "me@10.0.0.2:2202", "me@two.example:22"]


def test_a_jump_that_has_a_jump_of_its_own_is_followed() -> None:
    assert ways("nested") == ["me@10.0.0.1:22", "me@middle.example:22", "me@nested.example:22"]


def test_a_jump_may_be_an_address_of_ipv6() -> None:
    assert ways("six") == ["me@::1:2206", "me@six.example:22"]


def test_a_configuration_that_leads_back_to_itself_is_named() -> None:
    with pytest.raises(UsageError, match="leads back to itself"):
        config.route("loop", ask)


def test_a_token_that_openssh_does_not_have_there_is_named() -> None:
    with pytest.raises(UsageError, match="'%q'"):
        config.route("wrong", ask)


@pytest.mark.parametrize("alias", ["", "-oProxyCommand=evil", "two words", "a\nb"])
def test_what_is_no_name_of_a_host_never_reaches_ssh(alias: str) -> None:
    with pytest.raises(UsageError, match="no name of a host"):
        config.route(alias, lambda _: pytest.fail("asked"))


def test_the_files_of_a_host_are_whole_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    hop = config.parse("user me\nhostname x\nport 2222\nidentityfile ~/.ssh/id_%r\nidentityfile /a key/id\n"
                       "certificatefile /c/%n-cert.pub\nuserknownhostsfile ~/known /with a space/known\n"
                       "globalknownhostsfile none\n", "alias")
    assert hop.identity_files == ("/home/me/.ssh/id_me", "/a key/id")
    assert hop.certificate_files == ("/c/alias-cert.pub",)
    assert hop.known_hosts == ("/home/me/known", "/with a space/known")
    assert hop.host_key_name == "[x]:2222"


def test_of_the_ciphers_that_are_allowed_the_quickest_come_first() -> None:
    said = "ciphers chacha20-poly1305@openssh.com,aes128-ctr,aes128-gcm@openssh.com,aes256-gcm@openssh.com\n"
    assert config.parse(said, "x").quick_ciphers == (
        "aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "chacha20-poly1305@openssh.com", "aes128-ctr")
    assert config.parse("ciphers aes256-ctr\n", "x").quick_ciphers == ("aes256-ctr",)
    assert config.parse("", "x").quick_ciphers == ()


def test_settings_that_only_openssh_heeds_are_noticed() -> None:
    said = "hostname x\nrevokedhostkeys /r\nidentityagent SSH_AUTH_SOCK\npkcs11provider none\n"
    assert config.parse(said, "x").only_openssh == ("revokedhostkeys",)


@pytest.mark.parametrize(("setting", "timeout_s"), [("none", 15), ("0", 15), ("7", 7)])
def test_the_time_to_connect_is_limited_in_any_case(setting: str, timeout_s: float) -> None:
    assert config.parse(f"connecttimeout {setting}\n", "x").connect_timeout_s == timeout_s


def test_the_real_ssh_answers_as_it_is_understood(tmp_path: Path) -> None:
    text = ('Host jump.*.isambard\n\tHostname jump.example\n\tIdentityFile "/k/id"\n'
            'Host *.isambard !jump.*.isambard\n\tHostname login.example\n\tProxyJump %r@jump.%n\n'
            '\tIdentityFile "/k/id"\n'
            'Host jump.p.isambard\n\tCertificateFile "/c/p cert.pub"\nHost p.isambard\n\tUser me.p\n')
    (tmp_path / "config").write_text(text)

    def real(arguments: Sequence[str]) -> str:
        return subprocess.run(["ssh", "-F", tmp_path / "config", "-G", *arguments], check=True, capture_output=True,
                              text=True).stdout

    jump, target = config.route("p.isambard", real)
    assert (jump.alias, jump.user, jump.hostname) == ("jump.p.isambard", "me.p", "jump.example")
    assert jump.certificate_files == ("/c/p cert.pub",)
    assert (target.user, target.hostname, target.identity_files) == ("me.p", "login.example", ("/k/id",))


def test_a_host_key_alias_is_the_name_of_its_key() -> None:
    assert Hop(alias="a", hostname="h", port=2222, user="u", host_key_alias="k").host_key_name == "k"
