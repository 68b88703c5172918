"""Progress of a command on standard error: a live screen in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from telemetry.progress import LogReporter, install, step_line

_SHOWN_STEPS = 8
_LINE_EVERY_S = 60.0
_COLUMNS = (
    ("step", "{0:.0f}", "step"),
    ("return", "{0:+.2f}", "train/return_mean"),
    ("decisions", "{0:.0f}", "train/decisions"),
    ("lag", "{0:.0f}", "train/policy_lag_max"),
    ("tokens/s", "{0:.0f}", "rollout/tokens_per_s"),
    ("prefix hits", "{0:.0%}", "rollout/prefix_hit_share"),
    ("entropy", "{0:.2f}", "train/entropy"),
    ("rollout s", "{0:.2f}", "time/rollout_s"),
    ("train s", "{0:.2f}", "time/train_s"),
    ("Prefect", "{0:.1%}", "time/orchestration_share"),
)


class LiveReporter:
    """A bar for the current stage, a table of the last steps, and what the trainer waits for."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=live.console,
        )
        self._stages: dict[str, TaskID] = {}
        self._steps: list[Mapping[str, float]] = []
        self._total = 0
        self._waiting = ""

    def stage(self, name: str, done: int, total: int) -> None:
        """See `Reporter.stage`; a finished stage leaves the screen."""
        if done >= total:
            if name in self._stages:
                self._bars.remove_task(self._stages.pop(name))
        elif name in self._stages:
            self._bars.update(self._stages[name], completed=done, total=total)
        else:
            self._stages[name] = self._bars.add_task(name, completed=done, total=total)
        self._draw()

    def step(self, step: int, steps: int, figures: Mapping[str, float]) -> None:
        """See `Reporter.step`."""
        self._steps = [*self._steps, {"step": step, **figures}][-_SHOWN_STEPS:]
        self._total = steps
        self._draw()

    def waiting(self, what: str) -> None:
        """See `Reporter.waiting`."""
        self._waiting = what
        self._draw()

    def say(self, sentence: str) -> None:
        """See `Reporter.say`; the line scrolls away above the screen."""
        self._live.console.print(sentence, highlight=False)

    def _draw(self) -> None:
        parts: list[Table | Text | Progress] = []
        if self._steps:
            table = Table(box=None, padding=(0, 1))
            for title, _, _ in _COLUMNS:
                table.add_column(title, justify="right")
            for figures in self._steps:
                table.add_row(*(form.format(figures[name]) if name in figures else "" for _, form, name in _COLUMNS))
            last = int(self._steps[-1]["step"])
            doing = f"the trainer waits for {self._waiting}" if self._waiting else "the trainer trains"
            state = doing if last < self._total else "training is done"
            parts += [table, Text(f"{last} of {self._total} steps; {state}", style="dim")]
        self._live.update(Group(*parts, self._bars))


class LineReporter(LogReporter):
    """Plain lines on standard error: one per step and per finished stage, and one a minute while a stage goes on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock

    def stage(self, name: str, done: int, total: int) -> None:
        """See `Reporter.stage`; the line of a step includes its rollouts."""
        now = self._clock()
        if name.startswith("rollout "):
            return
        if done == total:
            self._said.pop(name, None)
            self.say(f"{name}: {total} done")
        elif now - self._said.setdefault(name, now) >= _LINE_EVERY_S:
            self._said[name] = now
            self.say(f"{name}: {done} of {total}")

    def step(self, step: int, steps: int, figures: Mapping[str, float]) -> None:
        """See `Reporter.step`."""
        self.say(step_line(step, steps, figures))

    def say(self, sentence: str) -> None:
        """See `Reporter.say`."""
        sys.stderr.write(sentence + "\n")
        sys.stderr.flush()


@contextmanager
def progress_shown() -> Iterator[None]:
    """Show progress for the length of the block."""
    console = Console(stderr=True)
    try:
        if not console.is_terminal:
            install(LineReporter())
            yield
            return
        with Live(console=console, refresh_per_second=8, transient=False) as live:
            install(LiveReporter(live))
            yield
    finally:
        install(LogReporter())
