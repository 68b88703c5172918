"""What a benchmark came to: figures, the targets they are held against, and the machine they were taken on.

Promises: a target that holds no figure of this benchmark is an error, a figure that could not be taken is left out together
with its target. Never ends a process: whether a missed target is a failure is the caller's choice.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from telemetry.machine import environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound that a figure is to keep: `at_least`, `at_most`, or both."""

    at_least: float | None = None
    """Smallest value that holds."""
    at_most: float | None = None
    """Largest value that holds."""

    def holds(self, value: float) -> bool:
        """True if `value` keeps the bound; never for a value that is not a number."""
        above = self.at_least is None or value >= self.at_least
        return above and (self.at_most is None or value <= self.at_most) and value == value

    def as_object(self) -> dict[str, float]:
        """The bounds that are set, by name."""
        return {name: bound for name in ("at_least", "at_most") if (bound := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Figures of one benchmark."""

    benchmark: str
    """Its name, as `entente bench` takes it."""
    metrics: Mapping[str, float]
    """Figure by name; the unit is the name's last word."""
    targets: Mapping[str, Target]
    """Bounds of some of the figures."""

    @property
    def ok(self) -> bool:
        """True if every target holds."""
        return all(target.holds(self.metrics[name]) for name, target in self.targets.items())

    def as_object(self) -> dict[str, Any]:
        """The outcome as one JSON object, machine included."""
        return {
            "benchmark": self.benchmark,
            "metrics": dict(self.metrics),
            "targets": {name: target.as_object() for name, target in self.targets.items()},
            "ok": self.ok,
            "machine": environment(),
        }


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds that this process spends in `work`."""
    began = time.process_time()
    work()
    return time.process_time() - began


def median_ms(work: Callable[[], object], *, rounds: int, calls: int) -> float:
    """CPU milliseconds of one call: the median over `rounds` of the mean over `calls`."""

    def round_of_calls() -> None:
        for _ in range(calls):
            work()

    return median(cpu_seconds(round_of_calls) for _ in range(rounds)) / calls * 1000
