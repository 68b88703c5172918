"""Repeated sampling at play time: a version draws many order sets for one decision, and one is chosen.

    vote      each unit takes the order that most draws gave it (ties: the one drawn first); builds and disbands, which only make
              sense together, are voted on as whole sets
    playout   each distinct set is played out in short scripted games from the position; the best mean of centres is taken

Promise: a vote that can no longer change is not drawn to its end, and gives what it would have given; what is returned is legal.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from game.board import POWERS
from game.legal import LegalOrders, OrderKind
from game.players import player
from inference.engine import Engine
from rollouts.deciders import Question, Tokens, draw, position_texts
from rollouts.fork import ForkPlan, play_fork
from rollouts.seeds import dice

PLAYOUTS = 4
"""Scripted games for each set that is played out."""
PLAYOUT_YEARS = 1
"""Their length; a year is counted from the position's phase."""
PLAYOUT_PLAYER = "random"
"""Who plays all seats of them after the first phase; the other powers from it on."""


class RepeatedDecider:
    """A policy version that draws `repetitions` sets and chooses; counts what it drew and what an early end saved."""

    def __init__(
        self, engine: Engine, tokens: Tokens, version: int | None, repetitions: int, pick: Literal["vote", "playout"] = "vote"
    ) -> None:
        self._engine, self._tokens, self._version = engine, tokens, version
        self._repetitions, self._pick = repetitions, pick
        self.decisions = self.drawn = 0

    async def decide(self, question: Question) -> list[str]:
        """See `Decider`."""
        self.decisions += 1
        if self._pick == "playout":
            return await played_out(question, await self._draws(question, 0, self._repetitions))
        sets: list[list[str]] = []
        # The first wave is the least that can settle a vote: more than half of all.
        wave = self._repetitions // 2 + 1
        while len(sets) < self._repetitions:
            more = min(wave, self._repetitions - len(sets))
            sets += await self._draws(question, len(sets), more)
            if settled(sets, self._repetitions, question.legal):
                break
            wave = max(1, self._repetitions // 8)
        return vote(sets, question.legal)

    async def _draws(self, question: Question, first: int, count: int) -> list[list[str]]:
        self.drawn += count
        texts = position_texts(question.board, self._tokens)
        draws = (
            draw(question, self._engine, self._tokens, version=self._version, texts=texts, repetition=number)
            for number in range(first, first + count)
        )
        return [answer.orders for answer in await asyncio.gather(*draws)]


def vote(sets: Sequence[Sequence[str]], legal: LegalOrders) -> list[str]:
    """The winner of the vote: by unit, or of whole sets in builds and disbands."""
    return [order for ballot in _ballots(sets, legal) for order in _first(ballot)]


def settled(sets: Sequence[Sequence[str]], total: int, legal: LegalOrders) -> bool:
    """Whether no outcome of the draws still to come, `total` in all, could change the vote."""
    left = total - len(sets)
    return all(_lead(ballot) > left for ballot in _ballots(sets, legal)) or not left


def _ballots(sets: Sequence[Sequence[str]], legal: LegalOrders) -> list[Counter[tuple[str, ...]]]:
    """Votes by unit; a Counter keeps the order in which its keys came, which settles ties."""
    if legal.kind in (OrderKind.MOVEMENT, OrderKind.RETREAT):
        return [Counter((order,) for order in unit) for unit in zip(*sets, strict=True)]
    return [Counter(tuple(some) for some in sets)]


def _first(ballot: Counter[tuple[str, ...]]) -> tuple[str, ...]:
    return max(ballot, key=lambda choice: ballot[choice])


def _lead(ballot: Counter[tuple[str, ...]]) -> int:
    """Fewer further draws than this cannot change the ballot: rivals drawn before the winner win ties, later ones lose."""
    winner = _first(ballot)
    names = list(ballot)
    rivals = [votes + (names.index(name) < names.index(winner)) for name, votes in ballot.items() if name != winner]
    return ballot[winner] - max(rivals, default=0) + 1


async def played_out(question: Question, sets: Sequence[Sequence[str]]) -> list[str]:
    """The set whose scripted games leave the power with most centres on average; ties: the one drawn first.

    All sets meet the same dice.
    """
    distinct = list(dict.fromkeys(tuple(some) for some in sets))
    if len(distinct) == 1:
        return list(distinct[0])
    values = [await _worth(question, some) for some in distinct]
    return list(distinct[values.index(max(values))])


async def _worth(question: Question, orders: Sequence[str]) -> float:
    total = 0
    for number in range(PLAYOUTS):
        name = f"{question.dice}/{question.ply}/playout/{number}"
        plan = ForkPlan(
            name=name,
            shared_name=name,
            seats={power: "given" if power == question.power else PLAYOUT_PLAYER for power in POWERS},
            horizon_years=PLAYOUT_YEARS,
            temperature=1.0,
            snapshot_id=question.snapshot_id,
        )
        course = await play_fork(plan, question.board.fork(), None, None, deciders={"given": _Given(orders)}, record_plies=False)
        assert course.end is not None, "scripted games do not fail"
        total += course.end.centres[POWERS.index(question.power)]
        await asyncio.sleep(0)  # others want the thread too
    return total / PLAYOUTS


class _Given:
    """Gives these orders first, then plays as PLAYOUT_PLAYER."""

    def __init__(self, orders: Sequence[str]) -> None:
        self._orders = list(orders)

    async def decide(self, question: Question) -> list[str]:
        if question.ply == 0:
            return self._orders
        rng = dice(question.dice, question.board.phase, question.power)
        return player(PLAYOUT_PLAYER)(question.legal, rng, question.board)
