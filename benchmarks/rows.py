"""`rows`: whether an index grows with the past: choosing a step's rows among ten thousand, a million and a hundred million.

`select_growth` is the time of a choice among the most rows over that among the fewest. Every version plays as many rows at each
size, so the choice is equally wide wherever the past is longer than a policy lag of sixteen; among ten thousand rows all can be
chosen. `memory_gb` is the peak resident memory of the process that chooses among the most rows, its opening included. What is
measured, and how, is in `benchmarks/growth/rows.py`.
"""

from collections.abc import Sequence

from benchmarks.growth.rows import measure_rows
from benchmarks.outcome import Outcome, Target
from telemetry.errors import InputError

SIZES, QUICK_SIZES = (10_000, 1_000_000, 100_000_000), (10_000, 100_000, 1_000_000)
TARGETS = {
    "select_1e6_ms": Target(at_most=100.0),
    "select_1e8_ms": Target(at_most=250.0),
    "select_growth": Target(at_most=3.0),
    "memory_gb": Target(at_most=4.0),
}


def bench_rows(*, sizes: Sequence[int] = SIZES, rounds: int = 7, seed: int = 0) -> Outcome:
    """Measure each size.

    Raises:
        InputError: `rounds` is below 1.
        DataError: a process failed.
    """
    if rounds < 1:
        raise InputError(f"There is nothing to measure in {rounds} rounds: at least 1.")
    points = measure_rows(sizes, rounds=rounds, seed=seed).points
    metrics: dict[str, float] = {}
    for rows, figures in points.items():
        for figure, value in figures.items():
            words, _, unit = figure.rpartition("_")
            metrics[f"{words}_{_short(rows)}_{unit}"] = value
    if len(points) > 1:
        metrics["select_growth"] = points[max(points)]["select_ms"] / points[min(points)]["select_ms"]
        metrics["memory_gb"] = points[max(points)]["peak_mb"] / 1000
    return Outcome(
        benchmark="rows",
        metrics=metrics,
        targets={name: target for name, target in TARGETS.items() if name in metrics},
        scaled_down=("select_growth", "memory_gb") if max(points, default=0) < SIZES[-1] else (),
    )


def _short(rows: int) -> str:
    """A number of rows as in "1e6"."""
    return f"{rows:.0e}".replace("e+0", "e").replace("e+", "e")
