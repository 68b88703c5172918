"""Rules of `entente.live_games.enter` that need no server: what is refused, and that errors end."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diplomacy import Game

from entente.game.server_client import ForeignServerError, JoinedGame, RefusedError, ServerGame
from entente.live_games import enter
from entente.live_games.enter import EnteredGames, Entry, check_game
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
        pytest.param(replace(GAME, status="canceled"), "was canceled on the server", id="canceled"),
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
    with pytest.raises(EntenteError, match=f"after {enter.MOST_TRIES} tries: run the same command again"):
        asyncio.run(games.play(first_orders()))
    assert len(said) == enter.MOST_TRIES and all("trying again" in sentence for sentence in said)


class Server:
    """A server with one game, which ends after `states`: each of them a state, or what the server answers instead of it."""

    address = "here"

    def __init__(self, states: Sequence[dict[str, Any] | Exception], deadline_s: int = 0) -> None:
        self.states, self.deadline_s = list(states), deadline_s
        self.phase = 0
        self.given: list[tuple[str, tuple[str, ...], bool]] = []
        self.refusals: dict[str, Exception] = {}
        """Raised by the request of this name, or of this name and phase."""

    async def sign_in(self, account: str, password: str) -> str:
        return "token"

    async def games(self, token: str, ids: object) -> list[ServerGame]:
        if self.phase == len(self.states):
            return [replace(GAME, phase="COMPLETED", status="completed", mine=("FRANCE",))]
        return [
            replace(GAME, phase=self._name(), status="active", mine=("FRANCE",), players=7, deadline_s=self.deadline_s),
        ]

    async def join(self, *asked: object) -> JoinedGame:
        state = self.states[self.phase]
        self.phase += isinstance(state, RefusedError) or (isinstance(state, dict) and state["name"] == "COMPLETED")
        if isinstance(state, Exception):
            raise state
        return JoinedGame(power="FRANCE", state=state, controllers={})

    async def give_orders(
        self, token: str, game: str, power: str, phase: str, orders: Sequence[str], *, final: bool = True
    ) -> None:
        self.given.append((phase, tuple(orders), final))
        self.phase += final
        self._refuse(f"give {phase}")

    async def vote_draw(self, *asked: object) -> None:
        self._refuse("vote")

    async def saved(self, *asked: object) -> dict[str, object]:
        return {"phases": [{"state": {"centers": {"FRANCE": ["PAR"]}}}]}

    def _name(self) -> str:
        state = self.states[self.phase]
        return f"X{self.phase}" if isinstance(state, Exception) or state["name"] == "COMPLETED" else state["name"]

    def _refuse(self, request: str) -> None:
        if request in self.refusals:
            raise self.refusals[request]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, first_orders: Any) -> Callable[..., tuple[EnteredGames, list[str], list[Any]]]:
    """Plays the game of a `Server` to its end: the games, what was said, and the arguments of `keep_game`."""

    def played(server: Server, **changes: object) -> tuple[EnteredGames, list[str], list[Any]]:
        @asynccontextmanager
        async def connect(address: str) -> AsyncIterator[Server]:
            yield server

        kept: list[Any] = []
        monkeypatch.setattr(enter, "connect", connect)
        monkeypatch.setattr(enter, "_LOOK_EVERY_S", 0.0)
        monkeypatch.setattr(enter, "keep_game", lambda *asked, **how: kept.append(how) or SavedGame(name="friday", seats={}))
        games, said = _games(**changes), list[str]()
        games._say = said.append
        asyncio.run(asyncio.wait_for(games.play(first_orders()), 60))
        return games, said, kept

    return played


def states() -> list[dict[str, Any]]:
    """Spring and autumn of a game."""
    game = Game()
    spring = game.get_state()
    game.process()
    return [spring, game.get_state()]


def test_a_phase_is_ordered_once_and_a_late_order_is_told(play):
    """The server plays spring at once, autumn before our orders come, and is then over."""
    server = Server(states())
    server.refusals["give F1901M"] = RefusedError(
        "ResponseException", "Invalid order phase, received F1901M, server phase is W1901A"
    )
    games, said, kept = play(server)
    assert [phase for phase, *_ in server.given] == ["S1901M", "F1901M"] and games.missed == 1 and games.lost == []
    assert said[0] == "FRANCE missed the deadline of F1901M of game 'friday'" and "FRANCE has 1 centres" in said[1]
    assert kept[0]["probabilities"] == {"S1901M": 0.5}


ODD = {
    "two units in one province": lambda state: state["units"].update(FRANCE=["A BER", "F BER"]),
    "no lists": lambda state: state.update(units=7),
    "a unit at sea": lambda state: state["units"].update(FRANCE=["A MAO"]),
    "another phase": lambda state: state.update(name="X1901M"),
    "dislodged in a movement phase": lambda state: state["units"]["FRANCE"].append("*A BUR"),
    "a power of another map": lambda state: state["units"].update(NARNIA=["A PAR"]),
    "other rules": lambda state: state.update(rules=["BUILD_ANY"]),
    "unreadable": None,
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
@pytest.mark.parametrize("deadline_s", [0, 60])
def test_in_a_phase_that_cannot_be_read_a_seat_orders_nothing_and_plays_on(play, odd: Any, deadline_s: int):
    spring, autumn = states()
    if odd is not None:
        odd(spring)
    server = Server([ForeignServerError("a message of it cannot be read") if odd is None else spring, autumn], deadline_s)
    if odd is None:
        server.states.insert(0, states()[0])  # it could be read when the game was joined
    games, said, kept = play(server)
    final = [(phase, orders) for phase, orders, is_final in server.given if is_final]
    assert final[-2][1] == () and len(final[-1][1]) == 3 and final[-1][0] == "F1901M"
    assert games.lost == [] and games.missed == 0 and len(kept) == 1
    (sentence,) = [each for each in said if "orders nothing in" in each]
    assert sentence.startswith(f"FRANCE orders nothing in {final[-2][0]} of game 'friday', and continues: ")


@pytest.mark.parametrize(
    "last",
    [
        RefusedError("GameFinishedException", "Game is finished."),
        RefusedError("ResponseException", "FRANCE is eliminated."),
        {"name": "COMPLETED"},
    ],
    ids=["finished-since-it-was-listed", "eliminated", "over-since-it-was-listed"],
)
def test_a_seat_stays_until_the_game_is_over(play, last: dict[str, Any] | Exception):
    games, said, kept = play(Server([states()[0], last]))
    assert games.lost == [] and len(kept) == 1 and len(said) == 1 and "is over" in said[0]


def test_a_vote_that_is_refused_does_not_cost_the_orders(play):
    server = Server([{**state, "name": state["name"].replace("1901", "1903")} for state in states()])
    server.refusals["vote"] = RefusedError("ResponseException", "no votes here")
    games, said, _ = play(server, draw_after=1901)
    assert [len(orders) for _, orders, _ in server.given] == [3, 3] and games.lost == []
    assert len([each for each in said if "no votes here" in each]) == 2


def test_a_player_that_cannot_choose_in_a_position_does_not_lose_the_game(play, monkeypatch: pytest.MonkeyPatch, first_orders):
    async def choose(self: Any, name: str, request: Any) -> Any:
        raise InputError("the prompt is longer than the model reads")

    monkeypatch.setattr(first_orders, "choose", choose)
    server = Server(states())
    games, said, _ = play(server)
    assert [orders for _, orders, _ in server.given] == [(), ()] and games.lost == []
    assert "and continues: the prompt is longer" in said[0]


def test_a_seat_with_a_deadline_has_an_empty_order_set_meanwhile(play):
    server = Server(states()[:1], deadline_s=60)
    play(server)
    assert [(len(orders), final) for _, orders, final in server.given] == [(0, False), (3, True)]


def test_a_password_is_in_no_text_of_an_account():
    assert "hush" not in repr(_games().entry)
