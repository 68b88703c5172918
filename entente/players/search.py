"""Search of one decision: proposals, their playouts by sequential halving, changes of the best, and the best of all.

A proposal that is not legal is refused, so what is played is legal. All random numbers derive from the request's dice name: the
same request has the same result. Between playouts other tasks of the event loop run.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from entente.game.players import check_player, player
from entente.game.prompts import board_text
from entente.players.changed_orders import changed_orders
from entente.players.deciders import CompletionSource, DecisionRequest, Tokens, draw
from entente.players.halving import Pull, halve
from entente.players.playouts import play_out, play_out_apart
from entente.players.search_settings import SearchSettings
from entente.players.seeds import dice
from entente.telemetry.errors import InputError
from entente.telemetry.process_pool import ProcessPool

PLAYOUTS_OF_A_CHANGE = 3
"""Playouts of a later round for each change that it tries; halving gives most of them to the better ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What the last round of a search found; lists have one entry per order set that it tried."""

    proposals: tuple[tuple[str, ...], ...]
    """Legal order sets without repetitions: in a first round the proposals in their order, in a later one the best so far and
    its changes."""
    values: tuple[float, ...]
    """Mean value of each over its playouts, in centres or as a share. 0 for a single proposal, which is not played out."""
    visits: tuple[int, ...]
    """Playouts of each."""
    best: int
    """Index of the proposal to play: the largest mean in the last round of halving, which may not be the largest of all."""

    @property
    def orders(self) -> list[str]:
        """The best order set."""
        return list(self.proposals[self.best])


async def propose(
    request: DecisionRequest,
    engine: CompletionSource | None,
    tokens: Tokens | None,
    version: int | None,
    settings: SearchSettings,
) -> dict[tuple[str, ...], float | None]:
    """Distinct legal order sets: `settings.proposals` draws of the policy, then one of each name in `settings.scripted`.

    The first draw is the one that the policy would play without a search.

    Args:
        engine: draws the policy's proposals; None: only scripted players propose.
        version: the policy version; None: the engine's newest.

    Returns:
        Order set -> the probability with which the policy drew it; None if only scripted players proposed it.

    Raises:
        InputError: nobody proposes, or a scripted player is unknown.
        EngineError, DataError: the engine could not draw.
    """
    sets: list[list[str]] = []
    drawn: dict[tuple[str, ...], float] = {}
    if engine is not None and tokens is not None and settings.proposals:
        shown = board_text(request.board, request.power, tokens.prompts)
        draws = (
            draw(request, engine, tokens, version=version, shown=shown, repetition=number) for number in range(settings.proposals)
        )
        for found in await asyncio.gather(*draws):
            sets.append(list(found.orders))
            drawn[tuple(found.orders)] = found.probability
    for number, name in enumerate(settings.scripted):
        rng = dice(request.dice, request.ply, request.power, "proposal", number)
        sets.append(player(name)(request.legal, rng, request.board))
    return {orders: drawn.get(orders) for orders in _distinct(request, sets)}


async def search(
    request: DecisionRequest,
    proposals: Sequence[Sequence[str]],
    settings: SearchSettings,
    processes: ProcessPool | None = None,
) -> SearchResult:
    """Play out the proposals, in later rounds the best and its changes, and find the best.

    Args:
        proposals: order sets; equal ones count once. More than `settings.playouts` distinct ones are cut off at the end.
        processes: play scripted playouts; None: this process does.

    Raises:
        InputError: there is no proposal, one is not legal, or `settings.player` names a player that does not exist.
        EngineError: a process ended.
    """
    found = await _round(request, _distinct(request, proposals)[: settings.playouts], 0, settings, processes)
    for number in range(1, settings.rounds):
        rng = dice(request.dice, request.ply, request.power, "changes", number)
        most = max(1, settings.playouts // PLAYOUTS_OF_A_CHANGE)
        changed = changed_orders(request.legal, found.orders, most, rng)
        found = await _round(request, [tuple(found.orders), *changed], number, settings, processes)
    return found


async def _round(
    request: DecisionRequest,
    arms: Sequence[tuple[str, ...]],
    number: int,
    settings: SearchSettings,
    processes: ProcessPool | None,
) -> SearchResult:
    """Divide `settings.playouts` among the order sets. Each round has dice of its own, so that luck does not choose twice."""
    if len(arms) == 1:
        return SearchResult(proposals=tuple(arms), values=(0.0,), visits=(0,), best=0)

    def name_of(turn: int) -> str:
        return f"{request.dice}/{request.ply}/{request.power}/playout/{number * settings.playouts + turn}"

    async def play_round(pulls: Sequence[Pull]) -> list[float]:
        sets = [(arms[arm], name_of(turn)) for arm, turn in pulls]
        if processes is not None:
            return await play_out_apart(processes, request.board, request.power, sets, settings)
        values = []
        for value in play_out(request.board, request.power, sets, settings):
            values.append(value)
            await asyncio.sleep(0)  # let other tasks of the event loop run
        return values

    found = await halve(len(arms), settings.playouts, play_round)
    return SearchResult(proposals=tuple(arms), values=found.values, visits=found.visits, best=found.best)


class SearchDecider:
    """Plays the best of its proposals; a policy version proposes, or a scripted player."""

    def __init__(
        self,
        settings: SearchSettings,
        *,
        engine: CompletionSource | None = None,
        tokens: Tokens | None = None,
        version: int | None = None,
        proposer: str = "",
        processes: ProcessPool | None = None,
    ) -> None:
        """Check the names of players.

        Args:
            proposer: the scripted player that makes the `settings.proposals`, if no engine does.
            processes: play scripted playouts; None: this process does.
        """
        if proposer:
            scripted = (proposer,) * settings.proposals + settings.scripted
            settings = settings.model_copy(update={"proposals": 0, "scripted": scripted})
        check_search(settings)
        self._settings, self._processes = settings, processes
        self._engine, self._tokens, self._version = engine, tokens, version

    async def decide(self, request: DecisionRequest) -> list[str]:
        """The best order set; see `Decider`."""
        return (await self.look(request))[0].orders

    async def look(self, request: DecisionRequest) -> tuple[SearchResult, dict[tuple[str, ...], float | None]]:
        """What the search of a decision found, and the proposals as `propose` returns them."""
        proposals = await propose(request, self._engine, self._tokens, self._version, self._settings)
        found = await search(request, list(proposals), self._settings, self._processes)
        return found, proposals


def check_search(settings: SearchSettings) -> None:
    """Check that everybody whom the settings name is a scripted player."""
    for name in (*settings.scripted, *settings.player):
        check_player(name)


def _distinct(request: DecisionRequest, sets: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The order sets, each once."""
    found = list(dict.fromkeys(tuple(orders) for orders in sets))
    for orders in found:
        if not request.legal.admits(orders):
            raise InputError(
                f"{list(orders)} was proposed for {request.power} in {request.board.phase} and is no legal {request.legal.kind} "
                "set in the order of the sites: mend its proposer"
            )
    if not found:
        raise InputError(f"a search for {request.power} in {request.board.phase} has no proposal: give at least one order set")
    return found
