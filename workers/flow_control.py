"""The limit of requests in flight at one worker: additive increase, multiplicative decrease, from the load that it reports.

A pure state machine without clock, tasks or client. A round is as many answers as the limit was when the round began, so a slow
worker's rounds take longer. At the end of a round the limit is

    cut   x 0.7                  if preemptions exceed 2 % of the answers, or the mean wait in the worker exceeds the mean service
    grown + 1/16 of the ceiling  if the limit was reached, nothing was preempted, and the mean wait is below half the mean service

and otherwise unchanged. If requests wait as long as they are served, as many wait as run: the worker is full. Requests should
then wait in the pool, which orders them by version and may send them to another worker.
"""

from dataclasses import dataclass

CUT = 0.7
GROWTH_SHARE = 1 / 16
PREEMPTED_SHARE = 0.02
"""Preemptions per answer above which the limit is cut."""
WAIT_TO_CUT = 1.0
WAIT_TO_GROW = 0.5
"""Ratios of the mean wait to the mean service of a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """The load that a worker reports with an answer."""

    queue_ms: float
    """Milliseconds that this request waited in the worker."""
    service_ms: float
    """Milliseconds of prefill and decode."""
    running: int
    """Requests in flight at the worker, from all clients."""
    preemptions: int
    """Requests preempted for lack of cache since the worker started."""


class FlowControl:
    """The limit of one worker. `limit` starts at the ceiling and never falls below a sixteenth of it."""

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._floor = max(1, int(ceiling * GROWTH_SHARE))
        self._step = max(1, int(ceiling * GROWTH_SHARE))
        self.restart()

    def restart(self) -> None:
        """Reset all state, because another process answers now."""
        self.limit = self._ceiling
        self.others = 0
        self._preemptions: int | None = None
        self._begin_round(skip=0)

    def has_room(self, in_flight: int) -> bool:
        """Whether one more request may be sent with `in_flight` of this client there.

        Other clients' requests reduce the limit, but not below the floor.
        """
        return in_flight < max(self._floor, self.limit - self.others)

    def sent(self, in_flight: int) -> None:
        """Record that a request was sent; `in_flight` requests of this client are there now."""
        self._peak = max(self._peak, in_flight)

    def answered(self, load: WorkerLoad, in_flight: int) -> None:
        """Record an answer; `in_flight` requests of this client, this one included, were there until now."""
        self.others = max(0, load.running - in_flight)
        fresh = 0 if self._preemptions is None else max(0, load.preemptions - self._preemptions)
        self._preemptions = load.preemptions
        if self._skip:  # sent before the last cut, so it does not reflect the new limit
            self._skip -= 1
            return
        self._answers += 1
        self._queue_ms += load.queue_ms
        self._service_ms += load.service_ms
        self._preempted += fresh
        if self._answers >= self._round:
            self._end_round(in_flight)

    def _end_round(self, in_flight: int) -> None:
        wait = self._queue_ms / max(self._service_ms, 1e-9)
        if self._preempted > PREEMPTED_SHARE * self._answers or wait > WAIT_TO_CUT:
            self.limit = max(self._floor, int(self.limit * CUT))
            self._begin_round(skip=in_flight - 1)
            return
        if self._peak + self.others >= self.limit and not self._preempted and wait < WAIT_TO_GROW:
            self.limit = min(self._ceiling, self.limit + self._step)
        self._begin_round(skip=0)

    def _begin_round(self, *, skip: int) -> None:
        self._round, self._skip = self.limit, skip
        self._answers, self._preempted, self._peak = 0, 0, 0
        self._queue_ms = self._service_ms = 0.0
