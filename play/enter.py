"""Plays seats in games on the server of the `diplomacy` package, several games at once, until they are over.

The server's own state is all that a game is continued from, so either side may be killed at any time: the games go on where the
server has them. A seat orders once for each event that the server reports; nothing is tried again without one. A lost connection
is opened again a bounded number of times. What happens to a game is one sentence. Dice are named by game, phase and power, so a
phase that is played again gets equal orders.
"""

import asyncio
import contextlib
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
from play.entry import Account, Entry, FinishedGame, choose_games, join, join_free, refusal, sign_in_refusal
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
class _Seat:
    power: str
    account: int
    state: Mapping[str, Any]
    """The newest position that the server reported."""
    due: float = 0.0
    """Monotonic time at which the phase is played at the latest; 0: there is no deadline."""
    asked: str = ""
    """Phase for which orders are, or were, chosen."""
    chosen: tuple[str, frozenset[str]] = "", frozenset()
    """Phase, and the orders that were chosen for it. It may be played before the server says that it has them."""
    taken: str = ""
    """Newest phase for which the server has said that it has them."""
    task: "asyncio.Task[None] | None" = None
    taken_back: int = 0


@dataclass(slots=True, kw_only=True)
class _Game:
    seats: dict[str, _Seat] = field(default_factory=dict)
    """By power."""
    status: str = ""
    deadline_s: int = 0
    controllers: dict[str, str] = field(default_factory=dict)
    probabilities: dict[str, dict[str, float]] = field(default_factory=dict)


class EnteredGames:
    """The games of one command.

    Attributes:
        lost: games that could not be played to their end.
        phases: phases that were played with a seat of ours, counted by game.
        missed: phases of a seat whose deadline came before its orders.
    """

    def __init__(self, entry: Entry, keep: Callable[[FinishedGame], None], say: Callable[[str], None]) -> None:
        """`keep` stores a game that is over; `say` takes sentences for the user."""
        self.entry = entry
        self.lost: list[str] = []
        self.phases = self.missed = 0
        self._keep, self._say = keep, say
        self._players: Players | None = None
        self._tokens: dict[str, str] = {}
        self._games: dict[str, _Game] = {}
        self._is_entered = False

    async def check(self) -> None:
        """Sign in and look at the games, without joining one: before an engine is started for them.

        Raises:
            InputError: an account or a game cannot be used.
            ServerLostError: nobody listens there.
        """
        async with connect(self.entry.address) as client:
            choose_games(self.entry, [await self._listed(client, each) for each in self.entry.accounts], self._say)

    async def play(self, players: Players) -> None:
        """Play until all games are over or lost.

        Raises:
            InputError: an account, a game, a power or a password cannot be used.
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
        tasks = [seat.task for game in self._games.values() for seat in game.seats.values() if seat.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- taking seats ----

    async def _sit(self, client: ServerClient) -> None:
        """Sign in, and take the seats; on a new connection, take them again and see where the games are."""
        listed = [await self._listed(client, account) for account in self.entry.accounts]
        if not self._is_entered:
            self._games = {name: _Game() for name in choose_games(self.entry, listed, self._say)}
        for name in list(self._games):
            try:
                for number, by_id in enumerate(listed):
                    await self._take_seat(client, name, number, by_id.get(name))
            except ForeignServerError:
                raise
            except (InputError, RefusedError) as error:
                if not self._is_entered:
                    raise InputError(str(error)) from error
                self._lose(name, str(error))
        self._is_entered = True
        for name in list(self._games):
            for power in list(self._games[name].seats) if name in self._games else ():
                await self._consider(client, name, power)

    async def _listed(self, client: ServerClient, account: Account) -> dict[str, ServerGame]:
        """The games by id, as the account sees them. A token of before spares a sign-in, which blocks the server for a second."""
        ids = list(self._games) or list(self.entry.games) or None
        if account.name in self._tokens:
            try:
                return {each.game: each for each in await client.games(self._tokens[account.name], ids)}
            except RefusedError:
                del self._tokens[account.name]
        try:
            self._tokens[account.name] = await client.sign_in(account.name, account.password)
        except RefusedError as error:
            raise sign_in_refusal(self.entry.address, account, error) from error
        found = {each.game: each for each in await client.games(self._tokens[account.name], ids)}
        if ids and (missing := next((each for each in ids if each not in found), "")) and not self._is_entered:
            others = [each.game for each in await client.games(self._tokens[account.name])]
            has = f"it has {', '.join(sorted(others)[:5])}{' and others' if len(others) > 5 else ''}" if others else "it has none"
            raise InputError(f"there is no game '{missing}' on {self.entry.address}: {has}")
        return found

    async def _take_seat(self, client: ServerClient, name: str, number: int, found: ServerGame | None) -> None:
        if name not in self._games:  # it was over, as another account has seen
            return
        account = self.entry.accounts[number]
        token, wanted = self._tokens[account.name], self.entry.powers[number] if self.entry.powers else ""
        if found is None:
            raise InputError("the server no longer has it")
        if why := refusal(found):
            raise InputError(f"it {why}" if self._is_entered else f"game '{name}' {why}")
        if found.mine and wanted and wanted not in found.mine:
            raise InputError(f"account '{account.name}' plays {found.mine[0]} in game '{name}', not {wanted}: leave out --power")
        if found.status == "completed":
            return await self._finish_seen(client, name, token, wanted or found.mine[0])
        if found.mine:
            joined = await join(self.entry, client, token, name, wanted or found.mine[0])
        else:
            joined = await join_free(self.entry, client, token, name, account, wanted)
        await self._seat(client, name, number, joined)

    async def _seat(self, client: ServerClient, name: str, number: int, joined: JoinedGame) -> None:
        game = self._games[name]
        old = game.seats.get(joined.power)
        seat = _Seat(
            power=joined.power,
            account=number,
            state=joined.state,
            chosen=old.chosen if old else ("", frozenset()),
            taken=old.taken if old else "",
            taken_back=old.taken_back if old else 0,
        )
        game.seats[joined.power] = seat
        game.status, game.deadline_s = joined.status, joined.deadline_s
        game.controllers = dict(joined.controllers)
        if game.deadline_s and game.status == "active":
            left = await client.seconds_left(self._token(seat), name, seat.power, joined.state["name"])
            seat.due = time.monotonic() + (game.deadline_s if left is None else left)

    def _token(self, seat: _Seat) -> str:
        return self._tokens[self.entry.accounts[seat.account].name]

    # ---- what the server reports ----

    async def _listen(self, client: ServerClient) -> None:
        while self._games:
            notice = await client.notices.get()
            if isinstance(notice, BaseException):
                raise notice
            game = self._games.get(notice.game)
            if game is not None and notice.power in game.seats:
                try:
                    await self._take(client, notice, game, game.seats[notice.power])
                except ForeignServerError:
                    raise
                except (InputError, RefusedError) as error:
                    self._lose(notice.game, str(error))

    async def _take(self, client: ServerClient, notice: Notice, game: _Game, seat: _Seat) -> None:
        name = notice.game
        match notice:
            case PhasePlayed():
                self._check_played(notice, game, seat)
                seat.state = notice.state
                seat.due = time.monotonic() + game.deadline_s if game.deadline_s else 0.0
                await self._consider(client, name, seat.power)
            case StatusChanged():
                if notice.status == "active" != game.status and game.deadline_s:
                    for each in game.seats.values():
                        each.due = time.monotonic() + game.deadline_s
                game.status = notice.status
                for power in list(game.seats):
                    await self._consider(client, name, power)
            case ControllersChanged():
                game.controllers = dict(notice.controllers)
                if game.controllers.get(seat.power) != self.entry.accounts[seat.account].name:
                    await self._take_back(client, name, seat)
            case PositionChanged():
                await self._sit_again(client, name, seat)
            case GameDeleted():
                self._lose(name, "the server deleted it")

    def _check_played(self, notice: PhasePlayed, game: _Game, seat: _Seat) -> None:
        """Count the phase, and say if it was not played with the orders that were chosen."""
        first = next(iter(game.seats))
        self.phases += seat.power == first
        if seat.chosen[0] == notice.played and _same(seat.chosen[1], notice.orders):
            return
        game.probabilities.get(notice.played, {}).pop(seat.power, None)
        if seat.asked != notice.played or notice.state["name"] == OVER:
            return
        where, played = f"{notice.played} of game '{notice.game}'", ", ".join(notice.orders) or "no orders"
        if seat.taken == notice.played:
            self._say(f"{seat.power} did not play in {where} what it ordered: {played}")
        else:
            self.missed += 1
            self._say(f"{seat.power} missed the deadline of {where}: it played {played}")

    async def _take_back(self, client: ServerClient, name: str, seat: _Seat) -> None:
        """Join again where the server took the power away, as it does at a deadline without orders."""
        holder = self._games[name].controllers.get(seat.power, "dummy")
        if holder != "dummy":
            return self._lose(name, f"{seat.power} now belongs to account '{holder}'")
        if seat.taken_back == _MOST_TAKEN_BACK:
            return self._lose(name, f"the server took {seat.power} away {_MOST_TAKEN_BACK + 1} times")
        seat.taken_back += 1
        self.missed += 1
        self._say(f"{seat.power} missed the deadline of {seat.state['name']} of game '{name}' and was removed: it joins again")
        await self._sit_again(client, name, seat)

    async def _sit_again(self, client: ServerClient, name: str, seat: _Seat) -> None:
        if seat.task:
            seat.task.cancel()
        joined = await join(self.entry, client, self._token(seat), name, seat.power)
        if joined.power != seat.power:
            return self._lose(name, f"the server deals {joined.power} where {seat.power} was played")
        await self._seat(client, name, seat.account, joined)
        await self._consider(client, name, seat.power)

    # ---- deciding ----

    async def _consider(self, client: ServerClient, name: str, power: str) -> None:
        """Choose orders for the seat if its position asks for some; end a game that is over."""
        game = self._games.get(name)
        if game is None:
            return
        seat = game.seats[power]
        if game.status == "canceled":
            return self._lose(name, "it was canceled on the server")
        if game.status == "completed" or seat.state["name"] == OVER:
            return await self._finish(client, name, game)
        if game.status != "active":
            return
        if seat.asked == seat.state["name"]:
            return
        if seat.task:
            seat.task.cancel()
        seat.task = asyncio.create_task(self._decide(client, name, game, seat))
        seat.task.add_done_callback(lambda task: _pass_on(task, client))

    async def _decide(self, client: ServerClient, name: str, game: _Game, seat: _Seat) -> None:
        state, phase = seat.state, str(seat.state["name"])
        try:
            board = board_of_state(state)
        except InputError as error:
            return self._lose(name, f"the server's position cannot be played: {error}")
        try:
            if self.entry.draw_after and board.year > self.entry.draw_after and board.is_alive(seat.power):
                await client.vote_draw(self._token(seat), name, seat.power, phase)
            if (legal := board.legal_orders().get(seat.power)) is None:
                return
            seat.asked = phase
            choice = await self._in_time(client, name, seat, board, legal)
            seat.chosen = phase, frozenset(choice.orders)
            if choice.probability is not None:
                game.probabilities.setdefault(phase, {})[seat.power] = choice.probability
            await client.give_orders(self._token(seat), name, seat.power, phase, choice.orders)
            seat.taken = phase
        except RefusedError as error:
            game.probabilities.get(phase, {}).pop(seat.power, None)
            if seat.state["name"] == phase and not _is_late(error):
                self._say(f"the server refuses what {seat.power} orders in {phase} of game '{name}': {error}")

    async def _in_time(self, client: ServerClient, name: str, seat: _Seat, board: Board, legal: LegalOrders) -> Choice:
        """What the player chooses. If the deadline is near, the server has default orders meanwhile, which nobody waits for."""
        request = DecisionRequest(
            game=f"entered/{name}/{board.phase}",
            dice=f"entered/{self.entry.seed}/{name}/{board.phase}",
            ply=0,
            power=seat.power,
            legal=legal,
            board=board,
            snapshot_id=board.snapshot(game_id=name, seed=0, source="entered").snapshot_id,
        )
        assert self._players is not None
        choosing = asyncio.ensure_future(self._players.choose(self.entry.player, request))
        try:
            if seat.due:
                left = seat.due - time.monotonic()
                await asyncio.wait({choosing}, timeout=max(0.0, left - max(1.0, 0.1 * left)))
                if not choosing.done():
                    disbands = legal.options[: legal.picks] if legal.kind is OrderKind.DISBAND else ()
                    orders = legal.completed([options[0] for options in disbands]) or ()
                    await client.give_orders(self._token(seat), name, seat.power, board.phase, orders, final=False)
            return await choosing
        finally:
            choosing.cancel()

    # ---- ends ----

    async def _finish(self, client: ServerClient, name: str, game: _Game) -> None:
        seat = next(iter(game.seats.values()))
        saved = await client.saved(self._token(seat), name, seat.power, str(seat.state["name"]))
        self._end(name)
        self._store(
            FinishedGame(
                game=name,
                saved=saved,
                powers=tuple(game.seats),
                controllers=game.controllers,
                probabilities=game.probabilities,
            )
        )

    async def _finish_seen(self, client: ServerClient, name: str, token: str, power: str) -> None:
        """End a game that was over before this command came to it; who sat there is seen by an observer, if one is allowed."""
        saved = await client.saved(token, name, power, OVER)
        controllers: Mapping[str, str] = {}
        with contextlib.suppress(RefusedError):  # nobody may observe
            controllers = (await client.join(token, name, None, self.entry.game_password)).controllers
        ours = {each.name for each in self.entry.accounts}
        powers = tuple(each for each, who in controllers.items() if who in ours) or (power,)
        if name in self._games:
            self._end(name)
            self._store(FinishedGame(game=name, saved=saved, powers=powers, controllers=controllers, probabilities={}))

    def _store(self, finished: FinishedGame) -> None:
        try:
            self._keep(finished)
        except InputError as error:
            self.lost.append(finished.game)
            self._say(f"game '{finished.game}' is over, and cannot be stored: {error}")

    def _lose(self, name: str, why: str) -> None:
        if name in self._games:
            self._end(name)
            self.lost.append(name)
            self._say(f"game '{name}' is lost: {why}")

    def _end(self, name: str) -> None:
        current = asyncio.current_task()
        for seat in self._games.pop(name).seats.values():
            if seat.task and seat.task is not current:
                seat.task.cancel()


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
