"""A race finds the best of many candidates: each challenges the best so far in the same scenarios, and the worse ones stop early.

    scenario  seed number 0, 1, 2, ... of the decision; a candidate is played once in each scenario that it meets
    heat      the challenger and the best meet the first 2, 4, 8, ... scenarios, up to all of them
    out       a challenger is dropped after a heat if its sum of values is less, from the second heat on also if it is equal
    best      a challenger that is ahead after the last heat

Most changes of a good order set are bad, and two scenarios are enough to see it. The best's playouts are reused. Early stopping:
Maron & Moore 1997, "The racing algorithm". Equal scenarios for all: Kleywegt, Shapiro & Homem-de-Mello 2002, "The sample average
approximation method".
"""

from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

FIRST_HEAT = 2
"""Scenarios of the first heat; each further heat has twice as many."""

Candidate = TypeVar("Candidate", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raced(Generic[Candidate]):
    best: Candidate
    values: dict[Candidate, list[float]]
    """Values by scenario, in order of entry. Only candidates with equally many can be compared; the best has all scenarios."""


async def race(
    candidates: Sequence[Candidate],
    changes: Callable[[Candidate], Iterable[Candidate]],
    *,
    playouts: int,
    scenarios: int,
    play: Callable[[Candidate, int], Awaitable[float]],
) -> Raced[Candidate]:
    """Race the candidates, then changes of the best, until the playouts are used up or nothing is left to try.

    Args:
        candidates: distinct, at least one; all race. The first is the best at the start, so it wins ties.
        changes: candidates near the best so far, in the order in which they are tried.
        playouts: after so many no change enters; the race still finishes the heat in progress and the best's scenarios.
        scenarios: size of the last heat.
        play: the value of a candidate in a scenario; called once for each pair.
    """
    values, used = dict[Candidate, list[float]](), 0

    async def total(candidate: Candidate, heat: int) -> float:
        nonlocal used
        own = values.setdefault(candidate, [])
        while len(own) < heat:
            used += 1
            own.append(await play(candidate, len(own)))
        return sum(own[:heat])

    async def beats(challenger: Candidate, best: Candidate) -> bool:
        heat = FIRST_HEAT
        while True:
            heat = min(heat, scenarios)
            to_beat = await total(best, heat)
            lead = await total(challenger, heat) - to_beat
            if heat == scenarios:
                return lead > 0
            if lead < 0 or (lead == 0 and heat > FIRST_HEAT):
                return False
            heat *= 2

    best, *others = candidates
    for challenger in others:
        if await beats(challenger, best):
            best = challenger
    entering = iter(changes(best))
    while used < playouts and (challenger := next((each for each in entering if each not in {best, *values}), None)) is not None:
        if await beats(challenger, best):
            best, entering = challenger, iter(changes(challenger))
    if len(values) > 1:
        await total(best, scenarios)
    return Raced(best=best, values=values or {best: []})
