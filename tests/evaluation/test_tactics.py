"""The listed best order sets of tactical positions are best: every order set is tried against every reply."""

import asyncio
from dataclasses import replace

import pytest

from evaluation.tactics import TacticalPosition, load_positions, solve
from game.board import Board
from tests.evaluation.prove_tactics import order_sets, prove, value, worth

POSITIONS = {position.name: position for position in load_positions()}
QUICK_PROOFS = {"venice-by-two-armies", "munich-by-two", "retreat-into-belgium"}
"""Positions that are proved in every run of the tests; the others by the slow tests, as they only change with the list."""


def given(names: set[str], *, slow: bool = False) -> list:
    marks = [pytest.mark.slow] if slow else []
    return [pytest.param(POSITIONS[name], id=name, marks=marks) for name in sorted(names)]


@pytest.mark.parametrize("position", [*given(QUICK_PROOFS), *given(set(POSITIONS) - QUICK_PROOFS, slow=True)])
def test_the_best_order_sets_are_exactly_those_of_the_largest_worth(position: TacticalPosition):
    _, best = prove(position)
    assert sorted(best) == sorted(position.best)


@pytest.mark.parametrize("position", given(set(POSITIONS)))
def test_a_position_is_legal_and_has_order_sets_that_are_not_best(position: TacticalPosition):
    legal = Board.restore(position.snapshot).legal_orders()[position.power]
    assert position.best and all(legal.admits(orders) for orders in position.best)
    assert len(position.best) < legal.count(), "there must be a legal order set that is not best"
    assert position.idea.endswith(".")


def test_a_claim_that_is_wrong_is_refuted():
    position = POSITIONS["venice-by-two-armies"]
    wrong = replace(position, best=(("F TRI - VEN", "A TYR - VEN"),))
    assert sorted(prove(wrong)[1]) == sorted(position.best)


def test_worth_is_the_smallest_value_over_all_replies():
    """Oracle: plain loops without move ordering, bounds and killers."""
    position = POSITIONS["venice-by-two-armies"]
    board = Board.restore(position.snapshot)
    replies = list(order_sets(board.legal_orders()["ITALY"]))
    for orders in [position.best[0], ("F TRI - VEN", "A TYR H"), ("F TRI H", "A TYR H")]:
        values = []
        for reply in replies:
            after = board.fork()
            after.step({"AUSTRIA": list(orders), "ITALY": list(reply)})
            values.append(value(after, "AUSTRIA"))
        assert worth(board, position, orders) == min(values)


def test_a_player_is_scored_by_the_share_of_its_draws_that_are_best():
    class Always:
        def __init__(self, first: int) -> None:
            self.first = first

        async def decide(self, request):
            position = POSITIONS[request.snapshot_id and request.game.split("/")[2]]
            number = int(request.dice.split("/")[-1])
            return list(position.best[0]) if number < self.first else list(next(order_sets(request.legal)))

    some = [POSITIONS["munich-by-two"], POSITIONS["retreat-into-belgium"]]
    score = asyncio.run(solve("some", 3, some, Always(2), draws=8))
    assert score.solved == {"munich-by-two": 0.25, "retreat-into-belgium": pytest.approx(0.25)}
    assert score.share.mean == pytest.approx(0.25) and score.by_theme == {"support": 0.25, "retreat": 0.25}
    whole = asyncio.run(solve("all", 3, some, Always(8), draws=8))
    assert whole.share.mean == 1 and whole.share.interval is None and whole.share.clusters == 2, "of two positions"
