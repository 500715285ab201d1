"""The claim: one measures at a time, and nobody waits for a claimant that is gone."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest

from isambard_serve import claim
from isambard_serve.claim import Claim, Holder, SupersededError, Vigil
from isambard_serve.run import RunDir
from tests.support.waiting import wait_until
from tests.unit.helpers import small_plan, written_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return written_run(small_plan(tmp_path))


class Clock:
    """A clock that a test moves."""

    now = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def test_a_claim_says_who_took_it_and_the_highest_number_holds(run: RunDir) -> None:
    assert claim.newest(run) == 0
    first = Claim.take(run, "sweep", "102", over=0)
    first.check()
    holder = msgspec.json.decode((run.claims / "0001.json").read_bytes(), type=Holder)
    assert (holder.holder, holder.job_id, claim.newest(run)) == ("sweep", "102", 1)


def test_a_claimant_that_was_superseded_finds_out_before_its_next_write(run: RunDir) -> None:
    first = Claim.take(run, "sweep", "102", over=0)
    second = Claim.take(run, "inside", "101", over=1)
    with pytest.raises(SupersededError, match="has taken over"):
        first.check()
    second.check()


def test_of_many_that_take_the_same_claim_one_gets_it(run: RunDir) -> None:
    taken: list[Claim] = []
    lost: list[SupersededError] = []
    barrier = threading.Barrier(8)

    def take() -> None:
        barrier.wait()
        try:
            taken.append(Claim.take(run, "sweep", None, over=0))
        except SupersededError as error:
            lost.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(lost)) == (1, 7)
    assert [path.name for path in run.claims.iterdir()] == ["0001.json"]


def test_a_heartbeat_is_counted_until_its_claimant_leaves(run: RunDir) -> None:
    held = Claim.take(run, "sweep", "102", over=0)
    path = claim.beat_file(run, held.number)
    with held.beating(0.01):
        wait_until(lambda: path.exists() and int(path.read_text() or 0) >= 2, 10, "two beats", interval_s=0.005)
    assert not any("(beat)" in thread.name for thread in threading.enumerate())


def test_a_beat_that_could_not_be_written_is_followed_by_one_that_can(run: RunDir) -> None:
    held = Claim.take(run, "sweep", "102", over=0)
    path = claim.beat_file(run, held.number)
    path.mkdir()
    with held.beating(0.01):
        time.sleep(0.03)
        path.rmdir()
        wait_until(path.is_file, 10, "a beat", interval_s=0.005)
    assert int(path.read_text()) > 0


def test_a_claimant_that_does_not_come_is_waited_for_no_longer_than_its_grace(run: RunDir) -> None:
    clock = Clock()
    vigil = Vigil(run, grace_s=120, silence_s=60, clock=clock)
    clock.now += 120
    assert vigil.reason_to_take_over() is None
    clock.now += 1
    assert vigil.reason_to_take_over() == "no sweep came within 120 s"


def test_a_claimant_whose_heartbeat_goes_on_is_left_alone_however_long_it_takes(run: RunDir) -> None:
    clock = Clock()
    vigil = Vigil(run, grace_s=120, silence_s=60, clock=clock)
    held = Claim.take(run, "sweep", "102", over=0)
    for count in range(10):
        claim.beat_file(run, held.number).write_text(f"{count}\n")
        assert vigil.reason_to_take_over() is None
        clock.now += 59


def test_a_heartbeat_that_stands_still_is_a_reason_to_take_over(run: RunDir) -> None:
    clock = Clock()
    vigil = Vigil(run, grace_s=120, silence_s=60, clock=clock)
    held = Claim.take(run, "sweep", "102", over=0)
    claim.beat_file(run, held.number).write_text("7\n")
    assert vigil.reason_to_take_over() is None
    clock.now += 60
    assert vigil.reason_to_take_over() is None
    clock.now += 1
    assert vigil.reason_to_take_over() == "the sweep's heartbeat stood still for 60 s"


def test_a_claimant_that_never_beats_is_gone_too(run: RunDir) -> None:
    clock = Clock()
    vigil = Vigil(run, grace_s=120, silence_s=60, clock=clock)
    Claim.take(run, "sweep", "102", over=0)
    assert vigil.reason_to_take_over() is None
    clock.now += 61
    assert vigil.reason_to_take_over() is not None
