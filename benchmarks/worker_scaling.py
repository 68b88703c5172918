"""Decisions a second of several inference workers, simulated from times measured with one.

A closed loop: each fork uses the client (orders, prompts, tables, HTTP, adjudication), requests the decisions of its powers,
waits for all of them and starts again. The client serves one fork at a time. A worker with n decisions in flight has the rate
measured for n, shared equally. A decision goes to the worker with the fewest. The curve bends where the client becomes the
slower side. Networks are not modelled.
"""

import heapq
from bisect import bisect_left
from collections.abc import Mapping


class Rates:
    """Decisions a second of one worker by decisions in flight, interpolated linearly between measured points."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        self._at = sorted(measured)
        self._rates = [measured[count] for count in self._at]

    def __call__(self, in_flight: int) -> float:
        place = bisect_left(self._at, in_flight)
        if place == 0:
            return self._rates[0]
        if place == len(self._at):
            return self._rates[-1]
        low, high = self._at[place - 1], self._at[place]
        share = (in_flight - low) / (high - low)
        return self._rates[place - 1] * (1 - share) + self._rates[place] * share


class Worker:
    """A worker and its decisions. `_done` is the share of a decision that each one would have got since the start."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._ends: list[tuple[float, int]] = []
        self._done = self._clock = 0.0
        self.drawn = 0.0
        """Decisions drawn so far; those in flight count in part."""

    def __len__(self) -> int:
        return len(self._ends)

    def _rate(self) -> float:
        return self._rates(len(self._ends)) / len(self._ends)

    def next_end(self) -> float:
        """Time at which the next decision is drawn; infinite without decisions."""
        return self._clock + (self._ends[0][0] - self._done) / self._rate() if self._ends else float("inf")

    def advance(self, now: float) -> None:
        """Draw until the time `now`."""
        if self._ends:
            each = (now - self._clock) * self._rate()
            self._done += each
            self.drawn += each * len(self._ends)
        self._clock = now

    def add(self, fork: int) -> None:
        """Begin a decision of `fork`."""
        heapq.heappush(self._ends, (self._done + 1.0, fork))

    def pop(self) -> int:
        """Remove the decision that is drawn next; returns its fork."""
        return heapq.heappop(self._ends)[1]


def decisions_per_s(
    workers: int, *, rates: Rates, client_s: float, forks: int = 128, powers: int = 1, decisions: int = 6000
) -> float:
    """Decisions a second of `workers` workers behind one client that computes `client_s` seconds for each decision."""
    pool = [Worker(rates) for _ in range(workers)]
    waiting_for = [0] * forks
    ready = list(range(forks))  # forks that wait for the client
    client_free, asking, now = 0.0, None, 0.0
    while sum(worker.drawn for worker in pool) < decisions:
        if asking is None and ready:
            asking = ready.pop(0)
            client_free = now + client_s * powers
        ends = [worker.next_end() for worker in pool]
        now = min(*ends, client_free if asking is not None else float("inf"))
        for worker in pool:
            worker.advance(now)
        if asking is not None and now == client_free:
            waiting_for[asking] = powers
            for _ in range(powers):
                min(pool, key=len).add(asking)
            asking = None
            continue
        fork = pool[ends.index(min(ends))].pop()
        waiting_for[fork] -= 1
        if not waiting_for[fork]:
            ready.append(fork)
    return sum(worker.drawn for worker in pool) / now


def scaling_figures(measured: Mapping[int, float], *, client_ms: float, worker_ms: float) -> dict[str, float]:
    """How many workers with a core each one client feeds, and the simulated gain of 2 and 4 workers over one.

    Args:
        measured: decisions a second of an engine in the client's process, by decisions in flight. A worker's rates have this
            shape; they are scaled to its own time with 64 in flight.
        client_ms: CPU milliseconds of the client for a decision, over HTTP.
        worker_ms: the same of the worker, with a step of 64 forks.
    """
    rates = Rates({count: rate / measured[64] * 1e3 / worker_ms for count, rate in measured.items()})
    alone, two, four = (decisions_per_s(workers, rates=rates, client_s=1e-3 * client_ms) for workers in (1, 2, 4))
    return {
        "workers_at_the_bend_http": worker_ms / client_ms,
        "simulated_gain_2_workers": two / alone,
        "simulated_gain_4_workers": four / alone,
    }
