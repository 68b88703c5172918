"""How many requests one worker may have in flight: additive increase, multiplicative decrease, on the worker's own figures.

A pure state machine: no clock, no tasks, no client. Its rounds are counted in answers: one round is as many answers as the limit
allowed in flight when it began, so a slow worker's rounds take longer by themselves. At the end of a round

    cut   x 0.7   if more than 2 % of its answers met a preemption, or they waited longer in the worker than they were served
    grow  + 1/16  of the ceiling, if the limit was in the way and they waited less than half as long as they were served

and otherwise the limit stands. A worker whose requests wait as long as they are served has as many waiting as running: it is
full, and what waits is better kept in the pool, where older versions go first and another worker may take it.
"""

from dataclasses import dataclass

CUT = 0.7
GROWTH_SHARE = 1 / 16
PREEMPTED_SHARE = 0.02
"""Preemptions per answer that a full key-value cache may cost before the limit is cut."""
WAIT_TO_CUT = 1.0
WAIT_TO_GROW = 0.5
"""Mean wait over mean service, in a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What a worker says of itself with an answer."""

    queue_ms: float
    """Milliseconds that this request waited in the worker."""
    service_ms: float
    """Milliseconds that it was served, prefill and decode."""
    running: int
    """Requests in flight at the worker, whoever asked."""
    preemptions: int
    """Requests put back for want of cache, since the worker started."""


class FlowControl:
    """The limit of one worker; `limit` moves between a sixteenth of the ceiling and the ceiling, where it begins."""

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._floor = max(1, int(ceiling * GROWTH_SHARE))
        self._step = max(1, int(ceiling * GROWTH_SHARE))
        self.restart()

    def restart(self) -> None:
        """Forget everything: another process answers now."""
        self.limit = self._ceiling
        self.others = 0
        self._preemptions: int | None = None
        self._begin_round(skip=0)

    def has_room(self, in_flight: int) -> bool:
        """May one more be sent, with `in_flight` of ours there? Other clients' requests count, down to a floor of our own."""
        return in_flight < max(self._floor, self.limit - self.others)

    def sent(self, in_flight: int) -> None:
        """One more was sent, and `in_flight` of ours are there now."""
        self._peak = max(self._peak, in_flight)

    def answered(self, load: WorkerLoad, in_flight: int) -> None:
        """One answer came; `in_flight` of ours, this one included, were there until now."""
        self.others = max(0, load.running - in_flight)
        fresh = 0 if self._preemptions is None else max(0, load.preemptions - self._preemptions)
        self._preemptions = load.preemptions
        if self._skip:  # sent before the last cut: says nothing of the new limit
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
