"""A board accepts legal orders, counts every other text as rejected, and never passes it to the engine."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from entente.game.adjudicator import Adjudicator, freeze
from entente.game.board import POWERS, Board
from entente.game.legal import WAIVE
from entente.game.plain import PlainGame, plain_board
from entente.game.scripted import uniform
from entente.telemetry.errors import InputError

CRASHERS = [
    "WAIVE",
    "A",
    "H",
    "S",
    "- - -",
    "hello world",
    "A /SC",
    "",
    " ",
    "\n",
    "A PAR",
    "A PAR -",
    "VOID A PAR H",
    "*A PAR H",
]
"""Some of these raise an IndexError in the engine's own parser."""
WORDS = ["A", "F", "PAR", "MAR", "SPA/NC", "SPA", "H", "-", "S", "C", "R", "D", "B", "VIA", "/", "?", "FRANCE:", "ΠΑΡ", "par"]
ODD = st.one_of(
    st.sampled_from(CRASHERS),
    st.lists(st.sampled_from(WORDS), max_size=7).map(" ".join),
    st.text(max_size=30),
    st.integers(1, 4).map(lambda n: "A PAR - BUR " * 10**n),
    st.just("\udc80 \x00 A PAR H"),
)


def boards() -> list[Board]:
    """A movement, a retreat and an adjustment phase of a fast and of a plain board."""
    found = []
    for start in (Board.start, plain_board):
        rng, board, types = random.Random(5), start(), set()
        while types != {"M", "R", "A"}:
            if board.phase_type not in types:
                types.add(board.phase_type)
                found.append(board.fork())
            board.step({power: uniform(own, rng) for power, own in board.legal_orders().items()})
    return found


BOARDS = boards()


def naively_taken(board: Board, power: str, orders: Sequence[str]) -> list[str]:
    """Oracle: one order per unit or site, in the order given, within the budget."""
    own = board.legal_orders().get(power)
    taken: list[str] = []
    for order in orders:
        sites = [site for site, options in enumerate(own.options) if order in options] if own is not None else []
        open_sites = [site for site in sites if not set(own.options[site]) & set(taken)] if own is not None else []
        if own is not None and len(taken) < own.picks and (open_sites or (order == WAIVE and own.kind == "build")):
            taken.append(order)
    return taken


@settings(max_examples=30, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data(), at=st.integers(0, len(BOARDS) - 1), odd=st.lists(ODD, max_size=5), seed=st.integers(0, 99))
def test_every_order_is_played_or_counted(data, at: int, odd: list[str], seed: int) -> None:
    """Odd texts among legal orders, in any order: the result equals that of the legal orders alone."""
    board, rng = BOARDS[at].fork(), random.Random(seed)
    orders = {power: uniform(own, rng) for power, own in board.legal_orders().items()}
    for text in odd:
        power = rng.choice(POWERS)
        own = orders.setdefault(power, [])
        own.insert(rng.randrange(len(own) + 1), text)
    taken = {power: naively_taken(board, power, own) for power, own in orders.items()}
    clean = board.fork()
    played, alone = board.step(orders), clean.step(taken)
    assert played.rejected == {power: len(own) - len(taken[power]) for power, own in orders.items()}
    assert played.orders == {power: tuple(own) for power, own in taken.items()} == alone.orders
    assert played.results == alone.results and freeze(board._game) == freeze(clean._game)
    assert set(alone.rejected.values()) <= {0}


def test_the_engine_is_never_shown_an_order_that_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    for game in (Adjudicator, PlainGame):
        monkeypatch.setattr(game, "take_orders", lambda game, power, orders: pytest.fail(f"{orders}") if orders else 0)
    for board in BOARDS:
        played = board.fork().step({power: CRASHERS[1:] for power in POWERS})
        assert played.rejected == dict.fromkeys(POWERS, len(CRASHERS) - 1)


def test_what_is_no_list_of_texts_of_a_power_is_refused_and_changes_nothing() -> None:
    board = Board.start()
    before = freeze(board._game)
    for orders in (None, 7, "A PAR H", b"A PAR H", {"A PAR H"}, ["A PAR H", b"x"], [None], iter(["A PAR H"])):
        with pytest.raises(InputError, match="FRANCE must be a list of texts"):
            board.step({"FRANCE": orders})  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="no power 'France'"):
        board.step({"France": ["A PAR H"]})
    assert freeze(board._game) == before
