"""CPU seconds by stage; each moment counts for the innermost open stage only.

For one thread that awaits nothing inside a stage: other work of the event loop would be counted there.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class StageClock:
    """CPU seconds of the whole process by stage, including its compute threads."""

    def __init__(self) -> None:
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count the work inside for `stage`."""
        self._count_open_stage()
        self._open.append(stage)
        try:
            yield
        finally:
            self._count_open_stage()
            self._open.pop()

    def move(self, source: str, target: str, cpu_s: float) -> None:
        """Count CPU seconds of stage `source`, measured elsewhere, for stage `target` instead."""
        self.cpu_s[source] -= cpu_s
        self.cpu_s[target] += cpu_s

    def _count_open_stage(self) -> None:
        now = time.process_time()
        if self._open:
            self.cpu_s[self._open[-1]] += now - self._since
        self._since = now
