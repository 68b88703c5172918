"""Asked unit by unit, a power can give each of its legal order sets, and nothing else."""

import random

import pytest

from entente.game.board import Board
from entente.game.legal import LegalOrders, OrderKind
from entente.game.scripted import player
from entente.integrations.unit_actions import PASS, UnitChoices, action_of, action_texts

CENTRES, UNITS = ("BRE", "MAR", "PAR"), ("A PAR", "A RUH", "F BRE")
BUILDS = [("A BRE B", "F BRE B"), ("A MAR B", "F MAR B"), ("A PAR B",)]
MOVES = [("A PAR - BUR", "A PAR H"), ("A RUH H",), ("F BRE - ENG", "F BRE H", "F BRE S A PAR - PIC")]
RETREATS = [("A PAR D",), ("A RUH D", "A RUH R BUR"), ("F BRE D", "F BRE R ENG")]
DISBANDS = [(f"{unit} D",) for unit in UNITS]


def orders_of(choices: UnitChoices) -> list[tuple[str, ...]]:
    """Every order set that the questions can lead to."""
    sets, open_paths = [], [[]]
    while open_paths:
        path = open_paths.pop()
        fresh = UnitChoices(choices.legal)
        assert all(fresh.take(action) for action in path)
        if fresh.is_done:
            completed = fresh.legal.completed(fresh.orders)
            assert completed is not None
            sets.append(completed)
        open_paths += [[*path, action] for action in fresh.actions]
    return sets


@pytest.mark.parametrize(
    ("kind", "options", "picks"),
    [
        (OrderKind.MOVEMENT, MOVES, 3),
        (OrderKind.RETREAT, RETREATS, 3),
        *((OrderKind.BUILD, BUILDS, picks) for picks in (1, 2, 3)),
        *((OrderKind.DISBAND, DISBANDS, picks) for picks in (1, 2, 3)),
    ],
)
def test_the_questions_lead_to_each_legal_set_once(kind: OrderKind, options: list[tuple[str, ...]], picks: int):
    sites = CENTRES if kind is OrderKind.BUILD else UNITS
    legal = LegalOrders(power="FRANCE", kind=kind, sites=sites, options=tuple(options), picks=picks)
    found = orders_of(UnitChoices(legal))
    assert len(found) == len(set(found)) == legal.count()
    assert all(legal.admits(orders) for orders in found)


def test_where_one_action_alone_is_legal_nobody_is_asked_and_a_masked_action_changes_nothing():
    legal = LegalOrders(power="FRANCE", kind=OrderKind.MOVEMENT, sites=UNITS, options=tuple(MOVES), picks=3)
    choices = UnitChoices(legal)
    assert not choices.take(action_of("A PAR - PIC")) and (choices.site, choices.orders) == (0, [])
    assert choices.take(action_of("A PAR - BUR")) and choices.orders == ["A PAR - BUR", "A RUH H"]
    assert legal.sites[choices.site] == "F BRE"


def test_every_order_of_played_games_has_an_action_and_a_site_has_no_two_with_one():
    texts = action_texts()
    assert len(texts) == len(set(texts)) and PASS in texts
    for seed in range(3):
        rng, board = random.Random(seed), Board.start()
        while not board.is_over and board.year < 1908:
            legal = board.legal_orders()
            for options in (options for own in legal.values() for options in own.options):
                assert len({action_of(order) for order in options}) == len(options)
            board.advance({power: player("mover")(own, rng, board) for power, own in legal.items()})
