"""The limit of requests in flight finds what a worker can take, seen on simulated workers, and stays there."""

import heapq
from collections import deque
from dataclasses import dataclass, field

import pytest

from workers.flow_control import FlowControl, WorkerLoad

CEILING = 128


@dataclass
class SimulatedWorker:
    """`slots` requests at a time, each `service_ms`; past `cache` of them the youngest are put back and begin again."""

    slots: int
    service_ms: float
    cache: int = 10**9
    now: float = 0.0
    preemptions: int = 0
    taken: int = 0
    waiting: deque[float] = field(default_factory=deque)
    running: list[tuple[float, float, float]] = field(default_factory=list)
    """End, begin, arrival."""
    busy_ms: float = 0.0

    @property
    def in_flight(self) -> int:
        return len(self.waiting) + len(self.running)

    def take(self) -> None:
        self.waiting.append(self.now)

    def next_answer(self) -> WorkerLoad:
        """Let time pass until one request is done."""
        while self.waiting and len(self.running) < self.slots:
            # A little apart, as no two completions are of one length.
            length = self.service_ms * (1 + 0.001 * (self.taken % 17))
            self.taken += 1
            heapq.heappush(self.running, (self.now + length, self.now, self.waiting.popleft()))
        for run in sorted(self.running, key=lambda run: run[1])[self.cache :]:  # as they grow, the cache is full
            self.preemptions += 1
            self.running.remove(run)
            self.waiting.appendleft(run[2])
        heapq.heapify(self.running)
        end, began, arrived = heapq.heappop(self.running)
        self.busy_ms += end - began
        self.now = end
        return WorkerLoad(
            queue_ms=began - arrived, service_ms=end - began, running=self.in_flight + 1, preemptions=self.preemptions
        )


def saturate(flow: FlowControl, worker: SimulatedWorker, answers: int) -> list[int]:
    """Keep the worker as busy as the limit allows, for so many answers; the limit after each."""
    limits = []
    for _ in range(answers):
        while flow.has_room(worker.in_flight):
            worker.take()
            flow.sent(worker.in_flight)
        before = worker.in_flight
        flow.answered(worker.next_answer(), before)
        limits.append(flow.limit)
    return limits


def test_a_worker_that_takes_all_keeps_the_ceiling():
    flow = FlowControl(CEILING)
    assert set(saturate(flow, SimulatedWorker(slots=256, service_ms=500), 3000)) == {CEILING}


@pytest.mark.parametrize("slots", [8, 24, 48])
def test_a_slow_worker_is_kept_full_and_no_fuller_than_twice(slots: int):
    flow, worker = FlowControl(CEILING), SimulatedWorker(slots=slots, service_ms=2000)
    saturate(flow, worker, 2000)
    settled = saturate(flow, worker, 2000)
    assert min(settled) >= min(slots, CEILING) and max(settled) <= 2 * slots + CEILING // 16
    began, busy = worker.now, worker.busy_ms
    saturate(flow, worker, 1000)
    assert (worker.busy_ms - busy) / (worker.now - began) > 0.97 * slots, "the limit starves the worker"


def test_a_worker_without_cache_for_all_is_spared_most_preemptions():
    free, held = SimulatedWorker(slots=128, service_ms=800, cache=40), SimulatedWorker(slots=128, service_ms=800, cache=40)
    for _ in range(3000):
        while free.in_flight < CEILING:
            free.take()
        free.next_answer()
    limits = saturate(FlowControl(CEILING), held, 3000)
    assert held.preemptions < 0.2 * free.preemptions
    assert 0.6 * 40 <= sum(limits[1000:]) / 2000 <= 1.2 * 40


def test_the_limit_grows_again_when_a_worker_recovers():
    flow = FlowControl(CEILING)
    saturate(flow, SimulatedWorker(slots=8, service_ms=1000), 1500)
    assert flow.limit <= 24
    saturate(flow, SimulatedWorker(slots=256, service_ms=1000), 1500)
    assert flow.limit == CEILING


def test_a_burst_after_quiet_meets_a_limit_that_did_not_grow_unused():
    flow = FlowControl(CEILING)
    saturate(flow, SimulatedWorker(slots=16, service_ms=1000), 1500)
    low = flow.limit
    quiet = SimulatedWorker(slots=16, service_ms=1000)
    for _ in range(2000):  # one at a time
        quiet.take()
        flow.sent(1)
        flow.answered(quiet.next_answer(), 1)
    assert flow.limit == low
    burst = SimulatedWorker(slots=16, service_ms=1000)
    while flow.has_room(burst.in_flight):
        burst.take()
    assert burst.in_flight == low


def test_answers_sent_before_a_cut_do_not_cut_again():
    """A burst into a full worker is one mistake: the limit falls once for it."""
    flow = FlowControl(CEILING)
    for _ in range(CEILING):
        flow.answered(WorkerLoad(queue_ms=900, service_ms=100, running=CEILING, preemptions=0), CEILING)
    assert flow.limit == int(0.7 * CEILING)
    for _ in range(CEILING - 1):
        flow.answered(WorkerLoad(queue_ms=900, service_ms=100, running=CEILING, preemptions=0), CEILING)
    assert flow.limit == int(0.7 * CEILING)


def test_the_limit_never_falls_below_a_sixteenth_nor_leaves_the_ceiling():
    flow = FlowControl(CEILING)
    for number in range(5000):
        flow.answered(WorkerLoad(queue_ms=9e9, service_ms=1, running=1, preemptions=number), 1)
    assert flow.limit == CEILING // 16
    assert FlowControl(1).has_room(0) and not FlowControl(1).has_room(1)


def test_requests_of_other_clients_count_but_leave_a_floor():
    flow = FlowControl(CEILING)
    flow.answered(WorkerLoad(queue_ms=0, service_ms=1, running=110, preemptions=0), 10)
    assert flow.has_room(27) and not flow.has_room(28)
    flow.answered(WorkerLoad(queue_ms=0, service_ms=1, running=1000, preemptions=0), 10)
    assert flow.has_room(CEILING // 16 - 1) and not flow.has_room(CEILING // 16)


def test_preemptions_before_the_first_answer_are_not_ours():
    flow = FlowControl(CEILING)
    for _ in range(2 * CEILING):
        flow.answered(WorkerLoad(queue_ms=0, service_ms=1, running=1, preemptions=10**6), 1)
    assert flow.limit == CEILING
