"""Plays a seat in games on the server of the `diplomacy` package, several games at once, until they are over.

The server's own state is all that a game is continued from, so either side may be killed at any time: the games go on where the
server has them. A seat orders once for each event that the server reports; nothing is tried again without one. A lost connection
is opened again a bounded number of times. What happens to a game is one sentence. Dice are named by game, phase and power, so a
phase that is played again gets equal orders.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from game.board import OVER, Board
from game.legal import WAIVE, LegalOrders, OrderKind
from game.positions import board_of_state
from game.server_client import (
    ControllersChanged,
    ForeignServerError,
    GameDeleted,
    JoinedGame,
    Notice,
    PhasePlayed,
    PositionChanged,
    RefusedError,
    ServerClient,
    ServerGame,
    ServerLostError,
    StatusChanged,
    connect,
)
from play.entry import Entry, FinishedGame, check_game, join, join_free, sign_in_refusal
from play.game import Choice, Players
from rollouts.deciders import DecisionRequest
from telemetry.errors import EntenteError, InputError

MOST_TRIES = 10
"""Connections in a row that are lost within `STEADY_S`, until the command gives up."""
STEADY_S = 60.0
LONGEST_WAIT_S = 30.0
"""Seconds between two tries at most; the first waits are 1, 2, 4 ... s."""
_MOST_TAKEN_BACK = 3
"""Times that a seat which the server took away is joined again in one game."""


@dataclass(slots=True, kw_only=True)
class _Game:
    """A game, and our seat in it."""

    name: str
    power: str = ""
    status: str = ""
    deadline_s: int = 0
    controllers: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    """The newest position that the server reported."""
    due: float = 0.0
    """Monotonic time at which the phase is played at the latest; 0: there is no deadline."""
    asked: str = ""
    """Phase for which orders are, or were, chosen."""
    chosen: tuple[str, frozenset[str]] = "", frozenset()
    """Phase, and the orders that were chosen for it. It may be played before the server says that it has them."""
    taken: str = ""
    """Newest phase for which the server has said that it has them."""
    probabilities: dict[str, float] = field(default_factory=dict)
    task: "asyncio.Task[None] | None" = None
    taken_back: int = 0


class EnteredGames:
    """The games of one command.

    Attributes:
        lost: games that could not be played to their end.
        missed: phases whose deadline came before our orders.
    """

    def __init__(self, entry: Entry, keep: Callable[[FinishedGame], None], say: Callable[[str], None]) -> None:
        """`keep` stores a game that is over; `say` takes sentences for the user."""
        self.entry = entry
        self.lost: list[str] = []
        self.missed = 0
        self._keep, self._say = keep, say
        self._players: Players | None = None
        self._token = ""
        self._games = {name: _Game(name=name) for name in entry.games}
        self._is_entered = False

    async def check(self) -> None:
        """Sign in and look at the games, without joining one: before an engine is started for them.

        Raises:
            InputError: the account or a game cannot be used.
            ServerLostError: nobody listens there.
        """
        async with connect(self.entry.address) as client:
            for found in (await self._listed(client)).values():
                check_game(self.entry, found)

    async def play(self, players: Players) -> None:
        """Play until all games are over or lost.

        Raises:
            InputError: the account, a game, the power or a password cannot be used.
            EntenteError: the server is gone for good, or a decision failed.
        """
        self._players = players
        tries = 0
        while True:
            began = time.monotonic()
            try:
                async with connect(self.entry.address) as client:
                    try:
                        await self._sit(client)
                        return await self._listen(client)
                    finally:
                        await self._stop()
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

    async def _stop(self) -> None:
        tasks = [game.task for game in self._games.values() if game.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- taking seats ----

    async def _sit(self, client: ServerClient) -> None:
        """Sign in, and take the seats; on a new connection, take them again and see where the games are."""
        listed = await self._listed(client)
        for game in list(self._games.values()):
            try:
                await self._take_seat(client, game, listed.get(game.name))
            except ForeignServerError:
                raise
            except (InputError, RefusedError) as error:
                if not self._is_entered:
                    raise InputError(str(error)) from error
                self._lose(game, str(error))
        self._is_entered = True
        for game in list(self._games.values()):
            await self._consider(client, game)

    async def _listed(self, client: ServerClient) -> dict[str, ServerGame]:
        """Our games by id. A token of before spares a sign-in, which blocks the server for a second."""
        if self._token:
            try:
                return {each.game: each for each in await client.games(self._token, list(self._games))}
            except RefusedError:
                self._token = ""
        account = self.entry.account
        try:
            self._token = await client.sign_in(account.name, account.password)
        except RefusedError as error:
            raise sign_in_refusal(self.entry.address, account, error) from error
        found = {each.game: each for each in await client.games(self._token, list(self._games))}
        if (missing := next((each for each in self._games if each not in found), "")) and not self._is_entered:
            others = sorted(each.game for each in await client.games(self._token))
            has = f"it has {', '.join(others[:5])}{' and others' if len(others) > 5 else ''}" if others else "it has none"
            raise InputError(f"there is no game '{missing}' on {self.entry.address}: {has}")
        return found

    async def _take_seat(self, client: ServerClient, game: _Game, found: ServerGame | None) -> None:
        if found is None:
            raise InputError("the server no longer has it")
        check_game(self.entry, found)
        wanted = self.entry.power or next(iter(found.mine), "")
        if found.status == "completed":
            game.power = wanted
            return await self._finish(client, game, OVER)
        if found.mine:
            joined = await join(self.entry, client, self._token, game.name, wanted)
        else:
            joined = await join_free(self.entry, client, self._token, game.name)
        await self._seat(client, game, joined)

    async def _seat(self, client: ServerClient, game: _Game, joined: JoinedGame) -> None:
        game.power, game.state, game.status, game.deadline_s = joined.power, joined.state, joined.status, joined.deadline_s
        game.controllers, game.asked, game.due = joined.controllers, "", 0.0
        if game.deadline_s and game.status == "active":
            left = await client.seconds_left(self._token, game.name, game.power, joined.state["name"])
            game.due = time.monotonic() + (game.deadline_s if left is None else left)

    # ---- what the server reports ----

    async def _listen(self, client: ServerClient) -> None:
        while self._games:
            notice = await client.notices.get()
            if isinstance(notice, BaseException):
                raise notice
            game = self._games.get(notice.game)
            if game is not None and notice.power == game.power:
                try:
                    await self._take(client, notice, game)
                except ForeignServerError:
                    raise
                except (InputError, RefusedError) as error:
                    self._lose(game, str(error))

    async def _take(self, client: ServerClient, notice: Notice, game: _Game) -> None:
        match notice:
            case PhasePlayed():
                self._check_played(notice, game)
                game.state = notice.state
                game.due = time.monotonic() + game.deadline_s if game.deadline_s else 0.0
                await self._consider(client, game)
            case StatusChanged():
                if notice.status == "active" != game.status and game.deadline_s:
                    game.due = time.monotonic() + game.deadline_s
                game.status = notice.status
                await self._consider(client, game)
            case ControllersChanged():
                game.controllers = notice.controllers
                if game.controllers.get(game.power) != self.entry.account.name:
                    await self._take_back(client, game)
            case PositionChanged():
                await self._sit_again(client, game)
            case GameDeleted():
                self._lose(game, "the server deleted it")

    def _check_played(self, notice: PhasePlayed, game: _Game) -> None:
        """Say if the phase was not played with the orders that were chosen."""
        if game.chosen[0] == notice.played and _same(game.chosen[1], notice.orders):
            return
        game.probabilities.pop(notice.played, None)
        if game.asked != notice.played or notice.state["name"] == OVER:
            return
        where, played = f"{notice.played} of game '{game.name}'", ", ".join(notice.orders) or "no orders"
        if game.taken == notice.played:
            self._say(f"{game.power} did not play in {where} what it ordered: {played}")
        else:
            self.missed += 1
            self._say(f"{game.power} missed the deadline of {where}: it played {played}")

    async def _take_back(self, client: ServerClient, game: _Game) -> None:
        """Join again where the server took the power away, as it does at a deadline without orders."""
        holder = game.controllers.get(game.power, "dummy")
        if holder != "dummy":
            return self._lose(game, f"{game.power} now belongs to account '{holder}'")
        if game.taken_back == _MOST_TAKEN_BACK:
            return self._lose(game, f"the server took {game.power} away {_MOST_TAKEN_BACK + 1} times")
        game.taken_back += 1
        self.missed += 1
        where = f"{game.state['name']} of game '{game.name}'"
        self._say(f"{game.power} missed the deadline of {where} and was removed: it joins again")
        await self._sit_again(client, game)

    async def _sit_again(self, client: ServerClient, game: _Game) -> None:
        if game.task:
            game.task.cancel()
        joined = await join(self.entry, client, self._token, game.name, game.power)
        if joined.power != game.power:
            return self._lose(game, f"the server deals {joined.power} where {game.power} was played")
        await self._seat(client, game, joined)
        await self._consider(client, game)

    # ---- deciding ----

    async def _consider(self, client: ServerClient, game: _Game) -> None:
        """Choose orders if the position asks for some; end a game that is over."""
        if game.name not in self._games:
            return
        if game.status == "canceled":
            return self._lose(game, "it was canceled on the server")
        phase = str(game.state["name"])
        if game.status == "completed" or phase == OVER:
            return await self._finish(client, game, phase)
        if game.status != "active" or game.asked == phase:
            return
        if game.task:
            game.task.cancel()
        game.task = asyncio.create_task(self._decide(client, game))
        game.task.add_done_callback(lambda task: _pass_on(task, client))

    async def _decide(self, client: ServerClient, game: _Game) -> None:
        phase = str(game.state["name"])
        try:
            board = board_of_state(game.state)
        except InputError as error:
            return self._lose(game, f"the server's position cannot be played: {error}")
        try:
            if self.entry.draw_after and board.year > self.entry.draw_after and board.is_alive(game.power):
                await client.vote_draw(self._token, game.name, game.power, phase)
            if (legal := board.legal_orders().get(game.power)) is None:
                return
            game.asked = phase
            choice = await self._in_time(client, game, board, legal)
            game.chosen = phase, frozenset(choice.orders)
            if choice.probability is not None:
                game.probabilities[phase] = choice.probability
            await client.give_orders(self._token, game.name, game.power, phase, choice.orders)
            game.taken = phase
        except RefusedError as error:
            game.probabilities.pop(phase, None)
            if game.state["name"] == phase and not _is_late(error):
                self._say(f"the server refuses what {game.power} orders in {phase} of game '{game.name}': {error}")

    async def _in_time(self, client: ServerClient, game: _Game, board: Board, legal: LegalOrders) -> Choice:
        """What the player chooses. If the deadline is near, the server has default orders meanwhile, which nobody waits for."""
        request = DecisionRequest(
            game=f"entered/{game.name}/{board.phase}",
            dice=f"entered/{self.entry.seed}/{game.name}/{board.phase}",
            ply=0,
            power=game.power,
            legal=legal,
            board=board,
            snapshot_id=board.snapshot(game_id=game.name, seed=0, source="entered").snapshot_id,
        )
        assert self._players is not None
        choosing = asyncio.ensure_future(self._players.choose(self.entry.player, request))
        try:
            if game.due:
                left = game.due - time.monotonic()
                await asyncio.wait({choosing}, timeout=max(0.0, left - max(1.0, 0.1 * left)))
                if not choosing.done():
                    disbands = legal.options[: legal.picks] if legal.kind is OrderKind.DISBAND else ()
                    orders = legal.completed([options[0] for options in disbands]) or ()
                    await client.give_orders(self._token, game.name, game.power, board.phase, orders, final=False)
            return await choosing
        finally:
            choosing.cancel()

    # ---- ends ----

    async def _finish(self, client: ServerClient, game: _Game, phase: str) -> None:
        saved = await client.saved(self._token, game.name, game.power, phase)
        self._end(game)
        finished = FinishedGame(
            game=game.name, saved=saved, power=game.power, controllers=game.controllers, probabilities=game.probabilities
        )
        try:
            self._keep(finished)
        except InputError as error:
            self.lost.append(game.name)
            self._say(f"game '{game.name}' is over, and cannot be stored: {error}")

    def _lose(self, game: _Game, why: str) -> None:
        if game.name in self._games:
            self._end(game)
            self.lost.append(game.name)
            self._say(f"game '{game.name}' is lost: {why}")

    def _end(self, game: _Game) -> None:
        del self._games[game.name]
        if game.task and game.task is not asyncio.current_task():
            game.task.cancel()


def _is_late(error: RefusedError) -> bool:
    """True if the phase or the game went on before the orders came; the next notice tells it."""
    return error.kind == "GameFinishedException" or str(error).startswith("Invalid order phase")


def _same(sent: frozenset[str], played: Sequence[str]) -> bool:
    """Whether the orders are equal: the package may name the coast of a supported move, and tells of no waived build."""
    return {_plain(order) for order in sent} - {WAIVE} == {_plain(order) for order in played} - {WAIVE}


def _plain(order: str) -> str:
    return order.rpartition("/")[0] if " S " in order and order[-3:-2] == "/" else order


def _pass_on(task: "asyncio.Task[None]", client: ServerClient) -> None:
    """Wake the listener: with the error that ended a decision, or to see whether a game is left."""
    if not task.cancelled():
        client.notices.put_nowait(task.exception() or Notice(game="", power=""))
