"""Wall time of a step by named span; overlapping spans count once, and an open one counts up to now."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Spans:
    """(name, start, end) in monotonic seconds; thread-safe."""

    def __init__(self) -> None:
        self._spans: dict[object, tuple[str, float, float]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the block, even if it raises."""
        key, start = object(), time.monotonic()
        with self._lock:
            self._spans[key] = name, start, math.inf
        try:
            yield
        finally:
            with self._lock:
                self._spans[key] = name, start, time.monotonic()

    def seconds(self, name: str, since: float, until: float) -> float:
        """Covered by at least one span called `name`."""
        return _union([(a, b) for known, a, b in self._all() if known == name], since, until)

    def alone(self, name: str, since: float, until: float, *, or_with: str = "") -> float:
        """Covered by spans called `name` and by no others, or by none but those called `or_with`."""
        counted = [span for span in self._all() if span[0] != or_with]
        others = [(a, b) for known, a, b in counted if known != name]
        return _union([(a, b) for _, a, b in counted], since, until) - _union(others, since, until)

    def forget(self, before: float) -> None:
        with self._lock:
            self._spans = {key: span for key, span in self._spans.items() if span[2] >= before}

    def _all(self) -> list[tuple[str, float, float]]:
        with self._lock:
            return list(self._spans.values())


def _union(intervals: list[tuple[float, float]], since: float, until: float) -> float:
    covered, reached = 0.0, since
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, until)
        if end > start:
            covered += end - start
            reached = end
    return covered
