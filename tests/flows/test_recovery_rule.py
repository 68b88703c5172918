"""What becomes of a training run whose flow run ended, decided from what its files and its process say."""

from dataclasses import replace

import pytest

from flows.recovery_rule import PAUSE_S, Attempts, Facts, decide, was_cancelled

LOST = Facts(
    run="mine",
    finished=False,
    held=False,
    process="gone",
    silent=False,
    error="",
    step=7,
    attempts=Attempts(),
)


def test_a_run_whose_process_is_gone_goes_on():
    decision = decide(LOST)
    assert (decision.action, decision.kill, decision.wait_s) == ("resume", False, 0)
    assert decision.attempts == Attempts(count=1, step=7)


@pytest.mark.parametrize("process", ["gone", "elsewhere", None])
def test_whoever_cannot_be_seen_any_more_is_no_reason_to_wait(process):
    assert decide(replace(LOST, process=process, silent=True)).action == "resume"


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (replace(LOST, finished=True), "is done"),
        (replace(LOST, held=True), "is being trained by another process"),
        (replace(LOST, held=True, process="elsewhere", silent=True), "is being trained by another process"),
    ],
    ids=["it is done", "its lock is held", "its lock is held from another host"],
)
def test_a_run_that_needs_nobody_is_left_alone(facts: Facts, why: str):
    decision = decide(facts)
    assert decision.action == "leave" and why in decision.because


def test_a_run_that_was_only_not_heard_of_is_shown_as_running_again():
    assert decide(replace(LOST, silent=True, held=True, process="alive")).action == "revive"


def test_a_process_that_was_stopped_holds_the_lock_and_is_ended_first():
    decision = decide(replace(LOST, silent=True, held=True, process="stopped"))
    assert decision.action == "resume" and decision.kill


@pytest.mark.parametrize("error", ["InputError", "DataError"])
def test_what_another_try_would_only_meet_again_is_told_instead(error: str):
    decision = decide(replace(LOST, error=error))
    assert decision.action == "give_up" and error in decision.because


def test_a_crash_loop_ends_after_so_many_tries_ever_further_apart_and_is_told():
    attempts, waits = Attempts(), []
    for _ in range(3):
        decision = decide(replace(LOST, attempts=attempts))
        assert decision.action == "resume"
        attempts, waits = decision.attempts, [*waits, decision.wait_s]
    assert waits == [0, PAUSE_S, 2 * PAUSE_S]
    over = decide(replace(LOST, attempts=attempts))
    assert over.action == "give_up" and "3 times at step 7" in over.because


def test_a_step_makes_earlier_tries_good():
    tired = Attempts(count=3, step=7)
    decision = decide(replace(LOST, step=8, attempts=tired))
    assert decision.action == "resume" and decision.attempts == Attempts(count=1, step=8)


@pytest.mark.parametrize(
    ("states", "cancelled"),
    [
        ("RUNNING CRASHED", False),
        ("RUNNING CANCELLING CRASHED", True),
        ("RUNNING CANCELLING FAILED CANCELLED", True),
        ("PENDING CANCELLED CRASHED", True),
        ("RUNNING PAUSED FAILED", True),
        ("RUNNING PAUSED SCHEDULED PENDING RUNNING CRASHED", False),
        ("RUNNING CANCELLING CANCELLED SCHEDULED PENDING RUNNING CRASHED", False),
        ("RUNNING CANCELLING CRASHED RUNNING CANCELLING CRASHED", True),
        ("", False),
    ],
)
def test_what_somebody_cancelled_stays_ended_until_somebody_begins_it_again(states: str, cancelled: bool):
    assert was_cancelled(states.split()) == cancelled
