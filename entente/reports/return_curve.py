"""The learning curve of a run: points with intervals, each the mean return of several steps.

A step of a small run has too few start groups for an interval, and a long run has more steps than a plot can show. So each point
covers consecutive steps: enough for an interval, and such that the curve has at most `MOST_POINTS`. Mean and interval come from
the ledgers of the steps; of many steps, evenly spaced ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from entente.evaluation.intervals import FEWEST_CLUSTERS, Estimate, estimate
from storage.arrow_files import as_array

MOST_POINTS = 40
GROUPS_WANTED = 2 * FEWEST_CLUSTERS
"""Start groups of a point, estimated from the first step; with fewer than `FEWEST_CLUSTERS` there is no interval."""
STEPS_READ = 5
"""Steps of a point whose ledgers are read; more if these have too few start groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    first: int
    last: int
    """The steps, both included."""
    steps_read: int
    """Number of steps whose ledgers were read."""
    rows: int
    """Rows that these steps trained on."""
    mean_return: Estimate
    """Mean return of those rows; start groups are resampled whole."""


def return_curve(steps: Sequence[int], rows_of: Callable[[int], pa.Table | None]) -> list[CurvePoint]:
    """The curve over these steps, which are in ascending order.

    Args:
        rows_of: returns the ledger of a step, or None. Called for the steps that are read, and twice for the first.
    """
    if not steps:
        return []
    first = rows_of(steps[0])
    groups = max(1, len(set(_groups(first))) if first is not None else 1)
    needed = -(-GROUPS_WANTED // groups)
    together = max(-(-len(steps) // MOST_POINTS), needed)
    edges = np.linspace(0, len(steps), max(1, len(steps) // together) + 1).round().astype(int).tolist()
    points = (_point(steps[begin:end], max(needed, STEPS_READ), rows_of) for begin, end in pairwise(edges))
    return [point for point in points if point is not None]


def _point(steps: Sequence[int], most: int, rows_of: Callable[[int], pa.Table | None]) -> CurvePoint | None:
    """The point of these steps, from at most `most` of them; None if none trained on a row."""
    places = np.unique(np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(int)).tolist()
    tables = [table for place in places if (table := rows_of(steps[place])) is not None and table.num_rows]
    if not tables:
        return None
    # Arrow's own conversion would import pandas, which takes longer than all the rest.
    returns = np.concatenate([np.from_dlpack(as_array(table["return"])) for table in tables])
    clusters = [group for table in tables for group in _groups(table)]
    return CurvePoint(
        first=steps[0],
        last=steps[-1],
        steps_read=len(places),
        rows=len(returns),
        mean_return=estimate(returns, clusters, steps[0]),
    )


def _groups(ledger: pa.Table) -> list[str]:
    return [
        f"{shard}:{group}" for shard, group in zip(ledger["shard"].to_pylist(), ledger["start_group"].to_pylist(), strict=True)
    ]
