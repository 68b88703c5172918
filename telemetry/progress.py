"""What a run says while it runs: one reporter, which whoever looks on installs.

Flows and tasks report to `reporter()` and never print. Without an onlooker the words go to the `entente` log, a line each;
prefect.yaml has Prefect keep that log, so that a run started from its UI shows them there.
"""

import logging
import time
from collections.abc import Mapping
from typing import Protocol

logger = logging.getLogger("entente")


class Reporter(Protocol):
    """An onlooker."""

    def stage(self, name: str, done: int, total: int) -> None:
        """A piece of long work moved on; `done` equal to `total` ends it."""
        ...

    def step(self, step: int, steps: int, figures: Mapping[str, float]) -> None:
        """A training step is done, with its metrics."""
        ...

    def waiting(self, what: str) -> None:
        """What the trainer waits for now ('' when it trains)."""
        ...

    def say(self, sentence: str) -> None:
        """Something worth a line of its own."""
        ...


_LINE = (
    ("train/return_mean", "return {0:+.2f}"),
    ("train/decisions", "decisions {0:.0f}"),
    ("train/policy_lag_max", "lag {0:.0f}"),
    ("rollout/tokens_per_s", "{0:.0f} tokens/s"),
    ("time/rollout_s", "rollout {0:.1f} s"),
    ("time/train_s", "train {0:.1f} s"),
)
"""Figures of a step's line, and how each is written."""


def step_line(step: int, steps: int, figures: Mapping[str, float]) -> str:
    """The plain line of a step; a figure that the step lacks is left out."""
    return "  ".join([f"step {step}/{steps}", *(form.format(figures[name]) for name, form in _LINE if name in figures)])


class LogReporter:
    """Plain lines to the log; stages at their end and at most every ten seconds."""

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def stage(self, name: str, done: int, total: int) -> None:
        """See `Reporter.stage`."""
        now = time.monotonic()
        if done == total or now - self._said.setdefault(name, now) > 10:
            self._said[name] = now
            logger.info("%s: %d of %d", name, done, total)
        if done == total:
            self._said.pop(name, None)

    def step(self, step: int, steps: int, figures: Mapping[str, float]) -> None:
        """See `Reporter.step`."""
        logger.info("%s", step_line(step, steps, figures))

    def waiting(self, what: str) -> None:
        """A line for every wait would drown the rest."""

    def say(self, sentence: str) -> None:
        """See `Reporter.say`."""
        logger.info("%s", sentence)


_reporter: Reporter = LogReporter()


def reporter() -> Reporter:
    """The installed onlooker."""
    return _reporter


def install(onlooker: Reporter) -> None:
    """Make `onlooker` hear of everything from now on."""
    global _reporter
    _reporter = onlooker
