"""Progress messages: one reporter, which a display can replace, and escaping of untrusted text.

Flows and tasks report to `reporter()` and never print. Prefect stores the `entente` log (prefect.yaml), so the UI shows it."""

import logging
import shlex
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

logger = logging.getLogger("entente")


class GameProgress:
    """Progress of whole games in movement phases, two a game year. An ended game counts in full."""

    def __init__(self, name: str, games: int, years: int) -> None:
        self._name, self._games, self._each = name, games, 2 * years
        self._played: dict[str, int] = {}

    def played(self, game: str, phase: str) -> None:
        if phase.endswith("M"):
            self._tell(game, min(self._each - 1, self._played.get(game, 0) + 1))

    def ended(self, game: str) -> None:
        self._tell(game, self._each)

    def _tell(self, game: str, played: int) -> None:
        self._played[game] = played
        reporter().stage(f"{self._name}, movement phases", sum(self._played.values()), self._games * self._each)


_LINE = (
    ("train/reward", "return {0:+.2f}"),
    ("train/decisions", "decisions {0:.0f}"),
    ("train/policy_lag_max", "lag {0:.0f}"),
    ("rollout/tokens_per_s", "{0:.0f} tokens/s"),
    ("time/rollout_s", "rollout {0:.1f} s"),
    ("time/train_s", "train {0:.1f} s"),
)


def step_line(step: int, steps: int, figures: Mapping[str, float]) -> str:
    return "  ".join([f"step {step}/{steps}", *(form.format(figures[name]) for name, form in _LINE if name in figures)])


_to_log = partial(logger.info, "%s")


class Reporter:
    """Writes a line per step and finished stage, and regular ones while a stage runs."""

    def __init__(
        self,
        write: Callable[[str], None] = _to_log,
        *,
        every_s: float = 10.0,
        rollouts: bool = True,
        clock: Callable[[], float] = lambda: time.monotonic(),
    ) -> None:
        """`every_s`: seconds between lines of a running stage; `rollouts`: also report stages of rollouts."""
        self._write, self._every_s, self._rollouts, self._clock = write, every_s, rollouts, clock
        self._reported: dict[str, float] = {}

    def stage(self, name: str, done: int, total: int) -> None:
        """Complete when `done` equals `total`."""
        now = self._clock()
        if not self._rollouts and name.startswith("rollout "):
            return
        if done == total:
            self._reported.pop(name, None)
            self._write(f"{name}: {total} done")
        elif now - self._reported.setdefault(name, now) >= self._every_s:
            self._reported[name] = now
            self._write(f"{name}: {done} of {total}")

    def step(self, step: int, steps: int, figures: Mapping[str, float]) -> None:
        self._write(step_line(step, steps, figures))

    def say(self, sentence: str) -> None:
        self._write(sentence)


_reporter = Reporter()


def reporter() -> Reporter:
    return _reporter


def install(onlooker: Reporter) -> None:
    global _reporter
    _reporter = onlooker


def shown(text: str, *, keep: str = "") -> str:
    """Escape non-printing characters except `keep`, so untrusted text cannot control the terminal."""
    return "".join(letter if letter.isprintable() or letter in keep else _escape(letter) for letter in text)


def view_command(run: Path, step: int = 0) -> str:
    """The command that opens the live page of a run, by its folder, or of one of its steps."""
    words = ["entente", "view", run.name, *(["--step", str(step)] if step else [])]
    return shlex.join([*words, "--runs-root", str(run.parent.resolve())])


def shorten(text: str, most: int, *, keep: str = "") -> str:
    """At most `most` characters of a text of any size, escaped as in `shown`; the last one says that more were left out."""
    return shown(text, keep=keep) if len(text) <= most else shown(text[: most - 1], keep=keep) + "…"


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode()
