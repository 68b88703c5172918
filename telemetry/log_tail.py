"""The newest lines of a process's log, kept in memory and numbered, so that another process can ask for those since a number.

The memory is bounded. Several threads may use it. It never makes its caller fail.
"""

import logging
import threading
from collections import deque
from dataclasses import asdict, dataclass

KEPT = 500
"""Lines."""
LONGEST = 2000
"""Characters of a line, tracebacks included; the end is kept, because it names the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of a log."""

    number: int
    """Number of the line, counted from 1 since the process started."""
    time: float
    """Seconds since 1970."""
    level: str
    """INFO, WARNING, ERROR or CRITICAL."""
    text: str


class LogTail(logging.Handler):
    """A logging handler that keeps the newest lines."""

    def __init__(self, level: int = logging.INFO) -> None:
        super().__init__(level)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        self._lines: deque[LogLine] = deque(maxlen=KEPT)
        self._number, self._guard = 0, threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        try:
            text = self.format(record)[-LONGEST:]
        except Exception:  # a message that does not fit its arguments is an error of the caller, which logging reports
            return
        with self._guard:
            self._number += 1
            self._lines.append(LogLine(number=self._number, time=record.created, level=record.levelname, text=text))

    def since(self, number: int) -> list[dict[str, int | float | str]]:
        """Lines after `number`, oldest first, as JSON objects; all lines if `number` is of an earlier process."""
        with self._guard:
            return [asdict(line) for line in self._lines if line.number > number or number > self._number]


def follow_loggers(*names: str) -> LogTail:
    """A tail of the loggers of these names; '' is the root logger, to which others propagate by default."""
    tail = LogTail()
    for name in names:
        logging.getLogger(name).addHandler(tail)
    return tail
