"""A game between people, policy versions and scripted players.

This module does no HTTP and writes no file. A phase is resolved as soon as every person with something to order has ordered. The
players' seeds depend on game, phase and power, so after an undo they answer equal orders equally.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from entente.game.board import Board
from entente.game.legal import LegalOrders, OrderKind
from entente.game.snapshot import POWERS
from entente.players.policy import DecisionRequest
from entente.telemetry.errors import EntenteError, InputError
from storage.played_games import HUMAN, SavedProposal

FIRST_YEAR = 1901


class StaleError(EntenteError):
    """The request is about an earlier position, or one whose phase is being resolved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    orders: tuple[str, ...]
    probability: float | None = None
    """Probability of the whole set under the policy version; None for other players."""
    proposals: tuple[SavedProposal, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """A resolved phase; compares by identity."""

    board: Board
    """The position before it; never stepped."""
    orders: Mapping[str, tuple[str, ...]]
    results: Mapping[str, tuple[str, ...]]
    """Result marks by unit; see `PhaseResult.results`."""
    probabilities: Mapping[str, float]
    """Of policy versions' order sets, by power."""
    proposals: Mapping[str, tuple[SavedProposal, ...]]


class Players(Protocol):
    """Chooses orders for all seats without a person."""

    @property
    def names(self) -> Sequence[str]:
        """The players that may take a seat or give a hint."""
        ...

    async def choose(self, name: str, request: DecisionRequest) -> Choice: ...


async def _keep_nothing() -> None:
    """Default of `PlayedGame.keep`."""


class PlayedGame:
    """One game in progress.

    Attributes:
        name: used in file names and seeds.
        seats: the player of each power: one of `players`, or HUMAN for a person.
        pending: order sets of people for this phase.
        years: game years after which it ends; 0: when a power has won.
        revision: increases with every change; requests with an older one raise StaleError.
        keep: stores the game; awaited after every change.
    """

    def __init__(self, name: str, seats: Mapping[str, str], players: Players, *, seed: int = 0, years: int = 0) -> None:
        self.name, self.seats, self.seed, self.years = name, dict(seats), seed, years
        if sorted(self.seats) != sorted(POWERS):
            raise InputError(f"a game needs a player for each of {', '.join(POWERS)}")
        self.turns: list[Turn] = []
        self.board = Board.start()
        self.pending: dict[str, tuple[str, ...]] = {}
        self.revision = 0
        self.keep: Callable[[], Awaitable[None]] = _keep_nothing
        self.changed = asyncio.Event()
        """Set, and replaced, whenever the revision rises."""
        self._players = players
        self._busy = False

    @property
    def is_over(self) -> bool:
        return self.board.is_over or bool(self.years and self.board.year >= FIRST_YEAR + self.years)

    @property
    def last_year(self) -> int:
        """The current year, or that of the game's end."""
        return min(self.board.year, FIRST_YEAR + self.years - 1) if self.years else self.board.year

    @property
    def people(self) -> tuple[str, ...]:
        return tuple(power for power in POWERS if self.seats[power] == HUMAN and self.board.is_alive(power))

    @property
    def waits_for(self) -> tuple[str, ...]:
        """Powers of people that must order before this phase can be resolved."""
        legal = {} if self.is_over else self.board.legal_orders()
        return tuple(power for power in self.people if power in legal and power not in self.pending)

    @property
    def is_deciding(self) -> bool:
        return self._busy

    async def order(self, power: str, orders: Sequence[str], revision: int) -> None:
        """Submit a person's orders. Units without one hold, dislodged ones disband, and builds are waived.

        If no other person has to order, resolves this phase and all that follow, until a person has something to order.

        Raises:
            StaleError: the game has moved on, or the power has ordered.
            InputError: the power is not a person's, has nothing to order, an order is not legal, or the game cannot be stored.
            EngineError, DataError: a player's decision failed. The orders stay pending; `go_on` tries again.
        """
        self._check(revision)
        if self.seats.get(power) != HUMAN:
            raise InputError(f"{power} is played by {self.seats.get(power, 'nobody')}: order for a power that people play")
        legal = self.board.legal_orders().get(power)
        if legal is None:
            raise InputError(f"{power} has nothing to order in {self.board.phase}")
        if power in self.pending:
            raise StaleError(f"{power} has already ordered in another window")
        self.pending[power] = _whole(legal, orders, self.board.phase)
        turns = len(self.turns)
        self._change()
        try:
            await self.keep()
        except InputError:
            if not self._busy and len(self.turns) == turns:  # then these orders can be submitted again
                self.pending.pop(power, None)
                self._change()
            raise
        # Meanwhile another person may have ordered last, and that call may resolve the phase.
        if not self._busy and len(self.turns) == turns and not self.waits_for:
            await self._play_on()

    async def go_on(self, revision: int) -> None:
        """Resolve one phase in which no person has to order: in a game without people, or after a failed decision.

        Raises StaleError; InputError if the game is over or a person has to order first; EngineError or DataError for a failed
        decision.
        """
        self._check(revision)
        if self.waits_for:
            raise InputError(f"{', '.join(self.waits_for)} must order first")
        await self._play_on()

    async def undo(self, turn: int, revision: int) -> None:
        """Return to the position before this turn, counted from 0. Raises StaleError, and InputError if there is no such turn."""
        self._check(revision, over=True)
        if not 0 <= turn < len(self.turns):
            raise InputError(f"there is no position {turn} to return to: the game has {len(self.turns)} before this one")
        self.board = self.turns[turn].board.fork()
        del self.turns[turn:]
        self.pending.clear()
        self._change()
        await self.keep()

    async def hint(self, power: str, player: str, revision: int) -> Choice:
        """The order set that `player` would choose. Raises StaleError, also if the game moves on meanwhile; InputError
        (nothing to order, no such player), EngineError, DataError."""
        self._check(revision)
        if player not in self._players.names:
            raise InputError(f"there is no player '{player}' here: choose among {', '.join(self._players.names)}")
        if power not in self.board.legal_orders():
            raise InputError(f"{power} has nothing to order in {self.board.phase}")
        request, turns = self._request(power, "hint"), self.turns.copy()
        # Two players that are asked at once make two requests of the engine; meanwhile the game may go on, and step its board.
        request = replace(request, game=f"{request.game}/{player}", board=self.board.fork())
        choice = await self._players.choose(player, request)
        if self.turns != turns:
            raise StaleError(f"the game has moved on while {player} chose: ask again")
        return choice

    def replay(
        self,
        orders: Mapping[str, Sequence[str]],
        probabilities: Mapping[str, float],
        proposals: Mapping[str, tuple[SavedProposal, ...]],
    ) -> None:
        """Resolve a phase with recorded orders, to restore a game. Raises InputError if it is over, or orders are not legal."""
        if self.is_over:
            raise InputError(f"it continues after its end in {self.last_year}")
        legal = self.board.legal_orders()
        for power, own in orders.items():
            if power not in legal or not legal[power].admits(own):
                raise InputError(f"{', '.join(own) or 'nothing'} is no legal order set of {power} in {self.board.phase}")
        if set(orders) != set(legal):
            raise InputError(f"it lacks orders in {self.board.phase}")
        self._step({power: tuple(own) for power, own in orders.items()}, dict(probabilities), dict(proposals))

    async def _play_on(self) -> None:
        self._busy = True
        self._change()
        try:
            while True:
                await self._play_phase()
                if self.is_over or self.waits_for or not self.people:
                    return
        finally:
            self._busy = False
            self._change()

    async def _play_phase(self) -> None:
        asked = [power for power in self.board.legal_orders() if power not in self.pending]
        choices = await asyncio.gather(*(self._players.choose(self.seats[power], self._request(power)) for power in asked))
        chosen = dict(zip(asked, choices, strict=True))
        orders = self.pending | {power: choice.orders for power, choice in chosen.items()}
        probabilities = {power: each.probability for power, each in chosen.items() if each.probability is not None}
        self._step(orders, probabilities, {power: each.proposals for power, each in chosen.items() if each.proposals})
        self._change()
        await self.keep()

    def _step(
        self,
        orders: Mapping[str, tuple[str, ...]],
        probabilities: Mapping[str, float],
        proposals: Mapping[str, tuple[SavedProposal, ...]],
    ) -> None:
        before = self.board.fork()
        result = self.board.step(orders)
        self.turns.append(
            Turn(board=before, orders=orders, results=result.results, probabilities=probabilities, proposals=proposals)
        )
        self.pending.clear()

    def _request(self, power: str, *purpose: str) -> DecisionRequest:
        return DecisionRequest(
            game="/".join((self.name, str(self.revision), *purpose)),
            rng_name="/".join((self.name, str(self.seed), *purpose)),
            phase_index=len(self.turns),
            power=power,
            legal=self.board.legal_orders()[power],
            board=self.board,
            snapshot_id=self.board.snapshot_id,
        )

    def _check(self, revision: int, *, over: bool = False) -> None:
        if self._busy:
            raise StaleError("the other players are still choosing: wait for them")
        if revision != self.revision:
            raise StaleError("the game has moved on in another window: the page now shows the current position")
        if self.is_over and not over:
            raise InputError(f"the game ended in {self.last_year}: start another, or go back to an earlier position")

    def _change(self) -> None:
        self.revision += 1
        self.changed.set()
        self.changed = asyncio.Event()


def _whole(legal: LegalOrders, orders: Sequence[str], phase: str) -> tuple[str, ...]:
    wanted = [order for order in orders if order != "WAIVE"]
    if whole := legal.completed(wanted):
        for order in wanted:
            if order not in whole:
                raise InputError(f"'{order[:40]}' is no legal order of {legal.power} in {phase}, or a second one for its place")
        if legal.admits(whole):
            return whole
    if legal.kind is OrderKind.DISBAND:
        raise InputError(f"{legal.power} must disband {legal.picks} of its units in {phase}")
    raise InputError(f"{legal.power} may build only {legal.picks} in {phase}")
