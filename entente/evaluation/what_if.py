"""What if other orders had been given: pairs of forks from a recorded position, and the difference with its 95 % interval.

Both forks of a pair begin in the same phase, one with the orders that were played, one with other orders of one or more powers.
All else is equal: the other powers' orders in that phase, the players who continue, and their random numbers, which are named by
pair, phase and power. So equal orders have a difference of exactly 0. The interval resamples pairs: it is about the luck of the
continuation, and not about other positions or other players.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from entente.evaluation.intervals import Estimate, estimate
from entente.game.board import Board
from entente.game.legal import WAIVE, LegalOrders, OrderKind
from entente.game.players import player
from entente.game.scores import Standing
from entente.game.snapshot import POWERS
from entente.players.policy import Decider, DecisionRequest, Sampled, orders_of
from entente.players.seeds import dice
from entente.rollouts.fork import ForkPlan, play_fork
from entente.telemetry.errors import DataError, EngineError, InputError
from entente.telemetry.progress import GameProgress

_AT_ONCE = 32
"""Pairs in progress: they share the batches of an engine."""
_SHOWN = 6
"""Legal orders that are listed where one is refused."""

OrderSets = Mapping[str, tuple[str, ...]]
"""Whole order sets by power."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPosition:
    """A position of a game, and what was ordered there."""

    game: str
    """The game in words, as 'game 12/3 of run mine'."""
    board: Board
    """Nobody steps it."""
    orders: OrderSets
    """By every power that had something to order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """How both forks of a pair go on after the phase."""

    forks: int = 64
    """Pairs."""
    years: int = 2
    """Counts of centres from the phase to the end."""
    players: tuple[str, ...] = ("dumbbot",)
    """Who plays all seats; of several, each seat draws one by lot, the same in both forks."""
    seed: int = 0
    """Names the luck."""
    temperature: float = 1.0
    """Of the draws of policy versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two forks of equal luck."""

    number: int
    """From 0; names the luck."""
    played: Standing
    """At the end, after the orders that were played."""
    changed: Standing
    """At the end, after the other orders."""

    def difference(self, power: str) -> int:
        """Centres at the end with the other orders, less those with the orders that were played."""
        seat = POWERS.index(power)
        return self.changed.centres[seat] - self.played.centres[seat]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The answer."""

    position: RecordedPosition
    power: str
    """Whose centres count."""
    how: Continuation
    pairs: tuple[Pair, ...] = field(repr=False)

    @property
    def difference(self) -> Estimate:
        """Centres of `power` that the other orders gain."""
        return self.difference_of(self.power)

    def difference_of(self, power: str) -> Estimate:
        """Mean over pairs, and its interval."""
        return self._estimate([pair.difference(power) for pair in self.pairs])

    def centres(self, power: str) -> tuple[Estimate, Estimate]:
        """Centres at the end: with the orders that were played, and with the others."""
        seat = POWERS.index(power)
        played = self._estimate([pair.played.centres[seat] for pair in self.pairs])
        return played, self._estimate([pair.changed.centres[seat] for pair in self.pairs])

    @property
    def spread(self) -> dict[int, int]:
        """Difference of `power` -> number of pairs."""
        return dict(sorted(Counter(pair.difference(self.power) for pair in self.pairs).items()))

    def _estimate(self, values: Sequence[int]) -> Estimate:
        return estimate(values, range(len(values)), self.how.seed)


def other_orders(position: RecordedPosition, given: Sequence[str], power: str = "") -> OrderSets:
    """The order sets of the powers whose units `given` orders; a unit that is not named keeps the order that was played.

    Builds and disbands are given as a whole: a build that is not named is waived.

    Args:
        power: whose builds WAIVE declines; empty: nobody's.
    """
    legal, named = position.board.legal_orders(), dict[str, list[str]]()
    for order in (" ".join(order.upper().replace("-", " - ").split()) for order in given):
        if order == WAIVE and power in legal and legal[power].kind is OrderKind.BUILD:
            named.setdefault(power, [])
            continue
        owner = next((each for each, own in legal.items() if _site(order, own) is not None), None)
        if owner is None:
            raise InputError(_refusal(order, legal, position.board.phase))
        named.setdefault(owner, []).append(order)
    return {owner: _whole(legal[owner], own, position) for owner, own in named.items()}


def asked_power(position: RecordedPosition, power: str, changed: OrderSets | None) -> str:
    """The power whose centres count: `power`, or the one that is given other orders.

    Args:
        changed: other orders; None if a player gives them, or nobody: then it is the power with the most units to order.

    Raises:
        InputError: there is no such power, it had nothing to order, or several powers get other orders.
    """
    if power and power not in POWERS:
        raise InputError(f"there is no power '{power}': the powers are {', '.join(POWERS)}")
    legal = position.board.legal_orders()
    if power and not changed and power not in legal:
        raise InputError(f"{power} has nothing to order in {position.board.phase}: it is the turn of {', '.join(legal)}")
    if power:
        return power
    if changed is None:
        return max(legal, key=lambda each: len(legal[each].sites))
    if len(changed) != 1:
        raise InputError(f"say with --power whose centres count: {', '.join(changed or legal)}")
    return next(iter(changed))


async def orders_of_player(
    position: RecordedPosition, power: str, name: str, how: Continuation, decider: Decider | None
) -> list[OrderSets]:
    """What the player called `name` orders for `power` in each pair.

    Args:
        decider: chooses for it; None: it is a scripted player.
    """
    legal = position.board.legal_orders()[power]

    async def choose(number: int) -> OrderSets:
        luck = _luck(position, how, number)
        if decider is None:
            return {power: tuple(player(name)(legal, dice(luck, position.board.phase, power), position.board))}
        request = DecisionRequest(
            game=f"{luck}/orders",
            dice=luck,
            ply=0,
            power=power,
            legal=legal,
            board=position.board,
            snapshot_id=_snapshot_id(position.board),
            temperature=how.temperature,
        )
        return {power: tuple(orders_of(await _SamePhaseSameLuck(decider).decide(request)))}

    return list(await asyncio.gather(*map(choose, range(how.forks))))


async def play_pairs(
    position: RecordedPosition,
    changed: Sequence[OrderSets],
    power: str,
    how: Continuation,
    deciders: Mapping[str, Decider] | None = None,
    progress: GameProgress | None = None,
) -> WhatIf:
    """Play all pairs.

    Args:
        changed: other order sets, one mapping for each pair.
        deciders: of those in `how.players` who are not scripted, by name.

    Raises:
        DataError: the recorded orders are not legal.
        EngineError: a decision failed.
    """
    wrapped = {name: _SamePhaseSameLuck(decider) for name, decider in (deciders or {}).items() if name in how.players}
    starts, places = _Starts(position.board), asyncio.Semaphore(_AT_ONCE)

    async def play(number: int, other: OrderSets) -> Pair:
        async with places:
            luck = _luck(position, how, number)
            played, replaced = await asyncio.gather(
                _play(position, starts.after(dict(position.orders)), f"{luck}/played", luck, how, wrapped, progress),
                _play(position, starts.after({**position.orders, **other}), f"{luck}/changed", luck, how, wrapped, progress),
            )
        return Pair(number=number, played=played, changed=replaced)

    pairs = await asyncio.gather(*(play(number, other) for number, other in enumerate(changed)))
    return WhatIf(position=position, power=power, how=how, pairs=tuple(pairs))


class _Starts:
    """The boards after the phase, each played once."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._after: dict[tuple[tuple[str, tuple[str, ...]], ...], Board] = {}

    def after(self, orders: OrderSets) -> Board:
        """A board after these orders, which the caller owns."""
        key = tuple(sorted(orders.items()))
        if key not in self._after:
            board = self._board.fork()
            if sum(board.step(orders).rejected.values()):
                raise DataError(f"the recorded orders of {self._board.phase} are not legal there: the game's file is damaged")
            self._after[key] = board
        return self._after[key].fork()


async def _play(
    position: RecordedPosition,
    board: Board,
    name: str,
    luck: str,
    how: Continuation,
    deciders: Mapping[str, Decider],
    progress: GameProgress | None,
) -> Standing:
    """The end of one fork, which goes on from `board`."""
    lot = dice(luck, "seats")
    plan = ForkPlan(
        name=name,
        shared_name=luck,
        dice=luck,
        seats={power: lot.choice(how.players) for power in POWERS},
        horizon_years=how.years,
        counted_from=position.board.phase,
        temperature=how.temperature,
        snapshot_id=_snapshot_id(position.board),
    )
    fork = await play_fork(
        plan,
        board,
        deciders,
        on_phase=lambda phase: progress.played(name, phase) if progress is not None else None,
    )
    if progress is not None:
        progress.ended(name)
    if fork.end is None or fork.status != "complete":
        raise EngineError(f"a fork from {position.board.phase} failed: {fork.reason}")
    return fork.end


class _SamePhaseSameLuck:
    """Names a decision's dice by its phase, not by its ply: a retreat in one fork of a pair must not shift the other's luck."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider

    async def decide(self, request: DecisionRequest) -> Sequence[str] | Sampled:
        """See `Decider`."""
        phase = request.board.phase
        return await self._decider.decide(replace(request, game=f"{request.game}/{phase}", dice=f"{request.dice}/{phase}", ply=0))


def _luck(position: RecordedPosition, how: Continuation, number: int) -> str:
    return f"what-if/{how.seed}/{_snapshot_id(position.board)}/{number}"


def _snapshot_id(board: Board) -> str:
    return board.snapshot(game_id="", seed=0, source="").snapshot_id


def _site(order: str, legal: LegalOrders) -> int | None:
    return next((site for site, options in enumerate(legal.options) if order in options), None)


def _whole(legal: LegalOrders, given: list[str], position: RecordedPosition) -> tuple[str, ...]:
    """The canonical order set of one power."""
    phase, sites = position.board.phase, [_site(order, legal) for order in given]
    for place, site in enumerate(sites):
        if site in sites[:place]:
            raise InputError(f"'{given[place]}' is a second order for {legal.sites[site or 0]} of {legal.power} in {phase}")
    keeps = legal.kind in (OrderKind.MOVEMENT, OrderKind.RETREAT)
    whole = legal.completed([*given, *position.orders.get(legal.power, ())] if keeps else given)
    if whole is None or not legal.admits(whole):
        must = "may give" if legal.kind is OrderKind.BUILD else "must give"
        raise InputError(
            f"{legal.power} {must} {legal.picks} {legal.kind} orders in {phase}, and {len(given)} are named: name all"
        )
    return whole


def _refusal(order: str, legal: Mapping[str, LegalOrders], phase: str) -> str:
    """Why an order is refused, with what its unit can do."""
    unit = " ".join(order.split()[:2])
    for power, own in legal.items():
        can = [option for options in own.options for option in options if option.startswith(f"{unit} ")]
        if can:
            more = f" and {len(can) - _SHOWN} more" if len(can) > _SHOWN else ""
            return f"'{order[:60]}' is no legal order of {power} in {phase}: {unit} can do {', '.join(can[:_SHOWN])}{more}"
    sites = "; ".join(f"{power} {', '.join(own.sites)}" for power, own in legal.items())
    return f"'{order[:60]}' is no legal order in {phase}: what can be ordered there is {sites}"
