"""Repeated sampling at play time: a version draws several order sets for one decision and votes.

Each unit gets its most frequent order (ties: the one drawn first). Builds and disbands are voted on as whole sets, because their
orders depend on each other. Drawing stops early if the remaining draws cannot change the vote. The chosen orders are legal.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence

from game.legal import LegalOrders, OrderKind
from game.prompts import board_text
from inference.engine import Engine
from rollouts.deciders import DecisionRequest, Tokens, draw


class RepeatedDecider:
    """A policy version that draws up to `repetitions` order sets and votes; counts decisions and draws."""

    def __init__(self, engine: Engine, tokens: Tokens, version: int | None, repetitions: int) -> None:
        self._engine, self._tokens, self._version, self._repetitions = engine, tokens, version, repetitions
        self.decisions = self.drawn = 0

    async def decide(self, request: DecisionRequest) -> list[str]:
        """The chosen orders; see `Decider`."""
        self.decisions += 1
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
        shown = board_text(request.board, request.power, self._tokens.prompts)
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
