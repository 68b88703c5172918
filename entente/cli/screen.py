"""Progress of a command on standard error: plain lines, and in a terminal bars below them."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from entente.telemetry.progress import LogReporter, install, step_line

_LINE_EVERY_S = 60.0


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


class BarReporter(LineReporter):
    """Lines as elsewhere, above a bar for each stage that goes on."""

    def __init__(self, bars: Progress) -> None:
        super().__init__()
        self._bars = bars
        self._stages: dict[str, TaskID] = {}

    def stage(self, name: str, done: int, total: int) -> None:
        """See `Reporter.stage`; a finished stage leaves the screen."""
        if done >= total:
            if name in self._stages:
                self._bars.remove_task(self._stages.pop(name))
        elif name in self._stages:
            self._bars.update(self._stages[name], completed=done, total=total)
        else:
            self._stages[name] = self._bars.add_task(name, completed=done, total=total)

    def say(self, sentence: str) -> None:
        """See `Reporter.say`."""
        self._bars.console.print(sentence, highlight=False, markup=False)


@contextmanager
def progress_shown() -> Iterator[None]:
    """Show progress for the length of the block."""
    console = Console(stderr=True)
    try:
        if not console.is_terminal:
            install(LineReporter())
            yield
            return
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, refresh_per_second=8) as bars:
            install(BarReporter(bars))
            yield
    finally:
        install(LogReporter())
