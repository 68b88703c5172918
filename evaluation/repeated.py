"""Repeated sampling at play time: a version draws several order sets for one decision, and one is chosen.

    vote      each unit gets its most frequent order (ties: the one drawn first); builds and disbands are voted on as whole
              sets, because their orders depend on each other
    playout   each distinct set is continued in short scripted games; the set with the highest mean of centres is chosen

Drawing stops early if the remaining draws cannot change the vote. The chosen orders are legal.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from game.board import POWERS
from game.legal import LegalOrders, OrderKind
from game.players import player
from game.prompts import board_text
from inference.engine import Engine
from rollouts.deciders import DecisionRequest, Tokens, draw
from rollouts.fork import ForkPlan, play_fork
from rollouts.seeds import dice

PLAYOUTS = 4
"""Scripted games per set."""
PLAYOUT_YEARS = 1
"""Length of a playout in game years, counted from the position's phase."""
PLAYOUT_PLAYER = "random"
"""Scripted player of all seats in a playout; the given orders replace its orders in the first phase."""


class RepeatedDecider:
    """A policy version that draws up to `repetitions` order sets and chooses one; counts decisions and draws."""

    def __init__(
        self, engine: Engine, tokens: Tokens, version: int | None, repetitions: int, pick: Literal["vote", "playout"] = "vote"
    ) -> None:
        self._engine, self._tokens, self._version = engine, tokens, version
        self._repetitions, self._pick = repetitions, pick
        self.decisions = self.drawn = 0

    async def decide(self, request: DecisionRequest) -> list[str]:
        """The chosen orders; see `Decider`."""
        self.decisions += 1
        if self._pick == "playout":
            return await choose_by_playout(request, await self._draws(request, 0, self._repetitions))
        sets: list[list[str]] = []
        # More than half of all draws are needed to settle a vote.
        batch = self._repetitions // 2 + 1
        while len(sets) < self._repetitions:
            more = min(batch, self._repetitions - len(sets))
            sets += await self._draws(request, len(sets), more)
            if is_settled(sets, self._repetitions, request.legal):
                break
            batch = max(1, self._repetitions // 8)
        return vote(sets, request.legal)

    async def _draws(self, request: DecisionRequest, first: int, count: int) -> list[list[str]]:
        self.drawn += count
        shown = board_text(request.board)
        draws = (
            draw(request, self._engine, self._tokens, version=self._version, shown=shown, repetition=number)
            for number in range(first, first + count)
        )
        return [drawn.orders for drawn in await asyncio.gather(*draws)]


def vote(sets: Sequence[Sequence[str]], legal: LegalOrders) -> list[str]:
    """The winning orders: by unit, or as a whole set in builds and disbands."""
    return [order for ballot in _ballots(sets, legal) for order in _winner(ballot)]


def is_settled(sets: Sequence[Sequence[str]], total: int, legal: LegalOrders) -> bool:
    """True if the draws still missing from `total` cannot change the vote."""
    missing = total - len(sets)
    return all(_lead(ballot) > missing for ballot in _ballots(sets, legal)) or not missing


def _ballots(sets: Sequence[Sequence[str]], legal: LegalOrders) -> list[Counter[tuple[str, ...]]]:
    """Votes by unit. A Counter keeps the order of first votes, which decides ties."""
    if legal.kind in (OrderKind.MOVEMENT, OrderKind.RETREAT):
        return [Counter((order,) for order in unit) for unit in zip(*sets, strict=True)]
    return [Counter(tuple(orders) for orders in sets)]


def _winner(ballot: Counter[tuple[str, ...]]) -> tuple[str, ...]:
    return max(ballot, key=lambda choice: ballot[choice])


def _lead(ballot: Counter[tuple[str, ...]]) -> int:
    """Number of further draws that are needed to change the ballot. Rivals drawn before the winner win ties, later rivals lose
    them.
    """
    winner = _winner(ballot)
    names = list(ballot)
    rivals = [votes + (names.index(name) < names.index(winner)) for name, votes in ballot.items() if name != winner]
    return ballot[winner] - max(rivals, default=0) + 1


async def choose_by_playout(request: DecisionRequest, sets: Sequence[Sequence[str]]) -> list[str]:
    """The set whose scripted games give the power most centres on average; ties: the set drawn first.

    All sets are played with the same random numbers.
    """
    distinct = list(dict.fromkeys(tuple(orders) for orders in sets))
    if len(distinct) == 1:
        return list(distinct[0])
    values = [await _playout_value(request, orders) for orders in distinct]
    return list(distinct[values.index(max(values))])


async def _playout_value(request: DecisionRequest, orders: Sequence[str]) -> float:
    """Mean centres of the power after the playouts of `orders`."""
    total = 0
    for number in range(PLAYOUTS):
        name = f"{request.dice}/{request.ply}/playout/{number}"
        plan = ForkPlan(
            name=name,
            shared_name=name,
            seats={power: "given" if power == request.power else PLAYOUT_PLAYER for power in POWERS},
            horizon_years=PLAYOUT_YEARS,
            temperature=1.0,
            snapshot_id=request.snapshot_id,
        )
        decider = _GivenOrders(orders)
        fork = await play_fork(plan, request.board.fork(), None, None, deciders={"given": decider}, record_plies=False)
        assert fork.end is not None, "scripted games do not fail"
        total += fork.end.centres[POWERS.index(request.power)]
        await asyncio.sleep(0)  # let other tasks of the event loop run
    return total / PLAYOUTS


class _GivenOrders:
    """Orders the given set in the first phase, then plays as PLAYOUT_PLAYER."""

    def __init__(self, orders: Sequence[str]) -> None:
        self._orders = list(orders)

    async def decide(self, request: DecisionRequest) -> list[str]:
        if request.ply == 0:
            return self._orders
        rng = dice(request.dice, request.board.phase, request.power)
        return player(PLAYOUT_PLAYER)(request.legal, rng, request.board)
