"""Fixtures of the game tests: random games, and a position with a dislodged unit."""

import random
from collections.abc import Callable, Iterator

import pytest

from entente.game.board import Board
from entente.game.legal import LegalOrders, OrderKind
from entente.game.scripted import PLAYERS, Player, mover

Turn = tuple[Board, dict[str, LegalOrders], dict[str, list[str]]]
SelfPlay = Callable[..., Iterator[Turn]]


def _fierce(legal: LegalOrders, rng: random.Random) -> list[str]:
    """The mover with more supported moves: random games alone hardly ever dislodge a unit."""
    orders = mover(legal, rng)
    if legal.kind is not OrderKind.MOVEMENT:
        return orders
    site_of = {option: site for site, options in enumerate(legal.options) for option in options}
    settled: set[int] = set()
    for site in rng.sample(range(len(legal.sites)), len(legal.sites)):
        helped = [option for option in legal.options[site] if " S " in option and option.split(" S ")[1] in site_of]
        if site not in settled and helped:
            order = rng.choice(helped)
            move = order.split(" S ")[1]
            if site_of[move] not in settled:
                orders[site], orders[site_of[move]] = order, move
                settled |= {site, site_of[move]}
    return orders


_TABLE = {**PLAYERS, "fierce": _fierce}


def _self_play(
    seed: int,
    *,
    phases: int = 30,
    names: tuple[str, ...] = ("random", "mover", "fierce"),
    dropped: float = 0.0,
) -> Iterator[Turn]:
    """Yields each phase of one game before it is played: the board, its legal orders, the orders to play."""
    rng = random.Random(seed)
    board = Board.start()
    for _ in range(phases):
        if board.is_over:
            return
        legal = board.legal_orders()
        orders = {power: _TABLE[rng.choice(names)](own, rng) for power, own in legal.items()}
        orders = {power: [order for order in own if rng.random() >= dropped] for power, own in orders.items()}
        yield board, legal, orders
        board.step(orders)


@pytest.fixture
def self_play() -> SelfPlay:
    return _self_play


@pytest.fixture
def trieste_falls() -> Board:
    """Autumn retreats of 1901: Italy has dislodged the Austrian fleet in Trieste."""
    board = Board.start()
    board.step({"ITALY": ["A VEN - TYR", "A ROM - VEN", "F NAP H"]})
    board.step({"ITALY": ["A VEN - TRI", "A TYR S A VEN - TRI", "F NAP H"]})
    return board


@pytest.fixture
def blind_players() -> dict[str, Player]:
    """Players that need no board, and the fierce player of these tests."""
    return {name: _TABLE[name] for name in ("hold", "random", "mover", "fierce")}
