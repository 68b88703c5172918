"""Who chooses for a seat: temperature reaches the draw, and a search tells what it tried."""

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

from entente.game.board import Board
from entente.live_games.game import Choice
from entente.live_games.seats import SeatedPlayers
from entente.players.policy import Decider, DecisionRequest
from entente.players.search import SearchDecider
from entente.players.search_settings import SearchSettings
from flows.open_players import OpenPlayers

SEARCH = SearchSettings(proposals=3, scripted=(), playouts=1, player=("mover",))


class Recorder:
    """Plays the first order of each site, and keeps the request."""

    async def decide(self, request: DecisionRequest) -> list[str]:
        self.seen = request
        return [options[0] for options in request.legal.options]


def choose(decider: Decider, temperature: float = 1.0) -> Choice:
    async def run(answer: Awaitable[Any]) -> Any:
        return await answer

    opened: Any = OpenPlayers(host=SimpleNamespace(run=run), deciders={"it": decider})  # pyright: ignore[reportArgumentType]
    board = Board.start()
    legal = board.legal_orders()["FRANCE"]
    request = DecisionRequest(game="g", rng_name="d", phase_index=0, power="FRANCE", legal=legal, board=board, snapshot_id="s")
    return asyncio.run(SeatedPlayers(("it",), opened, temperature).choose("it", request))


def test_the_temperature_of_the_command_reaches_the_draw():
    recorder = Recorder()
    choose(recorder, 0.25)
    assert recorder.seen.temperature == 0.25


def test_a_search_tells_the_value_of_each_order_set_that_it_tried():
    found = choose(SearchDecider(SEARCH, proposer="random"))
    assert len(found.proposals) > 1 and all(each.playouts > 1 for each in found.proposals)
    assert found.orders in [each.orders for each in found.proposals] and found.probability is None
