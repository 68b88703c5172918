"""Counterfactual orders: pairs of forks from a recorded position, and the difference with its 95 % interval.

Both forks of a pair start in the same phase, one with the recorded orders, one with other orders of one or more powers. The other
powers' orders, the players and their seeds (from pair, phase and power) are equal, so equal orders differ by exactly 0. The
interval resamples pairs: it covers the randomness of the continuation, not other positions or players.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from entente.evaluation.intervals import Estimate, estimate
from entente.game.board import Board
from entente.game.legal import WAIVE, LegalOrders, OrderKind
from entente.game.scores import PowerScores
from entente.game.scripted import player
from entente.game.snapshot import POWERS
from entente.players.policy import Decider, DecisionRequest, Sampled, orders_of
from entente.players.seeds import seeded_rng
from entente.rollouts.fork import ForkPlan, play_fork
from entente.telemetry.errors import DataError, EngineError, InputError
from entente.telemetry.progress import GameProgress

_AT_ONCE = 32
"""Concurrent pairs; they share the batches of an engine."""
_MAX_LISTED = 6

OrderSets = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPosition:
    game: str
    """The game in words, as 'game 12/3 of run mine'."""
    board: Board
    """Never stepped."""
    orders: OrderSets
    """Of every power that had something to order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    forks: int = 64
    years: int = 2
    """Counts of centres from the phase to the end."""
    players: tuple[str, ...] = ("dumbbot",)
    """Players of all seats; each seat gets a random one of several, the same in both forks."""
    seed: int = 0
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    number: int
    """From 0; part of the seeds."""
    played: PowerScores
    changed: PowerScores

    def difference(self, power: str) -> int:
        """Centres at the end with the other orders, minus those with the recorded orders."""
        seat = POWERS.index(power)
        return self.changed.centres[seat] - self.played.centres[seat]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    position: RecordedPosition
    power: str
    how: Continuation
    pairs: tuple[Pair, ...] = field(repr=False)

    @property
    def difference(self) -> Estimate:
        """Mean gain of the other orders for `power`, centres."""
        return self.difference_of(self.power)

    def difference_of(self, power: str) -> Estimate:
        return self._estimate([pair.difference(power) for pair in self.pairs])

    def centres(self, power: str) -> tuple[Estimate, Estimate]:
        seat = POWERS.index(power)
        played = self._estimate([pair.played.centres[seat] for pair in self.pairs])
        return played, self._estimate([pair.changed.centres[seat] for pair in self.pairs])

    @property
    def spread(self) -> dict[int, int]:
        """Difference of `power` -> number of pairs."""
        return dict(sorted(Counter(pair.difference(self.power) for pair in self.pairs).items()))

    def _estimate(self, values: Sequence[int]) -> Estimate:
        return estimate(values, range(len(values)), self.how.seed)


def other_orders(position: RecordedPosition, orders: Sequence[str], power: str = "") -> OrderSets:
    """The order sets of the powers whose units `orders` names; other units keep their recorded orders. `power` is the one that
    WAIVE applies to. Disbands must be complete; builds without an order are waived."""
    legal, named = position.board.legal_orders(), dict[str, list[str]]()
    for order in (" ".join(order.upper().replace("-", " - ").split()) for order in orders):
        if order == WAIVE and power in legal and legal[power].kind is OrderKind.BUILD:
            named.setdefault(power, [])
            continue
        owner = next((each for each, own in legal.items() if _site(order, own) is not None), None)
        if owner is None:
            raise InputError(_refusal(order, legal, position.board.phase))
        named.setdefault(owner, []).append(order)
    return {owner: _whole(legal[owner], own, position) for owner, own in named.items()}


def asked_power(position: RecordedPosition, power: str, changed: OrderSets | None) -> str:
    """The power whose centres count: `power`, or the one with other orders. If a player chooses these (`changed` is None), the
    power with the most units. Raises InputError if it is ambiguous, unknown, or had nothing to order."""
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
        raise InputError(f"choose with --power whose centres count: {', '.join(changed or legal)}")
    return next(iter(changed))


async def orders_of_player(
    position: RecordedPosition, power: str, name: str, how: Continuation, decider: Decider | None
) -> list[OrderSets]:
    legal = position.board.legal_orders()[power]

    async def choose(number: int) -> OrderSets:
        seed_name = _seed_name(position, how, number)
        if decider is None:
            return {power: tuple(player(name)(legal, seeded_rng(seed_name, position.board.phase, power), position.board))}
        request = DecisionRequest(
            game=f"{seed_name}/orders",
            rng_name=seed_name,
            phase_index=0,
            power=power,
            legal=legal,
            board=position.board,
            snapshot_id=position.board.snapshot_id,
            temperature=how.temperature,
        )
        return {power: tuple(orders_of(await _SeededByPhase(decider).decide(request)))}

    return list(await asyncio.gather(*map(choose, range(how.forks))))


async def play_pairs(
    position: RecordedPosition,
    changed: Sequence[OrderSets],
    power: str,
    how: Continuation,
    deciders: Mapping[str, Decider] | None = None,
) -> WhatIf:
    """Play all pairs; `changed`: the other order sets of each pair; `deciders`: of non-scripted players, by name. Raises
    DataError if the recorded orders are not legal, EngineError if a decision failed."""
    wrapped = {name: _SeededByPhase(decider) for name, decider in (deciders or {}).items() if name in how.players}
    places, forks = asyncio.Semaphore(_AT_ONCE), 2 * len(changed)
    progress = GameProgress(f"playing {forks} forks", forks, how.years)

    @cache
    def after(orders: tuple[tuple[str, tuple[str, ...]], ...]) -> Board:
        board = position.board.fork()
        if sum(board.step(dict(orders)).rejected.values()):
            raise DataError(f"the recorded orders of {position.board.phase} are not legal there: the game's file is damaged")
        return board

    async def play(number: int, other: OrderSets) -> Pair:
        seed_name = _seed_name(position, how, number)
        rng = seeded_rng(seed_name, "seats")
        seats = {power: rng.choice(how.players) for power in POWERS}

        async def fork(kind: str, orders: OrderSets) -> PowerScores:
            name = f"{seed_name}/{kind}"
            plan = ForkPlan(
                name=name,
                shared_name=seed_name,
                rng_name=seed_name,
                seats=seats,
                horizon_years=how.years,
                counted_from=position.board.phase,
                temperature=how.temperature,
                snapshot_id=position.board.snapshot_id,
            )
            board = after(tuple(sorted(orders.items()))).fork()
            played = await play_fork(plan, board, wrapped, on_phase=partial(progress.played, name))
            progress.ended(name)
            if played.end is None or played.status != "complete":
                raise EngineError(f"a fork from {position.board.phase} failed: {played.reason}")
            return played.end

        async with places:
            ends = await asyncio.gather(fork("played", position.orders), fork("changed", {**position.orders, **other}))
        return Pair(number=number, played=ends[0], changed=ends[1])

    pairs = await asyncio.gather(*(play(number, other) for number, other in enumerate(changed)))
    return WhatIf(position=position, power=power, how=how, pairs=tuple(pairs))


class _SeededByPhase:
    """Seeds a decision by its phase, not by its phase index: a retreat phase in one fork must not shift the seeds of a pair."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider

    async def decide(self, request: DecisionRequest) -> Sequence[str] | Sampled:
        phase = request.board.phase
        return await self._decider.decide(
            replace(request, game=f"{request.game}/{phase}", rng_name=f"{request.rng_name}/{phase}", phase_index=0)
        )


def _seed_name(position: RecordedPosition, how: Continuation, number: int) -> str:
    return f"what-if/{how.seed}/{position.board.snapshot_id}/{number}"


def _site(order: str, legal: LegalOrders) -> int | None:
    return next((site for site, options in enumerate(legal.options) if order in options), None)


def _whole(legal: LegalOrders, orders: list[str], position: RecordedPosition) -> tuple[str, ...]:
    phase, sites = position.board.phase, [_site(order, legal) for order in orders]
    for place, site in enumerate(sites):
        if site in sites[:place]:
            raise InputError(f"'{orders[place]}' is a second order for {legal.sites[site or 0]} of {legal.power} in {phase}")
    keeps = legal.kind in (OrderKind.MOVEMENT, OrderKind.RETREAT)
    whole = legal.completed([*orders, *position.orders.get(legal.power, ())] if keeps else orders)
    if whole is None or not legal.admits(whole):
        must = "may give" if legal.kind is OrderKind.BUILD else "must give"
        raise InputError(
            f"{legal.power} {must} {legal.picks} {legal.kind} orders in {phase}, but you named {len(orders)}: name all"
        )
    return whole


def _refusal(order: str, legal: Mapping[str, LegalOrders], phase: str) -> str:
    unit = " ".join(order.split()[:2])
    for power, own in legal.items():
        can = [option for options in own.options for option in options if option.startswith(f"{unit} ")]
        if can:
            more = f" and {len(can) - _MAX_LISTED} more" if len(can) > _MAX_LISTED else ""
            return f"'{order[:60]}' is no legal order of {power} in {phase}: {unit} can do {', '.join(can[:_MAX_LISTED])}{more}"
    sites = "; ".join(f"{power} {', '.join(own.sites)}" for power, own in legal.items())
    return f"'{order[:60]}' is no legal order in {phase}: what can be ordered there is {sites}"
