"""Messages of a run while it works: one reporter, which a display can replace, and text from others made safe to show.

Flows and tasks report to `reporter()` and never print. By default messages go to the `entente` log, one line each. prefect.yaml
makes Prefect store that log, so that the UI shows the messages of a run that it started.
"""

import logging
import time
from collections.abc import Mapping
from typing import Protocol

logger = logging.getLogger("entente")


class Reporter(Protocol):
    """An onlooker."""

    def stage(self, name: str, done: int, total: int) -> None:
        """Progress of a long piece of work; it is complete when `done` equals `total`."""
        ...

    def step(self, step: int, steps: int, figures: Mapping[str, float]) -> None:
        """A training step has finished, with its metrics."""
        ...

    def say(self, sentence: str) -> None:
        """A message."""
        ...


class GameProgress:
    """Progress of whole games as a stage, counted in movement phases, two a game year. A game that has ended counts as whole."""

    def __init__(self, name: str, games: int, years: int) -> None:
        self._name, self._games, self._each = name, games, 2 * years
        self._played: dict[str, int] = {}

    def played(self, game: str, phase: str) -> None:
        """A phase of a game was played."""
        if phase.endswith("M"):
            self._tell(game, min(self._each - 1, self._played.get(game, 0) + 1))

    def ended(self, game: str) -> None:
        """A game has ended."""
        self._tell(game, self._each)

    def _tell(self, game: str, played: int) -> None:
        self._played[game] = played
        reporter().stage(f"{self._name}, movement phases", sum(self._played.values()), self._games * self._each)


_LINE = (
    ("train/return_mean", "return {0:+.2f}"),
    ("train/decisions", "decisions {0:.0f}"),
    ("train/policy_lag_max", "lag {0:.0f}"),
    ("rollout/tokens_per_s", "{0:.0f} tokens/s"),
    ("time/rollout_s", "rollout {0:.1f} s"),
    ("time/train_s", "train {0:.1f} s"),
)
"""Metrics in a step's line, with their formats."""


def step_line(step: int, steps: int, figures: Mapping[str, float]) -> str:
    """The line of a step; missing metrics are left out."""
    return "  ".join([f"step {step}/{steps}", *(form.format(figures[name]) for name, form in _LINE if name in figures)])


class LogReporter:
    """Writes lines to the log; a stage at its end and at most every ten seconds."""

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

    def say(self, sentence: str) -> None:
        """See `Reporter.say`."""
        logger.info("%s", sentence)


_reporter: Reporter = LogReporter()


def reporter() -> Reporter:
    """The installed reporter."""
    return _reporter


def install(onlooker: Reporter) -> None:
    """Install `onlooker` as the reporter."""
    global _reporter
    _reporter = onlooker


def shown(text: str, *, keep: str = "") -> str:
    """The text with every character that does not print as its escape, such as \\\\x1b; those in `keep` stay.

    So text from files, rows and models cannot move a terminal's cursor, change colours, or reverse the direction of a line.
    """
    return "".join(letter if letter.isprintable() or letter in keep else _escape(letter) for letter in text)


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode()
