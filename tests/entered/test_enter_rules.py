"""Rules of `play.enter` that need no server: what is refused, and that errors end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from diplomacy import Game

from game.server_client import JoinedGame, Notice, PhasePlayed, ServerGame, StatusChanged
from play import enter
from play.enter import EnteredGames
from play.entry import Account, Entry, FinishedGame, check_game
from telemetry.errors import EntenteError, InputError

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
    account = Account(name="ours", password="hush")
    entry = Entry(address="127.0.0.1:1", account=account, games=("friday",), player="first")
    return EnteredGames(replace(entry, **changes), lambda game: None, lambda sentence: None)


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


@pytest.mark.parametrize(
    ("plays", "said", "missed", "probabilities"),
    [
        pytest.param(lambda orders: orders, [], 0, {"S1901M": 0.5}, id="what-was-ordered"),
        pytest.param(
            lambda orders: ["F BRE H", "A MAR H", "A PAR H"],
            ["FRANCE missed the deadline of S1901M of game 'friday': it played F BRE H, A MAR H, A PAR H"],
            1,
            {},
            id="other-orders",
        ),
    ],
)
def test_a_phase_that_is_played_before_the_server_says_that_it_has_the_orders(
    monkeypatch: pytest.MonkeyPatch, first_orders, plays, said, missed, probabilities
):
    finished, told = list[FinishedGame](), list[str]()
    spring, autumn = Game(), Game()
    autumn.process()

    class Server:
        """Plays a phase at once, and answers the request for it afterwards; then the game is over."""

        def __init__(self) -> None:
            self.notices: asyncio.Queue[Notice] = asyncio.Queue()

        async def sign_in(self, account: str, password: str) -> str:
            return "token"

        async def games(self, token: str, ids: object) -> list[ServerGame]:
            return [replace(GAME, status="active", mine=("FRANCE",))]

        async def join(self, *asked: object) -> JoinedGame:
            return JoinedGame(
                power="FRANCE",
                status="active",
                state=spring.get_state(),
                controllers={},
                deadline_s=0,
            )

        async def give_orders(self, token: str, game: str, power: str, phase: str, orders: list[str]) -> None:
            if phase == "S1901M":
                state = autumn.get_state()
                self.notices.put_nowait(
                    PhasePlayed(game=game, power=power, played=phase, orders=tuple(plays(orders)), state=state)
                )
                await asyncio.sleep(0.01)
            else:
                self.notices.put_nowait(StatusChanged(game=game, power=power, status="completed"))

        async def saved(self, *asked: object) -> dict[str, object]:
            return {}

    @asynccontextmanager
    async def connect(address: str) -> AsyncIterator[Server]:
        yield Server()

    monkeypatch.setattr(enter, "connect", connect)
    games = EnteredGames(_games().entry, finished.append, told.append)
    asyncio.run(games.play(first_orders()))
    assert (told, games.missed) == (said, missed)
    assert {phase: own for phase, own in finished[0].probabilities.items() if phase == "S1901M"} == probabilities


def test_a_password_is_in_no_text_of_an_account():
    assert "hush" not in repr(_games().entry) and "hush" not in str(Account(name="ours", password="hush"))
