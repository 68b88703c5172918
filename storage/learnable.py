"""Which snapshots still teach: the spread of the returns of the start groups that were played from them.

Promise: the answer depends on the rows before a given start group and on nothing that is published later, so a step that is
drawn again after a crash is drawn from the same figures.
Never: weigh or draw; that is the sampler's.
"""

import threading
from collections.abc import Mapping
from pathlib import Path

from storage.index import Index
from storage.runs import RunPaths

RECENT = 4
"""Start groups of a snapshot that count, the newest ones: the policy that played older ones is long gone."""
_SQL = Path(__file__).with_name("spread.sql").read_text()


class PastSpreads:
    """An index of its own over a run's rows, read on by whichever thread asks."""

    def __init__(self, paths: RunPaths, *, blend: Mapping[str, float], discount: float) -> None:
        """`blend` and `discount`: of the returns, as the trainer has them."""
        self._index = Index(paths, blend=blend, discount=discount)
        self._one_at_a_time = threading.Lock()

    def before(self, producer: str, start_group: int) -> dict[str, float]:
        """Mean spread by snapshot id over the `producer`'s start groups with smaller numbers."""
        with self._one_at_a_time:
            self._index.refresh()
            values = {"producer": producer, "before": start_group, "recent": RECENT}
            rows = self._index.connection.execute(_SQL, values).fetchall()
        return {snapshot_id: float(spread) for snapshot_id, spread, _ in rows}
