"""The learning curve of a run: points with intervals, each the mean return of consecutive steps.

One step of a small run has too few start groups for an interval. A point covers enough steps for one, and at most `MOST_POINTS`
are drawn. Figures come from the steps' ledgers; of many steps, evenly spaced ones.
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
"""Start groups per point, estimated from the first step; fewer than `FEWEST_CLUSTERS` give no interval."""
STEPS_READ = 5
"""Ledgers read per point; more if these have too few start groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    first: int
    last: int
    rows: int
    mean_return: Estimate
    """Bootstrapped over whole start groups."""


def return_curve(steps: Sequence[int], rows_of: Callable[[int], pa.Table | None]) -> list[CurvePoint]:
    """`steps`: ascending. `rows_of`: the ledger of a step, or None."""
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
        rows=len(returns),
        mean_return=estimate(returns, clusters, steps[0]),
    )


def _groups(ledger: pa.Table) -> list[str]:
    return [
        f"{shard}:{group}" for shard, group in zip(ledger["shard"].to_pylist(), ledger["start_group"].to_pylist(), strict=True)
    ]
