"""The outcome of a benchmark (figures, targets, machine), and the clocks of the benchmarks.

Targets apply only to figures that were measured at full scale. The caller decides whether a missed target is a failure.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from entente.telemetry.errors import DataError
from entente.telemetry.machine import environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    at_least: float | None = None
    at_most: float | None = None

    def holds(self, value: float) -> bool:
        """False for NaN."""
        above = self.at_least is None or value >= self.at_least
        return above and (self.at_most is None or value <= self.at_most) and value == value

    def as_object(self) -> dict[str, float]:
        return {name: bound for name in ("at_least", "at_most") if (bound := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    benchmark: str
    metrics: Mapping[str, float]
    """Figure by name; the last word of a name is its unit."""
    targets: Mapping[str, Target]

    @property
    def ok(self) -> bool:
        return all(target.holds(self.metrics[name]) for name, target in self.targets.items())

    def as_object(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "metrics": dict(self.metrics),
            "targets": {name: target.as_object() for name, target in self.targets.items()},
            "ok": self.ok,
            "machine": environment(),
        }


def timed(work: Callable[[], Any], clock: Callable[[], float] = lambda: time.process_time()) -> tuple[float, Any]:
    """Seconds of `work` by `clock`, and its result. The default clock is CPU seconds of all threads of this process."""
    began = clock()
    result = work()
    return clock() - began, result


def waited(work: Callable[[], Any]) -> tuple[float, Any]:
    return timed(work, lambda: time.perf_counter())


def require_result(result: object, what: str) -> None:
    if not result:
        raise DataError(f"the benchmark did not find {what}, so its time is meaningless: report this bug")


def cpu_seconds(work: Callable[[], object]) -> float:
    return timed(work)[0]


def median_ms(work: Callable[[], object], *, rounds: int, calls: int) -> float:
    """CPU milliseconds of one call: the median over `rounds` of the mean over `calls`."""

    def round_of_calls() -> None:
        for _ in range(calls):
            work()

    return median(cpu_seconds(round_of_calls) for _ in range(rounds)) / calls * 1000
