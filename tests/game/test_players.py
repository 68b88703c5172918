"""Scripted players return legal sets that the engine takes, and nothing but their arguments decides them."""

import random
from collections import Counter
from math import comb

import pytest

from game.board import Board
from game.legal import WAIVE, LegalOrders, OrderKind
from game.players import PLAYERS, player
from telemetry.errors import InputError


@pytest.mark.parametrize("name", sorted(PLAYERS))
def test_every_set_is_legal_and_taken_by_the_engine(name: str) -> None:
    rng = random.Random(f"seed of {name}")
    for _ in range(8):
        board = Board.start()
        for _ in range(25):
            if board.is_over:
                break
            legal = board.legal_orders()
            orders = {power: player(name)(own, rng) for power, own in legal.items()}
            assert all(legal[power].admits(own) for power, own in orders.items())
            result = board.step(orders)
            assert not any(result.rejected.values())
            assert result.orders == {power: tuple(own) for power, own in orders.items()}
            # In movement a support of what did not happen is void by right; elsewhere it is a mistake.
            assert result.phase.endswith("M") or not any("void" in own for own in result.results.values())


@pytest.mark.parametrize("name", sorted(PLAYERS))
def test_the_same_random_source_gives_the_same_orders(name: str) -> None:
    for own in Board.start().legal_orders().values():
        assert player(name)(own, random.Random(3)) == player(name)(own, random.Random(3))


def test_the_uniform_player_draws_every_legal_subset_alike() -> None:
    """Two builds on three sites: 1 way with none, 3 with one, 3 with both; three disbands of four: 4 ways."""
    build = LegalOrders(power="FRANCE", kind=OrderKind.BUILD, sites=("B", "M", "P"), options=(("b",), ("m",), ("p",)), picks=2)
    disband = LegalOrders(
        power="FRANCE",
        kind=OrderKind.DISBAND,
        sites=tuple("ABCD"),
        options=(("a",), ("b",), ("c",), ("d",)),
        picks=3,
    )
    rng = random.Random(0)
    for own in (build, disband):
        assert own.count() == (1 + 3 + 3 if own is build else comb(4, 3))
        drawn = Counter(tuple(player("random")(own, rng)) for _ in range(1000 * own.count()))
        assert len(drawn) == own.count()
        assert all(850 < times < 1150 for times in drawn.values())


def test_the_uniform_player_draws_every_order_of_a_site_alike() -> None:
    own = LegalOrders(power="ITALY", kind=OrderKind.MOVEMENT, sites=("A ROM",), options=(("a", "b", "c", "d"),), picks=1)
    rng = random.Random(0)
    drawn = Counter(player("random")(own, rng)[0] for _ in range(4000))
    assert all(900 < drawn[order] < 1100 for order in "abcd")


def test_the_mover_moves_and_does_not_take_the_support_of_a_move_for_one() -> None:
    """Chance of a move: 0.7, and 0.3 of the choice among one move, two supports of moves and a hold."""
    options = ("A PAR - BUR", "A PAR H", "A PAR S A MAR - BUR", "A PAR S A MAR - GAS")
    own = LegalOrders(power="FRANCE", kind=OrderKind.MOVEMENT, sites=("A PAR",), options=(options,), picks=1)
    rng = random.Random(0)
    drawn = Counter(player("mover")(own, rng)[0] for _ in range(4000))
    assert abs(drawn["A PAR - BUR"] / 4000 - (0.7 + 0.3 / 4)) < 0.03


@pytest.mark.parametrize(
    ("name", "kind", "options", "picks", "expected"),
    [
        ("mover", OrderKind.RETREAT, (("A PAR D", "A PAR R GAS"),), 1, ["A PAR R GAS"]),
        ("mover", OrderKind.RETREAT, (("A PAR D",),), 1, ["A PAR D"]),
        ("mover", OrderKind.BUILD, (("A PAR B",),), 1, ["A PAR B"]),
        ("hold", OrderKind.RETREAT, (("A PAR D", "A PAR R GAS"),), 1, ["A PAR D"]),
        ("hold", OrderKind.BUILD, (("A PAR B",),), 1, [WAIVE]),
        ("hold", OrderKind.MOVEMENT, (("A PAR - BUR", "A PAR H"),), 1, ["A PAR H"]),
    ],
)
def test_what_a_player_prefers(
    name: str, kind: OrderKind, options: tuple[tuple[str, ...], ...], picks: int, expected: list[str]
) -> None:
    own = LegalOrders(
        power="FRANCE",
        kind=kind,
        sites=("PAR" if kind is OrderKind.BUILD else "A PAR",),
        options=options,
        picks=picks,
    )
    assert {tuple(player(name)(own, random.Random(seed))) for seed in range(20)} == {tuple(expected)}


def test_an_unknown_player_is_the_users_mistake_and_the_sentence_names_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'dumbbot'.*hold, random, mover"):
        player("dumbbot")
