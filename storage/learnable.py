"""What the past start groups of each snapshot returned. The spread of the last ones measures how much it still teaches.

The result depends only on rows before a given start group. So a step that is repeated after a crash gets the same values. The
sampler turns them into weights and draws.
"""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from storage.index import Index
from storage.runs import RunPaths

RECENT = 4
"""Newest start groups of a snapshot that count; older ones were played by a policy that has changed since."""
_SQL = Path(__file__).with_name("spread.sql").read_text()


class PastGroups(NamedTuple):
    """The start groups of a snapshot that could be trained on."""

    start_groups: int
    """Their number."""
    spread: float
    """Mean over the newest `RECENT` of the mean spread of their advantage groups."""
    mean_return: float
    """Mean over the same."""


class PastReturns:
    """Looks at past start groups with an index of its own; any thread may call it."""

    def __init__(self, paths: RunPaths, *, blend: Mapping[str, float], discount: float) -> None:
        """`blend` and `discount` of the returns, as in the trainer's settings."""
        self._index = Index(paths, blend=blend, discount=discount, start_groups=True)
        self._lock = threading.Lock()

    def before(self, producer: str, start_group: int) -> dict[str, PastGroups]:
        """Snapshot id -> the `producer`'s start groups with smaller numbers than `start_group`, where there are some."""
        with self._lock:
            self._index.refresh()
            values = {"producer": producer, "before": start_group, "recent": RECENT}
            rows = self._index.connection.execute(_SQL, values).fetchall()
        return {snapshot_id: PastGroups(*facts) for snapshot_id, *facts in rows}
