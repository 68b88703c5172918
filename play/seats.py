"""Chooses for the players of a game in the browser: policy versions, players that search, scripted players."""

import math
from collections.abc import Sequence

from flows.open_players import OpenPlayers
from game.players import player
from play.game import Choice
from rollouts.deciders import DecisionRequest, PolicyDecider, draw
from rollouts.seeds import dice


class SeatedPlayers:
    """Players that are open; see `play.game.Players`."""

    def __init__(self, names: Sequence[str], opened: OpenPlayers) -> None:
        self.names = tuple(names)
        self._opened = opened

    async def choose(self, name: str, request: DecisionRequest) -> Choice:
        """See `Players.choose`."""
        decider = self._opened.deciders.get(name)
        if decider is None:
            rng = dice(request.dice, request.board.phase, request.power)
            return Choice(orders=tuple(player(name)(request.legal, rng, request.board)))
        if isinstance(decider, PolicyDecider) and not request.legal.is_forced:
            return await self._opened.host.run(_drawn(decider, request))
        return Choice(orders=tuple(await self._opened.host.run(decider.decide(request))))


async def _drawn(decider: PolicyDecider, request: DecisionRequest) -> Choice:
    drawn = await draw(request, decider.engine, decider.tokens, version=decider.version)
    return Choice(orders=tuple(drawn.orders), probability=math.exp(float(drawn.generation.logprobs.sum())))
