"""Search of one decision: its proposals, then variations of the best of them, race by playouts in the same scenarios.

The search refuses illegal proposals. It derives all random numbers from one name, so the same decision has the same result.
Between playouts other tasks of the event loop run.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from entente.game.board import Board
from entente.game.scripted import check_player, player
from entente.game.snapshot import Snapshot
from entente.players.changed_orders import changed_orders
from entente.players.playouts import Playouts
from entente.players.policy import DecisionRequest, PolicyPlayer
from entente.players.race import race
from entente.players.search_settings import SearchSettings
from entente.players.seeds import seeded_rng
from entente.telemetry.errors import InputError
from entente.telemetry.process_pool import ProcessPool
from storage.control import bot_sources, check_sources

SCENARIOS = 8
"""Maximum number of scenarios per order set: 16 gained no more, with 80 and with 150 playouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    proposals: tuple[tuple[str, ...], ...]
    """Distinct legal order sets: the proposals in their order, then the variations that were played in all scenarios."""
    values: tuple[float, ...]
    """Mean value of each over its playouts, in centres. 0 for the only legal set, which is not played out."""
    visits: tuple[int, ...]
    """Playouts of each. Those with as many as the best were played in the same scenarios."""
    best: int

    @property
    def orders(self) -> list[str]:
        return list(self.proposals[self.best])


async def propose(
    request: DecisionRequest, policy: PolicyPlayer | None, settings: SearchSettings
) -> dict[tuple[str, ...], float | None]:
    """Distinct legal order sets (`settings.proposals` samples of the policy, then one of each name in `settings.scripted`) -> the
    policy's probability, None if only scripted players proposed it. The first is what the policy plays without search.

    Raises:
        InputError: a scripted player is unknown.
        EngineError, DataError: the engine could not sample.
    """
    sets: list[list[str]] = []
    probabilities: dict[tuple[str, ...], float] = {}
    if policy is not None:
        for sampled in await asyncio.gather(*(policy.decide(request, number) for number in range(settings.proposals))):
            sets.append(sampled.orders)
            probabilities[tuple(sampled.orders)] = sampled.probability
    for number, name in enumerate(settings.scripted):
        rng = seeded_rng(request.rng_name, request.phase_index, request.power, "proposal", number)
        sets.append(player(name)(request.legal, rng, request.board))
    return {orders: probabilities.get(orders) for orders in map(tuple, sets)}


async def search(
    board: Board, power: str, proposals: Sequence[Sequence[str]], settings: SearchSettings, seed_name: str
) -> SearchResult:
    """Race the distinct proposals, then variations of the best. `seed_name` seeds the decision; `board` is not changed.
    Raises InputError if there is no proposal, one is not legal, or `settings.player` names an unknown player."""
    legal = board.legal_orders()[power]
    candidates = list(dict.fromkeys(tuple(orders) for orders in proposals))
    if not candidates:
        raise InputError(f"a search for {power} in {board.phase} has no proposal: give at least one order set")
    for orders in candidates:
        if not legal.admits(orders):
            raise InputError(
                f"{list(orders)} was proposed for {power} in {board.phase} and is not a legal {legal.kind} set in the order "
                "of the sites: fix its proposer"
            )
    playouts, rng = Playouts(board, power, seed_name, settings), seeded_rng(seed_name, "changes")

    async def play(orders: tuple[str, ...], scenario: int) -> float:
        await asyncio.sleep(0)  # let other tasks of the event loop run
        return playouts.value(orders, scenario)

    raced = await race(
        candidates,
        lambda best: changed_orders(legal, best, rng),
        playouts=settings.playouts,
        scenarios=SCENARIOS,
        play=play,
    )
    kept = [orders for orders, values in raced.values.items() if orders in candidates or len(values) == SCENARIOS]
    values = [raced.values[orders] for orders in kept]
    return SearchResult(
        proposals=tuple(kept),
        values=tuple(sum(each) / len(each) if each else 0.0 for each in values),
        visits=tuple(map(len, values)),
        best=kept.index(raced.best),
    )


def search_apart(
    snapshot: Snapshot,
    power: str,
    proposals: Sequence[Sequence[str]],
    settings: SearchSettings,
    seed_name: str,
    sources: Mapping[str, str],
) -> SearchResult:
    """`search` of a snapshot, to run in another process; `sources` as of `check_sources`."""
    check_sources(sources)
    board = Board.restore(snapshot)
    result = asyncio.run(search(board, power, proposals, settings, seed_name))
    board.release()
    return result


class SearchDecider:
    def __init__(
        self,
        settings: SearchSettings,
        *,
        policy: PolicyPlayer | None = None,
        proposer: str = "",
        processes: ProcessPool | None = None,
    ) -> None:
        """`policy` makes the `settings.proposals`, or else the scripted player `proposer`. `processes` None: in-process."""
        if proposer:
            scripted = (proposer,) * settings.proposals + settings.scripted
            settings = settings.model_copy(update={"proposals": 0, "scripted": scripted})
        check_search(settings)
        self._settings, self._processes = settings, processes
        self._sources = bot_sources(settings.player)
        self._policy = policy

    async def decide(self, request: DecisionRequest) -> list[str]:
        return (await self.look(request))[0].orders

    async def look(self, request: DecisionRequest) -> tuple[SearchResult, dict[tuple[str, ...], float | None]]:
        proposals = await propose(request, self._policy, self._settings)
        question = request.power, list(proposals), self._settings, search_seed_name(request)
        if self._processes is None:
            return await search(request.board, *question), proposals
        snapshot = request.board.snapshot(game_id="", seed=0, source="search")
        return await self._processes.ask(search_apart, snapshot, *question, self._sources), proposals


def search_seed_name(request: DecisionRequest) -> str:
    return f"{request.rng_name}/{request.phase_index}/{request.power}"


def check_search(settings: SearchSettings) -> None:
    for name in (*settings.scripted, *settings.player):
        check_player(name)
