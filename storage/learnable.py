"""The mean spread of returns of each snapshot's last start groups: a measure of how much the snapshot still teaches.

The result depends only on rows before a given start group. So a step that is repeated after a crash gets the same values. The
sampler turns spreads into weights and draws.
"""

import threading
from collections.abc import Mapping
from pathlib import Path

from storage.index import Index
from storage.runs import RunPaths

RECENT = 4
"""Newest start groups of a snapshot that count; older ones were played by a policy that has changed since."""
_SQL = Path(__file__).with_name("spread.sql").read_text()


class PastSpreads:
    """Computes spreads with an index of its own; any thread may call it."""

    def __init__(self, paths: RunPaths, *, blend: Mapping[str, float], discount: float) -> None:
        """`blend` and `discount` of the returns, as in the trainer's settings."""
        self._index = Index(paths, blend=blend, discount=discount, start_groups=True)
        self._lock = threading.Lock()

    def before(self, producer: str, start_group: int) -> dict[str, float]:
        """Snapshot id -> mean spread over the `producer`'s start groups with smaller numbers than `start_group`."""
        with self._lock:
            self._index.refresh()
            values = {"producer": producer, "before": start_group, "recent": RECENT}
            rows = self._index.connection.execute(_SQL, values).fetchall()
        return {snapshot_id: float(spread) for snapshot_id, spread, _ in rows}
