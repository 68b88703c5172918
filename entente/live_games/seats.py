"""Chooses for the players of a game in the browser: policy versions, players that search, scripted players."""

from collections.abc import Sequence
from dataclasses import replace

from entente.game.scripted import player
from entente.live_games.game import Choice
from entente.players.policy import DecisionRequest, PolicyPlayer, orders_of
from entente.players.search import SearchDecider
from entente.players.seeds import seeded_rng
from flows.open_players import OpenPlayers
from storage.played_games import SavedProposal


class SeatedPlayers:
    def __init__(self, names: Sequence[str], opened: OpenPlayers, temperature: float = 1.0) -> None:
        self.names = tuple(names)
        self._opened, self._temperature = opened, temperature

    async def choose(self, name: str, request: DecisionRequest) -> Choice:
        decider = self._opened.deciders.get(name)
        if decider is None:
            rng = seeded_rng(request.rng_name, request.board.phase, request.power)
            return Choice(orders=tuple(player(name)(request.legal, rng, request.board)))
        request = replace(request, temperature=self._temperature)
        if isinstance(decider, PolicyPlayer) and not request.legal.is_forced:
            sampled = await self._opened.host.run(decider.decide(request))
            return Choice(orders=tuple(sampled.orders), probability=sampled.probability)
        if isinstance(decider, SearchDecider):
            return await self._opened.host.run(_searched(decider, request))
        return Choice(orders=tuple(orders_of(await self._opened.host.run(decider.decide(request)))))


async def _searched(decider: SearchDecider, request: DecisionRequest) -> Choice:
    result, probabilities = await decider.look(request)
    if len(result.proposals) == 1:
        return Choice(orders=tuple(result.orders), probability=probabilities.get(result.proposals[0]))
    tried = (
        SavedProposal(orders=orders, value=value, playouts=playouts, probability=probabilities.get(orders))
        for orders, value, playouts in zip(result.proposals, result.values, result.visits, strict=True)
    )
    return Choice(
        orders=tuple(result.orders), probability=probabilities.get(result.proposals[result.best]), proposals=tuple(tried)
    )
