"""Players that search, such as `dumbbot+search` and `v12+search`: opponents of rollouts, and teachers of a base model.

Forks of a start group share seeds, so they share the search of a position. Playouts run on the games' event loop, for `AT_ONCE`
searches at a time. The engine may step between two playouts, so samples wait a few milliseconds only, and runs stay repeatable.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from entente.game.board import Board
from entente.game.scripted import SEARCHES
from entente.inference.engine import Engine
from entente.players.opponents import seat_name, version_of
from entente.players.policy import DecisionRequest, PolicyPlayer, Tokens
from entente.players.search import SearchDecider
from entente.players.search_settings import SearchSettings

AT_ONCE = 4
"""Searches in progress: their proposals share a batch, and the engine steps after one playout of each."""
ROLLOUT_SEARCH = SearchSettings(playouts=40)
"""Fewer playouts than at play, because up to six seats of every fork search in each phase."""


class SharedSearch:
    def __init__(self, decider: SearchDecider, turns: asyncio.Semaphore) -> None:
        self._decider, self._turns = decider, turns
        self._asked: dict[tuple[str, str, str], asyncio.Task[Sequence[str]]] = {}

    async def decide(self, request: DecisionRequest) -> Sequence[str]:
        frozen = request.board.snapshot(game_id="", seed=0, source="")
        key = request.shared, frozen.position, request.power  # also the last orders, which a player may look at
        if key not in self._asked:
            asked = replace(request, game=f"{request.shared}/{frozen.snapshot_id}/{len(self._asked)}", rng_name=request.shared)
            self._asked[key] = asyncio.create_task(self._search(asked))
        return await self._asked[key]

    async def _search(self, request: DecisionRequest) -> Sequence[str]:
        async with self._turns:
            return await self._decider.decide(request)


def search_opponents(names: Sequence[str], engine: Engine, tokens: Tokens) -> dict[str, SharedSearch]:
    """Deciders of these names by seat; call it on the games' event loop. Raises InputError for an unknown scripted player."""
    turns, deciders = asyncio.Semaphore(AT_ONCE), dict[str, SharedSearch]()
    for name in names:
        version = version_of(name)
        if version is None:
            decider = SearchDecider(ROLLOUT_SEARCH, proposer=name.removesuffix(SEARCHES))
        else:
            decider = SearchDecider(ROLLOUT_SEARCH, policy=PolicyPlayer(engine, tokens, version))
        deciders[seat_name(name)] = SharedSearch(decider, turns)
    return deciders


@dataclass(frozen=True, slots=True)
class SearchTeacher:
    """A `entente.training.imitation.teacher_games.Search`; picklable, and its `repr` names its settings."""

    settings: SearchSettings = ROLLOUT_SEARCH

    def __call__(self, name: str, board: Board, power: str, rng_name: str) -> list[str]:
        """The best of the proposals of the scripted player `name`, by playouts in this process."""
        legal = board.legal_orders()[power]
        request = DecisionRequest(
            game=rng_name, rng_name=rng_name, phase_index=0, power=power, legal=legal, board=board, snapshot_id=""
        )
        return asyncio.run(SearchDecider(self.settings, proposer=name).decide(request))
