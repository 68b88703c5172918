"""Decides how to recover a training run whose flow run ended. Pure functions of facts about its files and process:
`flows/recover_training.py` collects the facts and executes the decision."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flows.work_record import Process

Action = Literal["leave", "revive", "resume", "give_up"]
HOPELESS = ("InputError", "DataError")
"""Errors that would recur on every attempt: wrong input, or a damaged file."""
ATTEMPTS_MAX = 3
"""Restarts at one step before an alert."""
_CANCELS, BEGINS = ("CANCELLING", "CANCELLED", "PAUSED"), ("SCHEDULED", "PENDING", "RUNNING")
PAUSE_S = 30.0
"""Seconds before the second attempt; each further attempt waits this much longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """Restarts of a run without a new recorded step."""

    count: int = 0
    step: int = 0
    """The newest recorded step at the last attempt."""

    def at(self, step: int) -> "Attempts":
        return self if step <= self.step else Attempts(count=0, step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    run: str
    finished: bool
    """All steps are done and the summary exists."""
    held: bool
    """A process holds the run's lock."""
    process: Process | None
    """Process of the flow run that ended; None if it was never recorded."""
    silent: bool
    """The flow run counts as crashed only because its heartbeats stopped."""
    error: str
    """Name of the error that ended it; empty for none."""
    step: int
    attempts: Attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryAction:
    action: Action
    because: str
    kill: bool = False
    """Kill the stopped process first."""
    attempts: Attempts = Attempts()
    wait_s: float = 0.0


def was_cancelled(states: Sequence[str]) -> bool:
    """True if a user cancelled or suspended the flow run since its last start; `states` are its state types, oldest first. A
    cancelled process reports a crash. Prefect sets Cancelled only some seconds later, or never if the worker is lost; it sets a
    suspended run to Failed after the timeout of its form, five minutes."""
    ours = [state for state in states if state in _CANCELS + BEGINS]
    return bool(ours) and ours[-1] in _CANCELS


def decide(facts: Facts) -> RecoveryAction:
    run = f"run '{facts.run}'"
    if facts.finished:
        return RecoveryAction(action="leave", because=f"{run} is done")
    if facts.silent and facts.process == "alive":
        return RecoveryAction(action="revive", because=f"{run} is still being trained: only its heartbeats were lost")
    if facts.held and facts.process != "stopped":
        return RecoveryAction(action="leave", because=f"{run} is being trained by another process")
    if facts.error in HOPELESS:
        return RecoveryAction(action="give_up", because=f"{run} ended with an {facts.error}, which would recur on every attempt")
    attempts = facts.attempts.at(facts.step)
    if attempts.count >= ATTEMPTS_MAX:
        return RecoveryAction(
            action="give_up",
            because=f"{run} was restarted {attempts.count} times at step {facts.step} and made no progress: read its log, "
            "then resume it",
            attempts=attempts,
        )
    counted = replace(attempts, count=attempts.count + 1, step=max(attempts.step, facts.step))
    return RecoveryAction(
        action="resume",
        because=f"{run} continues after step {facts.step}, attempt {counted.count} of {ATTEMPTS_MAX}",
        kill=facts.process == "stopped",
        attempts=counted,
        wait_s=PAUSE_S * (counted.count - 1),
    )
