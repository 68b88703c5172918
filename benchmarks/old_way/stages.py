"""Who had the time: CPU and wall seconds by stage, each moment counted for the innermost stage alone.

For one thread that never holds a stage across an await: what an event loop runs meanwhile would be counted there.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class StageClock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        """CPU seconds of the whole process, its compute threads included."""
        self.wall_s: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = (0.0, 0.0)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count what happens inside for `stage`."""
        self._settle()
        self._open.append(stage)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def move(self, source: str, target: str, cpu_s: float) -> None:
        """Count CPU seconds of one stage, measured elsewhere, for another."""
        self.cpu_s[source] -= cpu_s
        self.wall_s[source] -= cpu_s
        self.cpu_s[target] += cpu_s
        self.wall_s[target] += cpu_s

    def _settle(self) -> None:
        now = time.process_time(), time.perf_counter()
        if self._open:
            self.cpu_s[self._open[-1]] += now[0] - self._since[0]
            self.wall_s[self._open[-1]] += now[1] - self._since[1]
        self._since = now
