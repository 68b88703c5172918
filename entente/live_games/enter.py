"""Plays a seat in one or more games on the server of the `diplomacy` package until they are over.

All game state is on the server, so client and server may be killed at any time, and the games continue. The client polls each
game once a second and sends orders once per phase. It reconnects a limited number of times. Seeds depend on game, phase and
power, so a repeated phase gets equal orders.

The client drops a game only if the server cancels it or gives the seat to another account. If it cannot read a phase, or the
player cannot choose, it sends no orders, so that nobody waits, and logs the reason.

It stores a finished game in the format of `entente play` (`storage/played_games.py`), where the players of the other seats are
account names, such as 'alice@league.example:8432'.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from entente.game.board import OVER, Board
from entente.game.legal import LegalOrders
from entente.game.positions import board_of_state, variant_refusal
from entente.game.recorded import last_recorded_orders
from entente.game.server_client import (
    ForeignServerError,
    JoinedGame,
    RefusedError,
    ServerClient,
    ServerGame,
    ServerLostError,
    connect,
)
from entente.live_games.entered_file import keep_game
from entente.live_games.game import Players
from entente.players.policy import DecisionRequest
from entente.telemetry.errors import EntenteError, InputError

MOST_TRIES = 10
"""Consecutive connections lost within `STEADY_S` before the command gives up."""
STEADY_S = 60.0
LONGEST_WAIT_S = 30.0
"""Maximum back-off between connections, seconds: 1, 2, 4 ... s."""
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    address: str
    """HOST:PORT, optionally with ws:// or wss://."""
    account: str
    password: str = field(repr=False)
    games: tuple[str, ...]
    power: str = ""
    """The power to take in each; empty: any free one."""
    game_password: str | None = field(default=None, repr=False)
    draw_after: int = 0
    """Game year after which the seat votes for a draw; 0: never."""
    player: str
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class _Seat:
    game: str
    power: str = ""
    ordered: str = ""
    controllers: Mapping[str, str] = field(default_factory=dict)
    probabilities: dict[str, float] = field(default_factory=dict)


class EnteredGames:
    """The games of one command. `lost`: dropped games; `missed`: number of missed deadlines."""

    def __init__(self, entry: Entry, folder: Path, say: Callable[[str], None]) -> None:
        self.entry = entry
        self.lost: list[str] = []
        self.missed = 0
        self._folder, self._say = folder, say
        self._seats = {game: _Seat(game=game) for game in entry.games}
        self._is_entered = False

    async def check(self) -> None:
        """Sign in and check the games without joining, before an engine starts. Raises InputError or ServerLostError."""
        async with connect(self.entry.address) as client:
            await self._listed(client, await sign_in(client, self.entry.account, self.entry.password))

    async def play(self, players: Players) -> None:
        """Play until all games are over or lost. Raises InputError if the account, a game, the power or a password cannot be
        used, EntenteError if the server stays unreachable or a decision failed."""
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
                        f"{error}; gave up after {MOST_TRIES} tries: run the same command again to continue the games"
                    ) from error
                wait = min(LONGEST_WAIT_S, 2.0 ** (tries - 1))
                self._say(f"{error}: trying again in {wait:g} s")
                await asyncio.sleep(wait)

    async def _play(self, client: ServerClient, players: Players) -> None:
        token = await sign_in(client, self.entry.account, self.entry.password)
        if not self._is_entered:
            for listing in (await self._listed(client, token)).values():
                if listing.status != "completed":
                    await self._join(client, token, self._seats[listing.game], listing)
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
        listings = {each.game: each for each in await client.games(token, list(self._seats))}
        if missing := next((each for each in self._seats if each not in listings), ""):
            others = sorted(each.game for each in await client.games(token))
            has = f"it has {', '.join(others[:5])}{' and others' if len(others) > 5 else ''}" if others else "it has none"
            raise InputError(f"there is no game '{missing}' on {self.entry.address}: {has}")
        for each in listings.values():
            check_game(self.entry, each)
        return listings

    async def _play_game(self, client: ServerClient, token: str, seat: _Seat, players: Players) -> None:
        try:
            while True:
                listing = next(iter(await client.games(token, [seat.game])), None)
                if listing is None:
                    raise InputError("it is no longer on the server")
                if listing.status == "completed" or listing.phase == OVER:
                    return await self._finish(client, token, seat, listing)
                if why := _refusal(listing):
                    raise InputError(f"it {why}")
                if listing.status == "active" and (listing.phase != seat.ordered or seat.power not in listing.mine):
                    await self._order(client, token, seat, listing, players)
                elif seat.power not in listing.mine:  # the server took it away, as at a deadline without orders
                    await self._join(client, token, seat, listing)
                await asyncio.sleep(_LOOK_EVERY_S)
        except ForeignServerError:
            raise
        except (InputError, RefusedError) as error:
            del self._seats[seat.game]
            self.lost.append(seat.game)
            self._say(f"game '{seat.game}' is lost: {error}")

    async def _join(self, client: ServerClient, token: str, seat: _Seat, listing: ServerGame) -> JoinedGame:
        """Take a seat, or rejoin ours. Raises InputError if no power is free or the password is wrong, else RefusedError."""
        if seat.power and seat.power not in listing.mine:
            seat.ordered = ""
            self._say(f"the server took {seat.power} away in {listing.phase} of game '{seat.game}': joining again")
        wanted = seat.power or self.entry.power or next(iter(listing.mine), "")
        if wanted not in listing.mine:
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

    async def _order(self, client: ServerClient, token: str, seat: _Seat, listing: ServerGame, players: Players) -> None:
        """Choose and send orders for the phase. In a game with deadlines, first send an empty order set, in case we are late."""
        try:
            joined = await self._join(client, token, seat, listing)
        except RefusedError as error:
            if error.kind == "GameFinishedException":
                return  # since it was listed; the next poll stores it
            if not str(error).endswith(" is eliminated."):
                raise
            seat.ordered = listing.phase
            return
        except ForeignServerError as error:  # the package cannot read the server's own game
            seat.ordered = listing.phase
            return await self._order_nothing(client, token, seat, listing.phase, error)
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
        if listing.deadline_s:
            meanwhile = client.give_orders(token, seat.game, seat.power, phase, (), final=False)
            if not await self._give(seat, phase, meanwhile):
                return
        try:
            async with asyncio.timeout(listing.deadline_s or None):
                choice = await players.choose(self.entry.player, self._request(seat, board, legal))
        except TimeoutError:
            return self._miss(seat, phase)
        except InputError as error:  # such as a prompt that is longer than the model reads
            return await self._order_nothing(client, token, seat, phase, error)
        is_accepted = await self._give(seat, phase, client.give_orders(token, seat.game, seat.power, phase, choice.orders))
        if is_accepted and choice.probability is not None:
            seat.probabilities[phase] = choice.probability

    async def _order_nothing(self, client: ServerClient, token: str, seat: _Seat, phase: str, why: Exception) -> None:
        self._say(f"{seat.power} orders nothing in {phase} of game '{seat.game}', and continues: {why}")
        await self._give(seat, phase, client.give_orders(token, seat.game, seat.power, phase, ()))

    async def _give(self, seat: _Seat, phase: str, request: Awaitable[None]) -> bool:
        try:
            await request
        except RefusedError as error:
            if str(error).startswith("Invalid order phase"):
                self._miss(seat, phase)
            elif error.kind != "GameFinishedException":
                self._say(f"the server rejects a request of {seat.power} in {phase} of game '{seat.game}': {error}")
            return False
        return True

    def _miss(self, seat: _Seat, phase: str) -> None:
        self.missed += 1
        self._say(f"{seat.power} missed the deadline of {phase} of game '{seat.game}'")

    def _request(self, seat: _Seat, board: Board, legal: LegalOrders) -> DecisionRequest:
        return DecisionRequest(
            game=f"entered/{seat.game}/{board.phase}",
            rng_name=f"entered/{self.entry.seed}/{seat.game}/{board.phase}",
            phase_index=0,
            power=seat.power,
            legal=legal,
            board=board,
            snapshot_id=board.snapshot_id,
        )

    async def _finish(self, client: ServerClient, token: str, seat: _Seat, listing: ServerGame) -> None:
        power = seat.power or self.entry.power or next(iter(listing.mine))
        saved = await client.saved(token, seat.game, power, listing.phase)
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
    """A token for the account; the server creates a new account. Raises InputError if the server rejects account or password."""
    words = {
        "UserException": "the password is not the account's",
        "ServerRegistrationException": "there is no such account, and the server does not register new ones",
    }
    try:
        return await client.sign_in(account, password)
    except RefusedError as error:
        raise InputError(f"{client.address} rejects account '{account}': {words.get(error.kind, error)}") from error


def check_game(entry: Entry, listing: ServerGame) -> None:
    """Raise InputError unless the account has a seat in the game or may take one."""
    why = _refusal(listing)
    if not why and listing.mine:
        if not entry.power or entry.power in listing.mine:
            return
        plays = f"account '{entry.account}' plays {listing.mine[0]} in game '{listing.game}'"
        raise InputError(f"{plays}, not {entry.power}: leave out --power")
    if not why and listing.status == "completed":
        why = "is over, and the account had no seat in it"
    if not why and listing.players >= listing.seats:
        why = f"is full: {listing.players} of {listing.seats} seats are taken"
    if not why and listing.has_password and not entry.game_password:
        why = "asks for a password: set ENTENTE_GAME_PASSWORD to it"
    if why:
        raise InputError(f"game '{listing.game}' {why}")


def _refusal(listing: ServerGame) -> str:
    """Why the game cannot be played, a predicate for its name; empty if it can."""
    canceled = "was canceled on the server" if listing.status == "canceled" else ""
    return variant_refusal(listing.map, listing.rules) or canceled
