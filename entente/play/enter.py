"""Plays a seat in games on the server of the `diplomacy` package, several games at once, until they are over.

The server's own state is all that a game is continued from, so either side may be killed at any time: the games go on where the
server has them. Each game is looked at once a second; in a new phase the seat orders once. A lost connection is opened again a
bounded number of times. Dice are named by game, phase and power, so a phase that is played again gets equal orders.

A game is given up only where the server ends it or gives the seat away. In a phase that cannot be read, or for which the player
cannot choose, the seat orders nothing, so that nobody waits for it, and a sentence says so.

A game that is over comes home as the file that `entente play` writes (`storage/played_games.py`). There the seats of others bear
the name of their account, 'alice@league.example:8432'.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from entente.game.board import OVER, Board
from entente.game.legal import LegalOrders
from entente.game.positions import RULES, board_of_state
from entente.game.recorded import last_recorded_orders
from entente.game.rules import MAP
from entente.game.server_client import (
    ForeignServerError,
    JoinedGame,
    RefusedError,
    ServerClient,
    ServerGame,
    ServerLostError,
    connect,
)
from entente.play.entered_file import keep_game
from entente.play.game import Players
from entente.players.policy import DecisionRequest
from entente.telemetry.errors import EntenteError, InputError

MOST_TRIES = 10
"""Connections in a row that are lost within `STEADY_S`, until the command gives up."""
STEADY_S = 60.0
LONGEST_WAIT_S = 30.0
"""Seconds between two tries at most; the first waits are 1, 2, 4 ... s."""
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What to play."""

    address: str
    """HOST:PORT, with ws:// or wss:// before it if it is not plain."""
    account: str
    password: str = field(repr=False)
    games: tuple[str, ...]
    """Ids of the games to play."""
    power: str = ""
    """The power to take in each; empty: one that is free."""
    game_password: str | None = field(default=None, repr=False)
    """Password with which games are joined that ask for one."""
    draw_after: int = 0
    """Game year after which the seat votes for a draw; 0: never."""
    player: str
    """Who orders: a name of `Players`."""
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class _Seat:
    """Our seat in one game."""

    game: str
    power: str = ""
    ordered: str = ""
    """Newest phase for which orders were chosen."""
    controllers: Mapping[str, str] = field(default_factory=dict)
    probabilities: dict[str, float] = field(default_factory=dict)
    """Of the order sets that a version drew and the server has, by phase."""


class EnteredGames:
    """The games of one command.

    Attributes:
        lost: games that could not be played to their end.
        missed: phases whose deadline came before our orders.
    """

    def __init__(self, entry: Entry, folder: Path, say: Callable[[str], None]) -> None:
        """Games that are over are stored in `folder`; `say` takes sentences for the user."""
        self.entry = entry
        self.lost: list[str] = []
        self.missed = 0
        self._folder, self._say = folder, say
        self._seats = {game: _Seat(game=game) for game in entry.games}
        """Of the games that are neither over nor lost."""
        self._is_entered = False

    async def check(self) -> None:
        """Sign in and look at the games, without joining one: before an engine is started for them.

        Raises:
            InputError: the account or a game cannot be used.
            ServerLostError: nobody listens there.
        """
        async with connect(self.entry.address) as client:
            await self._listed(client, await sign_in(client, self.entry.account, self.entry.password))

    async def play(self, players: Players) -> None:
        """Play until all games are over or lost.

        Raises:
            InputError: the account, a game, the power or a password cannot be used.
            EntenteError: the server is gone for good, or a decision failed.
        """
        tries = 0
        while self._seats:
            began = time.monotonic()
            try:
                async with connect(self.entry.address) as client:
                    await self._play(client, players)
            except (ServerLostError, ForeignServerError) as error:
                if not self._is_entered:
                    raise
                tries = 1 if time.monotonic() - began > STEADY_S else tries + 1
                if tries > MOST_TRIES:
                    raise EntenteError(
                        f"{error}; after {MOST_TRIES} tries this ends: give the same command again, and the games go on where "
                        "the server has them"
                    ) from error
                wait = min(LONGEST_WAIT_S, 2.0 ** (tries - 1))
                self._say(f"{error}: trying again in {wait:g} s")
                await asyncio.sleep(wait)

    async def _play(self, client: ServerClient, players: Players) -> None:
        token = await sign_in(client, self.entry.account, self.entry.password)
        if not self._is_entered:
            for found in (await self._listed(client, token)).values():
                if found.status != "completed":
                    await self._join(client, token, self._seats[found.game], found)
            self._is_entered = True
        for seat in self._seats.values():
            seat.ordered = ""  # the server may be back at an earlier phase
        playing = [asyncio.create_task(self._play_game(client, token, seat, players)) for seat in self._seats.values()]
        try:
            await asyncio.gather(*playing)
        finally:
            for each in playing:
                each.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    async def _listed(self, client: ServerClient, token: str) -> dict[str, ServerGame]:
        """The games by id, each of which may be played.

        Raises:
            InputError: one may not.
        """
        found = {each.game: each for each in await client.games(token, list(self._seats))}
        if missing := next((each for each in self._seats if each not in found), ""):
            others = sorted(each.game for each in await client.games(token))
            has = f"it has {', '.join(others[:5])}{' and others' if len(others) > 5 else ''}" if others else "it has none"
            raise InputError(f"there is no game '{missing}' on {self.entry.address}: {has}")
        for each in found.values():
            check_game(self.entry, each)
        return found

    async def _play_game(self, client: ServerClient, token: str, seat: _Seat, players: Players) -> None:
        """Look at one game until it is over or lost, and order in each new phase."""
        try:
            while True:
                found = next(iter(await client.games(token, [seat.game])), None)
                if found is None:
                    raise InputError("the server no longer has it")
                if found.status == "completed" or found.phase == OVER:
                    return await self._finish(client, token, seat, found)
                if why := _refusal(found):
                    raise InputError(f"it {why}")
                if found.status == "active" and (found.phase != seat.ordered or seat.power not in found.mine):
                    await self._order(client, token, seat, found, players)
                elif seat.power not in found.mine:  # the server took it away, as at a deadline without orders
                    await self._join(client, token, seat, found)
                await asyncio.sleep(_LOOK_EVERY_S)
        except ForeignServerError:
            raise
        except (InputError, RefusedError) as error:
            del self._seats[seat.game]
            self.lost.append(seat.game)
            self._say(f"game '{seat.game}' is lost: {error}")

    async def _join(self, client: ServerClient, token: str, seat: _Seat, found: ServerGame) -> JoinedGame:
        """Take a seat, or see the game from the one that we have.

        Raises:
            InputError: no power is free, or the game's password is wrong.
            RefusedError: the server refuses for another reason.
        """
        if seat.power and seat.power not in found.mine:
            seat.ordered = ""
            self._say(f"the server took {seat.power} away in {found.phase} of game '{seat.game}': it joins again")
        wanted = seat.power or self.entry.power or next(iter(found.mine), "")
        if wanted not in found.mine:
            free = await client.free_powers(token, seat.game)
            if not free or (wanted and wanted not in free):
                free_now = ", ".join(free) or "no power"
                raise InputError(f"{wanted or 'every power'} is taken in game '{seat.game}': free is {free_now}")
            wanted = wanted or free[0]
        try:
            joined = await client.join(token, seat.game, wanted, self.entry.game_password)
        except RefusedError as error:
            if error.kind == "GameRegistrationPasswordException":
                raise InputError(
                    f"the password for game '{seat.game}' is wrong: set ENTENTE_GAME_PASSWORD to the right one"
                ) from error
            if self._is_entered:
                raise
            raise InputError(f"account '{self.entry.account}' cannot join game '{seat.game}': {error}") from error
        seat.power, seat.controllers = joined.power, joined.controllers
        return joined

    async def _order(self, client: ServerClient, token: str, seat: _Seat, found: ServerGame, players: Players) -> None:
        """Choose orders for the phase, and give them. In a game with deadlines the server has an empty order set meanwhile."""
        try:
            joined = await self._join(client, token, seat, found)
        except RefusedError as error:
            if error.kind == "GameFinishedException":
                return  # since it was listed; the next look brings it home
            if not str(error).endswith(" is eliminated."):
                raise
            seat.ordered = found.phase
            return
        except ForeignServerError as error:  # the package cannot read the server's own game
            seat.ordered = found.phase
            return await self._order_nothing(client, token, seat, found.phase, error)
        phase = seat.ordered = str(joined.state["name"])
        if phase == OVER:
            return
        try:
            board = board_of_state(joined.state).with_last_orders(last_recorded_orders(joined.phases))
        except InputError as error:
            return await self._order_nothing(client, token, seat, phase, error)
        if self.entry.draw_after and board.year > self.entry.draw_after and board.is_alive(seat.power):
            await self._give(seat, phase, client.vote_draw(token, seat.game, seat.power, phase))
        if (legal := board.legal_orders().get(seat.power)) is None:
            return
        if found.deadline_s:
            meanwhile = client.give_orders(token, seat.game, seat.power, phase, (), final=False)
            if not await self._give(seat, phase, meanwhile):
                return
        try:
            async with asyncio.timeout(found.deadline_s or None):
                choice = await players.choose(self.entry.player, self._request(seat, board, legal))
        except TimeoutError:
            return self._miss(seat, phase)
        except InputError as error:  # such as a prompt that is longer than the model reads
            return await self._order_nothing(client, token, seat, phase, error)
        is_given = await self._give(seat, phase, client.give_orders(token, seat.game, seat.power, phase, choice.orders))
        if is_given and choice.probability is not None:
            seat.probabilities[phase] = choice.probability

    async def _order_nothing(self, client: ServerClient, token: str, seat: _Seat, phase: str, why: Exception) -> None:
        """Give an empty order set, which the server completes by the rules."""
        self._say(f"{seat.power} orders nothing in {phase} of game '{seat.game}', and plays on: {why}")
        await self._give(seat, phase, client.give_orders(token, seat.game, seat.power, phase, ()))

    async def _give(self, seat: _Seat, phase: str, request: Awaitable[None]) -> bool:
        """Send a request of a phase; False if the server refuses it, which ends nothing."""
        try:
            await request
        except RefusedError as error:
            if str(error).startswith("Invalid order phase"):
                self._miss(seat, phase)
            elif error.kind != "GameFinishedException":
                self._say(f"the server refuses what {seat.power} asks in {phase} of game '{seat.game}': {error}")
            return False
        return True

    def _miss(self, seat: _Seat, phase: str) -> None:
        self.missed += 1
        self._say(f"{seat.power} missed the deadline of {phase} of game '{seat.game}'")

    def _request(self, seat: _Seat, board: Board, legal: LegalOrders) -> DecisionRequest:
        return DecisionRequest(
            game=f"entered/{seat.game}/{board.phase}",
            dice=f"entered/{self.entry.seed}/{seat.game}/{board.phase}",
            ply=0,
            power=seat.power,
            legal=legal,
            board=board,
            snapshot_id=board.snapshot(game_id=seat.game, seed=0, source="entered").snapshot_id,
        )

    async def _finish(self, client: ServerClient, token: str, seat: _Seat, found: ServerGame) -> None:
        power = seat.power or self.entry.power or next(iter(found.mine))
        saved = await client.saved(token, seat.game, power, found.phase)
        kept = keep_game(
            saved,
            seat.game,
            power,
            address=self.entry.address,
            player=self.entry.player,
            controllers=seat.controllers,
            probabilities=seat.probabilities,
            folder=self._folder,
            say=self._say,
        )
        del self._seats[seat.game]
        owned = len(saved["phases"][-1]["state"]["centers"].get(power) or ())
        file = self._folder / f"{kept.name}.json"
        self._say(f"game '{seat.game}' is over: {power} has {owned} centres; it is stored in {file}")


async def sign_in(client: ServerClient, account: str, password: str) -> str:
    """A token for the account, which the server makes if it is new.

    Raises:
        InputError: the server does not let it in.
    """
    words = {
        "UserException": "the password is not the account's",
        "ServerRegistrationException": "there is no such account, and the server takes no new ones",
    }
    try:
        return await client.sign_in(account, password)
    except RefusedError as error:
        raise InputError(f"{client.address} does not let account '{account}' in: {words.get(error.kind, error)}") from error


def check_game(entry: Entry, found: ServerGame) -> None:
    """Raise InputError unless the account has a seat in the game or may take one."""
    why = _refusal(found)
    if not why and found.mine:
        if not entry.power or entry.power in found.mine:
            return
        plays = f"account '{entry.account}' plays {found.mine[0]} in game '{found.game}'"
        raise InputError(f"{plays}, not {entry.power}: leave out --power")
    if not why and found.status == "completed":
        why = "is over, and the account had no seat in it"
    if not why and found.players >= found.seats:
        why = f"is full: {found.players} of {found.seats} seats are taken"
    if not why and found.has_password and not entry.game_password:
        why = "asks for a password: set ENTENTE_GAME_PASSWORD to it"
    if why:
        raise InputError(f"game '{found.game}' {why}")


def _refusal(found: ServerGame) -> str:
    """Why the game cannot be played here, to stand after its name; empty if it can."""
    if found.map != MAP:
        return f"is on the map '{found.map}', and only '{MAP}' is played here"
    if unknown := sorted(set(found.rules) - RULES):
        return f"has the rule {unknown[0]}, which is not played here"
    return "was canceled on the server" if found.status == "canceled" else ""
