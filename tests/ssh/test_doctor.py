"""The way to a login node, against real servers: the certificate's time, and whether it lets one in."""

from __future__ import annotations

from isambard_serve import doctor
from tests.ssh.world import ALIAS, Laptop


def looked() -> dict[str, doctor.Check]:
    """What doctor says of the way."""
    return {check.name: check for check in doctor.way(ALIAS)}


def test_a_good_certificate_and_a_login_are_both_told(laptop: Laptop) -> None:
    checks = looked()
    assert {name: check.state for name, check in checks.items()} == {"certificate": "ok", "login": "ok"}
    assert str(laptop.certificate) in checks["certificate"].found
    assert checks["login"].found.count(" → ") == 1


def test_an_expired_certificate_is_named_with_what_renews_it(laptop: Laptop) -> None:
    laptop.certify(laptop.key, "-2h:-1h")
    checks = looked()
    assert (checks["certificate"].state, checks["login"].state) == ("fail", "fail")
    assert "clifton auth" in (checks["certificate"].remedy or "")


def test_one_that_ends_soon_is_worth_a_word(laptop: Laptop) -> None:
    laptop.certify(laptop.key, "-2h:+10m")
    checks = looked()
    assert (checks["certificate"].state, checks["login"].state) == ("warn", "ok")
