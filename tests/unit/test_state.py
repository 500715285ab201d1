"""A run's state follows from its events and Slurm's answer; what nobody can say is unknown, never failed."""

from __future__ import annotations

import pytest

from isambard_serve import state
from isambard_serve.records import STATES, Event, Jobs, SubmittedJob, Writer
from isambard_serve.slurm import ENDED, JobState
from tests.unit.helpers import submitted

JOBS = submitted()
RUNNING = {"101": JobState(state="RUNNING")}


def events(*happened: str) -> list[Event]:
    """Events written as ``writer:event`` or ``writer:event:reason``, a second apart."""
    result = []
    for second, text in enumerate(happened):
        writer, event, reason = (*text.split(":", 2), None)[:3]
        known: dict[str, Writer] = {"submit": "submit", "serve": "serve", "sweep": "sweep", "cancel": "cancel",
                                    "inside": "inside"}
        result.append(Event(time=second, writer=known[str(writer)], event=str(event), reason=reason))
    return result


WAY = ["submit:submitted", "serve:started", "serve:loading", "serve:ready", "sweep:measuring",
       "serve:stopping:all done", "serve:done:2 points"]


@pytest.mark.parametrize("steps", range(1, len(WAY) + 1))
def test_a_run_goes_through_its_states_one_by_one(steps: int) -> None:
    reached, _ = state.fold(events(*WAY[:steps]), JOBS, RUNNING, 0.0)
    assert reached == WAY[steps - 1].split(":")[1]
    assert STATES.index(reached) == steps - 1


def test_a_state_once_reached_is_not_left_for_an_earlier_one() -> None:
    assert state.fold(events("serve:ready", "sweep:measuring", "serve:loading"), JOBS, RUNNING, 0.0)[0] == "measuring"


def test_a_server_for_people_that_was_measured_is_ready_again() -> None:
    told = ["serve:ready", "inside:measuring", "inside:ready:2 points"]
    assert state.fold(events(*told), JOBS, RUNNING, 0.0)[0] == "ready"
    assert state.fold(events(*told, "inside:measuring"), JOBS, RUNNING, 0.0)[0] == "measuring"
    assert state.fold(events(*told, "serve:stopping"), JOBS, RUNNING, 0.0)[0] == "stopping"


def test_a_job_that_was_sent_again_begins_anew_and_says_why() -> None:
    again = events("submit:submitted", "serve:started", "serve:resent:node nid001 is bad")
    waiting = {"101": JobState(state="PENDING", reason="Priority")}
    assert state.fold(again, JOBS, waiting, 900.0) == ("submitted", "node nid001 is bad; Slurm: PENDING (Priority)")
    assert state.fold(again, JOBS, {}, 900.0) == ("submitted", "node nid001 is bad")
    later = [*again, *events("serve:x", "serve:x", "serve:x", "serve:started", "serve:ready")[3:]]
    assert state.fold(later, JOBS, RUNNING, 0.0)[0] == "ready"


def test_a_cancellation_counts_also_if_the_job_was_sent_again_at_the_same_time() -> None:
    told = events("serve:started", "cancel:cancelled:on request", "serve:resent:node nid001 is bad")
    assert state.fold(told, JOBS, {}, None) == ("cancelled", "on request")


@pytest.mark.parametrize("word", ["sweep:waiting", "sweep:point", "serve:note", "sweep:finished", "sweep:left"])
def test_a_writers_own_words_are_no_states(word: str) -> None:
    assert state.fold(events("serve:ready", word), JOBS, RUNNING, 0.0) == ("ready", None)


def test_the_first_failure_is_the_cause_and_the_rest_its_consequence() -> None:
    told = events("serve:ready", "serve:failed:the engine died", "sweep:failed:no engine", "serve:done:x")
    assert state.fold(told, JOBS, {}, None) == ("failed", "the engine died")


@pytest.mark.parametrize("told", [
    ["cancel:cancelled:on request", "sweep:failed:gone"], ["sweep:failed:gone", "cancel:cancelled:on request"]])
def test_a_cancellation_that_was_asked_for_explains_every_failure(told: list[str]) -> None:
    assert state.fold(events("serve:ready", *told), JOBS, {}, None) == ("cancelled", "on request")


def test_what_the_run_itself_said_of_its_end_is_not_changed_by_slurm() -> None:
    answer = {"101": JobState(state="FAILED", reason="1:0")}
    assert state.fold(events("serve:done:all measured"), JOBS, answer, None) == ("done", "all measured")


@pytest.mark.parametrize("word", sorted(ENDED))
@pytest.mark.parametrize("told", [["submit:submitted"], ["serve:started"], ["serve:stopping:asked"]])
def test_slurms_terminal_state_ends_a_run_that_never_said_so(word: str, told: list[str]) -> None:
    end, reason = state.fold(events(*told), JOBS, {"101": JobState(state=word, reason="0:9")}, 0.0)
    assert end == ("cancelled" if word == "CANCELLED" else "failed")
    assert reason is not None
    assert reason.startswith("Slurm: ")
    if word not in ("CANCELLED", "COMPLETED"):
        assert reason == f"Slurm: {word} (0:9)"


def test_a_job_that_completed_without_a_word_has_failed() -> None:
    end, reason = state.fold(events("serve:ready"), JOBS, {"101": JobState(state="COMPLETED", reason="0:0")}, 0.0)
    assert (end, reason) == ("failed", "Slurm: the serve job ended before the run said that it was done")


def test_the_sweeps_own_end_is_not_the_runs() -> None:
    assert state.fold(events("serve:ready"), JOBS, {**RUNNING, "102": JobState(state="FAILED")}, 0.0)[0] == "ready"


@pytest.mark.parametrize(("answer", "reason"), [
    ({}, None),
    ({"101": JobState(state="PENDING", reason="Priority")}, "Slurm: PENDING (Priority)"),
    ({"101": JobState(state="CONFIGURING")}, "Slurm: CONFIGURING"),
])
def test_a_run_that_waits_says_what_slurm_says_of_it(answer: dict[str, JobState], reason: str | None) -> None:
    assert state.fold(events("submit:submitted"), JOBS, answer, None) == ("submitted", reason)


def test_silence_while_slurm_says_nothing_is_unknown_and_not_failed() -> None:
    told = events("serve:started", "serve:loading")
    assert state.fold(told, JOBS, {}, state.SILENCE_S) == ("loading", None)
    now, reason = state.fold(told, JOBS, {}, state.SILENCE_S + 1)
    assert now == "unknown"
    assert reason is not None
    assert "last was loading" in reason
    assert state.fold(told, JOBS, {}, None)[0] == "loading"


def test_a_silent_run_that_slurm_calls_running_goes_on() -> None:
    assert state.fold(events("serve:loading"), JOBS, RUNNING, 3600.0) == ("loading", None)


def test_a_long_wait_in_the_queue_is_no_silence() -> None:
    assert state.fold(events("submit:submitted"), JOBS, {}, 3600.0)[0] == "submitted"


def test_a_submission_that_was_cut_off_before_slurms_answer_is_unknown_and_says_where_to_look() -> None:
    jobs = Jobs(jobs=(SubmittedJob(role="serve", job_id=None, time=1.0),))
    now, reason = state.fold([], jobs, {}, None)
    assert now == "unknown"
    assert reason is not None
    assert "squeue" in reason


@pytest.mark.parametrize("told", [[], ["serve:started"]])
def test_a_submission_that_was_cut_off_between_its_jobs_says_so_while_it_runs(told: list[str]) -> None:
    jobs = submitted(sweep=None, complete=False)
    now, reason = state.fold(events(*told), jobs, RUNNING, 0.0)
    assert now == (told[0].split(":")[1] if told else "submitted")
    assert reason is not None
    assert "cut off" in reason
    assert "cancel this run" in reason


def test_a_submission_that_was_refused_has_failed() -> None:
    told = events("submit:failed:not submitted: no credit")
    assert state.fold(told, submitted(sweep=None, complete=False), {}, None) == ("failed", "not submitted: no credit")


def test_a_run_that_was_only_written_is_unknown_until_somebody_sends_it_by_hand() -> None:
    assert state.fold([], Jobs(), {}, None) == ("unknown", "nothing was submitted")
    started = [Event(time=1, writer="serve", event="started", job_id="301")]
    assert state.fold(started, Jobs(), {}, 0.0) == ("started", None)
    timeout = {"301": JobState(state="TIMEOUT", reason="0:0")}
    assert state.fold(started, Jobs(), timeout, 0.0) == ("failed", "Slurm: TIMEOUT (0:0)")


CONTROLLED = Jobs(jobs=(SubmittedJob(role="controller", job_id="local-1-1", time=1.0),), complete=True)
RUNG = Jobs(jobs=(*CONTROLLED.jobs, SubmittedJob(role="serve", job_id="local-2-2", time=2.0)), complete=True)
GONE = JobState(state="FAILED", reason="its process has ended")


@pytest.mark.parametrize("answer", [{}, {"local-1-1": JobState(state="RUNNING")}])
def test_a_rung_without_slurm_waits_for_its_turn_as_long_as_its_controller_lives(answer: dict[str, JobState]) -> None:
    assert state.fold(events("submit:submitted"), CONTROLLED, answer, None) == ("submitted", "waits for its turn")


def test_a_rung_whose_controller_has_ended_before_its_turn_has_failed() -> None:
    assert state.fold(events("submit:submitted"), CONTROLLED, {"local-1-1": GONE}, None) == (
        "failed", "the process that was to run it has ended")


def test_a_rung_that_runs_does_not_need_its_controller_any_more() -> None:
    answer = {"local-1-1": GONE, "local-2-2": JobState(state="RUNNING")}
    assert state.fold(events("submit:submitted"), RUNG, answer, None)[0] == "submitted"
    assert state.fold(events("serve:started", "serve:loading"), RUNG, answer, 3600.0) == ("loading", None)


def test_a_process_that_ended_without_a_word_has_failed_and_slurm_is_not_named() -> None:
    now, reason = state.fold(events("serve:loading"), RUNG, {"local-2-2": GONE}, 0.0)
    assert (now, reason) == ("failed", "FAILED (its process has ended)")


def test_whoever_measures_inside_the_serve_job_is_heard_as_the_sweep_is() -> None:
    measuring = [*events("serve:ready"), Event(time=5, writer="inside", event="measuring")]
    assert state.fold(measuring, JOBS, RUNNING, 0.0) == ("measuring", None)
    failed = [*measuring, Event(time=6, writer="inside", event="failed", reason="no point left a result")]
    assert state.fold(failed, JOBS, RUNNING, 0.0) == ("failed", "no point left a result")


@pytest.mark.parametrize(("told", "answer", "end"), [
    (["serve:started", "serve:loading"], RUNNING, ("loading", None)),
    (["serve:started", "serve:ready", "serve:done:2 points"], {}, ("done", "2 points")),
    (["serve:started", "serve:failed:the engine died"], {}, ("failed", "the engine died")),
    (["serve:started", "cancel:cancelled:on request"], {}, ("cancelled", "on request")),
    ([], {}, ("failed", "not submitted: no answer")),
    ([], RUNNING, ("failed", "not submitted: no answer")),
])
def test_a_submission_that_was_taken_for_refused_and_ran_all_the_same_is_what_its_jobs_say(
        told: list[str], answer: dict[str, JobState], end: tuple[str, str | None]) -> None:
    assert state.fold(events("submit:failed:not submitted: no answer", *told), JOBS, answer, 0.0) == end


def test_a_job_that_slurm_is_clearing_away_is_stopping_whatever_its_files_say() -> None:
    clearing = {"101": JobState(state="COMPLETING", reason="JobLaunchFailure")}
    assert state.fold(events("serve:ready", "sweep:measuring"), JOBS, clearing, 9999.0) == (
        "stopping", "Slurm: COMPLETING (JobLaunchFailure)")
    assert state.fold(events("serve:ready", "serve:stopping:all done"), JOBS, clearing, 0.0)[0] == "stopping"
