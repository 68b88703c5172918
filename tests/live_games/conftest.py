"""A game between people and players whose choices a test controls."""

import random
from collections.abc import Callable

import pytest

from entente.game.scripted import player
from entente.game.snapshot import POWERS
from entente.live_games.game import HUMAN, Choice, PlayedGame
from entente.players.policy import DecisionRequest
from entente.players.seeds import seeded_rng
from entente.telemetry.errors import EngineError
from storage.played_games import SavedProposal


class Bots:
    """Scripted players, one of which can be made to fail."""

    names = ("dumbbot", "random")

    def __init__(self) -> None:
        self.fails = False
        self.proposals: tuple[SavedProposal, ...] = ()
        self.asked: list[tuple[str, str]] = []

    async def choose(self, name: str, request: DecisionRequest) -> Choice:
        self.asked.append((request.board.phase, request.power))
        if self.fails:
            raise EngineError("the engine is lost")
        rng: random.Random = seeded_rng(request.rng_name, request.board.phase, request.power)
        return Choice(orders=tuple(player(name)(request.legal, rng, request.board)), probability=0.5, proposals=self.proposals)


@pytest.fixture
def bots() -> Bots:
    return Bots()


@pytest.fixture
def new_game(bots: Bots) -> Callable[..., PlayedGame]:
    """A game in which people play the given powers."""

    def make(*people: str, **how: int) -> PlayedGame:
        return PlayedGame("a-game", {power: HUMAN if power in people else "random" for power in POWERS}, bots, **how)

    return make
