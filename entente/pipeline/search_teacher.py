"""Scripted players that search, as teachers of a base model: the link from imitation, which knows no search, to search."""

import asyncio
from dataclasses import dataclass

from entente.game.board import Board
from entente.rollouts.deciders import DecisionRequest
from entente.search.search import SearchDecider
from entente.search.settings import SearchSettings

DEFAULT_SEARCH = SearchSettings()


@dataclass(frozen=True, slots=True)
class SearchTeacher:
    """A `entente.training.imitation.teacher_games.Search`; processes get a copy of it, and its `repr` names its settings."""

    settings: SearchSettings = DEFAULT_SEARCH

    def __call__(self, name: str, board: Board, power: str, dice: str) -> list[str]:
        """The best of the proposals of the scripted player `name`, by playouts in this process.

        Raises:
            InputError: the player is unknown, or proposed an order set that is not legal.
        """
        legal = board.legal_orders()[power]
        request = DecisionRequest(game=dice, dice=dice, ply=0, power=power, legal=legal, board=board, snapshot_id="")
        return asyncio.run(SearchDecider(self.settings, proposer=name).decide(request))
