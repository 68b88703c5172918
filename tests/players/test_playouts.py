"""Playouts: exactly the games of `play_fork` with the same dice, in every kind of phase, whatever is left out for speed."""

import asyncio
import random

import pytest

from entente.game.board import POWERS, Board
from entente.game.scripted import player
from entente.game.snapshot import make_snapshot
from entente.players.playouts import Playouts, seats_of, value_of
from entente.players.policy import DecisionRequest
from entente.players.search_settings import SearchSettings
from entente.players.seeds import seeded_rng
from entente.rollouts.fork import ForkPlan, play_fork


def played_to(phase: str) -> Board:
    """A game of DumbBots at the phase; R: the first retreats of the game."""
    rng, board = random.Random(3), Board.start()
    while board.phase != phase and not (phase == "R" and board.phase_type == "R"):
        board.step({power: player("dumbbot")(legal, rng, board) for power, legal in board.legal_orders().items()})
    return board


def asked(board: Board) -> DecisionRequest:
    """A request of the first power that has a choice."""
    legal = next(legal for legal in board.legal_orders().values() if not legal.is_forced)
    return DecisionRequest(game="g", rng_name="g", phase_index=0, power=legal.power, legal=legal, board=board, snapshot_id="")


class Given:
    """The orders in the first phase, then a scripted player with the dice of its seat."""

    def __init__(self, orders: list[str], then: str) -> None:
        self._orders, self._then = orders, then

    async def decide(self, request: DecisionRequest) -> list[str]:
        if request.phase_index == 0:
            return self._orders
        return player(self._then)(request.legal, seeded_rng(request.rng_name, request.board.phase, request.power), request.board)


def forked(board: Board, power: str, orders: list[str], name: str, settings: SearchSettings) -> float:
    """Oracle: the same playout as a fork, with every check and record, to the horizon itself."""
    seats = seats_of(name, settings.player)
    plan = ForkPlan(
        name=name,
        shared_name=name,
        seats=seats | {power: "given"},
        horizon_years=settings.years,
        temperature=1.0,
        snapshot_id="",
    )
    fork = asyncio.run(play_fork(plan, board.fork(), {"given": Given(orders, seats[power])}))
    assert fork.status == "complete" and not fork.rejected
    end = fork.phases[-1]
    return value_of(Board.restore(make_snapshot(end.position, end.phase, source="", game_id="", seed=0)), power)


@pytest.mark.parametrize(
    ("phase", "settings"),
    [
        ("S1901M", SearchSettings()),
        ("F1902M", SearchSettings(player=("mover",))),
        ("F1902M", SearchSettings(player=("repeat",), years=2)),
        ("R", SearchSettings()),
        ("W1901A", SearchSettings(years=2, player=("dumbbot", "territorial", "random"))),
    ],
)
def test_a_playout_has_the_value_of_a_fork_with_the_same_dice(phase: str, settings: SearchSettings):
    board = played_to(phase)
    request = asked(board)
    before = board.snapshot(game_id="", seed=0, source="").position
    tried = [player("random")(request.legal, random.Random(number), board) for number in range(2)]
    playouts = Playouts(board, request.power, "g", settings)
    for number in range(2):  # sets that share their luck, and sets that do not
        for orders in tried:
            assert playouts.value(orders, number) == forked(board, request.power, orders, f"g/playout/{number}", settings)
    assert board.snapshot(game_id="", seed=0, source="").position == before and board.phase == asked(board).board.phase


def test_what_follows_a_position_is_played_once_for_all_order_sets_that_lead_there(monkeypatch):
    """A support of a unit that nobody attacks changes nothing."""
    board = Board.start()
    hold, support, move = (["F BRE H", france, "A PAR H"] for france in ("A MAR H", "A MAR S A PAR", "A MAR - SPA"))
    playouts, played = Playouts(board, "FRANCE", "g", SearchSettings()), []
    advance = Board.advance
    monkeypatch.setattr(Board, "advance", lambda game, orders: (played.append(game.phase), advance(game, orders)))
    assert playouts.value(hold, 0) == playouts.value(support, 0)
    assert played.count("F1901M") == 1 and played.count("S1901M") == 2
    playouts.value(move, 0), playouts.value(hold, 1)
    assert played.count("F1901M") == 3, "another position, and other luck"


def test_an_equal_position_is_played_again_where_a_player_looks_at_the_last_orders(monkeypatch):
    board = Board.start()
    playouts, played = Playouts(board, "FRANCE", "g", SearchSettings(player=("repeat",))), []
    advance = Board.advance
    monkeypatch.setattr(Board, "advance", lambda game, orders: (played.append(game.phase), advance(game, orders)))
    for marseilles in ("A MAR H", "A MAR S A PAR - BUR"):
        playouts.value(["F BRE H", marseilles, "A PAR H"], 0)
    assert played.count("F1901M") == 2


def test_seats_of_a_mix_are_drawn_by_the_name_of_the_dice():
    settings = SearchSettings(player=("dumbbot", "random"))
    sampled = [seats_of(f"g/{number}", settings.player) for number in range(40)]
    assert sampled == [seats_of(f"g/{number}", settings.player) for number in range(40)]
    share = sum(list(seats.values()).count("random") for seats in sampled) / (40 * len(POWERS))
    assert 0.35 < share < 0.65 and all(list(seats) == list(POWERS) for seats in sampled)
