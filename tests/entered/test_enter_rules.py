"""Rules of `entente.play.enter` that need no server: what is refused, and that errors end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from diplomacy import Game

from entente.game.server_client import JoinedGame, RefusedError, ServerGame
from entente.play import enter
from entente.play.enter import EnteredGames, Entry, check_game
from entente.telemetry.errors import EntenteError, InputError
from storage.played_games import SavedGame

GAME = ServerGame(
    game="friday",
    phase="S1901M",
    map="standard",
    rules=("NO_PRESS",),
    status="forming",
    players=6,
    seats=7,
    deadline_s=0,
    has_password=False,
    mine=(),
)


def _games(**changes: object) -> EnteredGames:
    entry = Entry(address="127.0.0.1:1", account="ours", password="hush", games=("friday",), player="first")
    return EnteredGames(replace(entry, **changes), Path("games"), lambda sentence: None)


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        pytest.param(replace(GAME, map="ancmed"), "is on the map 'ancmed', and only 'standard'", id="map"),
        pytest.param(replace(GAME, status="completed"), "is over", id="over"),
        pytest.param(replace(GAME, players=7), "is full: 7 of 7 seats are taken", id="full"),
        pytest.param(replace(GAME, has_password=True), "asks for a password", id="password"),
        pytest.param(replace(GAME, mine=("ITALY",)), "plays ITALY in game 'friday', not FRANCE", id="another-power"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused_before_it_is_joined(seen: ServerGame, sentence: str):
    with pytest.raises(InputError, match=sentence):
        check_game(_games(power="FRANCE").entry, seen)


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(GAME, id="free"),
        pytest.param(replace(GAME, players=7, status="active", mine=("FRANCE",)), id="ours"),
        pytest.param(replace(GAME, status="completed", mine=("FRANCE",)), id="ours-and-over"),
    ],
)
def test_a_free_seat_and_a_seat_of_before_are_taken(seen: ServerGame):
    check_game(_games().entry, seen)


def test_a_server_that_stays_away_ends_the_command_after_so_many_tries(monkeypatch: pytest.MonkeyPatch, first_orders):
    monkeypatch.setattr(enter, "LONGEST_WAIT_S", 0.0)
    games, said = _games(), list[str]()
    games._say, games._is_entered = said.append, True  # as after a first connection
    with pytest.raises(EntenteError, match=f"after {enter.MOST_TRIES} tries this ends: give the same command again"):
        asyncio.run(games.play(first_orders()))
    assert len(said) == enter.MOST_TRIES and all("trying again" in sentence for sentence in said)


def test_a_phase_is_ordered_once_and_a_late_order_is_told(monkeypatch: pytest.MonkeyPatch, first_orders):
    """The server plays spring at once, autumn before our orders come, and is then over."""
    kept, told, given = [], list[str](), []
    boards = [Game(), Game()]
    boards[1].process()

    class Server:
        address, phase = "here", 0

        async def sign_in(self, account: str, password: str) -> str:
            return "token"

        async def games(self, token: str, ids: object) -> list[ServerGame]:
            status = "active" if self.phase < 2 else "completed"
            phase = ("S1901M", "F1901M", "COMPLETED")[self.phase]
            return [replace(GAME, phase=phase, status=status, mine=("FRANCE",), players=7)]

        async def join(self, *asked: object) -> JoinedGame:
            return JoinedGame(power="FRANCE", state=boards[self.phase].get_state(), controllers={})

        async def give_orders(self, token: str, game: str, power: str, phase: str, orders: list[str]) -> None:
            given.append(phase)
            self.phase += 1
            if phase == "F1901M":
                raise RefusedError("ResponseException", "Invalid order phase, received F1901M, server phase is W1901A")

        async def saved(self, *asked: object) -> dict[str, object]:
            return {"phases": [{"state": {"centers": {"FRANCE": ["PAR"]}}}]}

    @asynccontextmanager
    async def connect(address: str) -> AsyncIterator[Server]:
        yield server

    server = Server()
    monkeypatch.setattr(enter, "connect", connect)
    monkeypatch.setattr(enter, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(enter, "keep_game", lambda *asked: kept.append(asked) or SavedGame(name="friday", seats={}))
    games = _games()
    games._say = told.append
    asyncio.run(games.play(first_orders()))
    assert given == ["S1901M", "F1901M"] and games.missed == 1 and games.lost == []
    assert told[0] == "FRANCE missed the deadline of F1901M of game 'friday'" and "FRANCE has 1 centres" in told[1]
    assert kept[0][4] == {"S1901M": 0.5}


def test_a_password_is_in_no_text_of_an_account():
    assert "hush" not in repr(_games().entry)
