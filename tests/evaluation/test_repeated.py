"""Repeated sampling: the vote, and early stopping with an equal result."""

import asyncio
import random

import pytest

from evaluation.repeated import RepeatedDecider, is_settled, vote
from game.board import Board
from game.legal import LegalOrders, OrderKind
from rollouts.deciders import DecisionRequest

MOVES = LegalOrders(
    power="FRANCE",
    kind=OrderKind.MOVEMENT,
    sites=("A MAR", "A PAR"),
    options=(("A MAR H", "A MAR - BUR"), ("A PAR H", "A PAR - BUR", "A PAR - GAS")),
    picks=2,
)
BUILDS = LegalOrders(
    power="FRANCE", kind=OrderKind.BUILD, sites=("MAR", "PAR"), options=(("A MAR B", "F MAR B"), ("A PAR B",)), picks=1
)


def request_for(board: Board, power: str) -> DecisionRequest:
    legal = board.legal_orders()[power]
    return DecisionRequest(game="g", dice="g", ply=0, power=power, legal=legal, board=board, snapshot_id="")


def test_each_unit_takes_the_order_that_most_draws_gave_it():
    sets = [["A MAR H", "A PAR - BUR"], ["A MAR - BUR", "A PAR - GAS"], ["A MAR - BUR", "A PAR - GAS"], ["A MAR H", "A PAR H"]]
    assert vote(sets, MOVES) == ["A MAR H", "A PAR - GAS"], "in a tie the order drawn first wins"


@pytest.mark.parametrize("legal", [MOVES, BUILDS], ids=["units", "sets"])
def test_a_vote_is_settled_exactly_when_no_completion_changes_it(legal: LegalOrders):
    """Oracle: all continuations of random sequences of draws."""
    from itertools import product

    dice = random.Random(1)
    every = [list(orders) for orders in product(*legal.options)] if legal is MOVES else [["A MAR B"], ["F MAR B"], ["A PAR B"]]
    for total in (3, 4, 5):
        for _ in range(60):
            drawn = [dice.choice(every) for _ in range(dice.randrange(1, total + 1))]
            left = total - len(drawn)
            if left > 2:
                continue
            now = vote(drawn, legal)
            changed = any(vote([*drawn, *more], legal) != now for more in product(every, repeat=left))
            assert is_settled(drawn, total, legal) == (not changed), (drawn, total)


def test_an_early_end_gives_what_drawing_to_the_end_would_give(uniform_engine, tokens, positions):
    saved = 0
    for snapshot in positions[:4]:
        board = Board.restore(snapshot)
        for power in list(board.legal_orders())[:3]:
            asked, engine = request_for(board, power), uniform_engine()
            decider = RepeatedDecider(engine, tokens, None, 15)
            chosen = asyncio.run(decider.decide(asked))
            full = asyncio.run(RepeatedDecider(uniform_engine(), tokens, None, 15)._draws(asked, 0, 15))
            assert chosen == vote(full, asked.legal) and asked.legal.admits(chosen)
            assert decider.drawn == len(engine.requests) <= 15
            saved += 15 - decider.drawn
            assert len({request.seed for request in engine.requests}) == decider.drawn
    assert saved >= 0
