"""What is to be done about a training run whose flow run ended, decided from what its files and its process say.

Pure: knows neither Prefect nor a file. `flows/recover_training.py` gathers the facts and does what is decided.
"""

from dataclasses import dataclass, replace
from typing import Literal

from pipeline.work_record import Process

Action = Literal["leave", "revive", "resume", "give_up"]
HOPELESS = ("InputError", "DataError")
"""Errors that another try would only meet again: the user's input, a damaged file that no one can mend."""
PAUSE_S = 30.0
"""Seconds that the second try waits; each further one waits that much longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """How often in a row a run was started again without a step between."""

    count: int = 0
    step: int = 0
    """The newest recorded step at that time."""

    def at(self, step: int) -> "Attempts":
        """As they count once the run stands at `step`: progress makes them good."""
        return self if step <= self.step else Attempts(count=0, step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of the run."""

    run: str
    finished: bool
    """It has all its steps and its summary."""
    held: bool
    """A process holds its lock: somebody trains it."""
    process: Process | None
    """Of the flow run that ended; None if it never came to say which it is."""
    silent: bool
    """Prefect calls the flow run crashed only because no sign of life came from it."""
    error: str
    """Name of the error that it ended with; empty for none."""
    step: int
    """The newest recorded step."""
    attempts: Attempts
    attempts_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryAction:
    """What to do, and why, in a sentence."""

    action: Action
    because: str
    kill: bool = False
    """End the stopped process first."""
    attempts: Attempts = Attempts()
    wait_s: float = 0.0
    """Seconds until the run is started again."""


def decide(facts: Facts) -> RecoveryAction:
    """What is to be done about the run."""
    run = f"run '{facts.run}'" if facts.run else "a run without a name yet"
    if facts.finished:
        return RecoveryAction(action="leave", because=f"{run} is done")
    if facts.silent and facts.process == "alive":
        return RecoveryAction(
            action="revive", because=f"{run} is being trained all the time: only its signs of life did not arrive"
        )
    if facts.held and facts.process != "stopped":
        return RecoveryAction(action="leave", because=f"{run} is being trained by another process")
    if facts.error in HOPELESS:
        return RecoveryAction(
            action="give_up", because=f"{run} ended with an {facts.error}, which another try would only meet again"
        )
    attempts = facts.attempts.at(facts.step)
    if attempts.count >= facts.attempts_max:
        times = f"{attempts.count} times" if attempts.count else "never, as pipeline.recoveries_max says,"
        return RecoveryAction(
            action="give_up",
            because=f"{run} was started again {times} at step {facts.step} and got no further: look at its log, then resume it",
            attempts=attempts,
        )
    mended = replace(attempts, count=attempts.count + 1, step=max(attempts.step, facts.step))
    return RecoveryAction(
        action="resume",
        because=f"{run} goes on after step {facts.step}, attempt {mended.count} of {facts.attempts_max}",
        kill=facts.process == "stopped",
        attempts=mended,
        wait_s=PAUSE_S * (mended.count - 1),
    )
