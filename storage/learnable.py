"""What the past start groups of each snapshot returned. The spread of the last ones measures how much it still teaches.

The result depends only on rows before a given start group. So a step that is repeated after a crash gets the same values. The
sampler turns them into weights and draws.
"""

import threading
from collections.abc import Mapping
from pathlib import Path

from storage.index import Index
from storage.runs import RunPaths

RECENT = 4
"""Newest start groups of a snapshot that count; older ones were played by a policy that has changed since."""
_SQL = Path(__file__).with_name("spread.sql").read_text()


class PastReturns:
    """Looks at past start groups with an index of its own; any thread may call it."""

    def __init__(self, paths: RunPaths, *, blend: Mapping[str, float], discount: float) -> None:
        """`blend` and `discount` of the returns, as in the trainer's settings."""
        self._index = Index(paths, blend=blend, discount=discount, start_groups=True)
        self._lock = threading.Lock()

    def spreads_before(self, producer: str, start_group: int) -> dict[str, float]:
        """Snapshot id -> mean over its newest `RECENT` start groups of the mean spread of their advantage groups.

        Start groups of the `producer` with smaller numbers than `start_group` count, if they could be trained on.
        """
        with self._lock:
            self._index.refresh()
            values = {"producer": producer, "before": start_group, "recent": RECENT}
            return dict(self._index.connection.execute(_SQL, values).fetchall())
