"""A real server, and players without an engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from entente.live_games.game import Choice
from entente.players.policy import DecisionRequest
from tests.entered.server_process import ServerProcess


class FirstOrders:
    """A player that orders the first legal order of each site, after `slow_s` seconds in the phases `slow`."""

    names = ("first",)

    def __init__(self, slow: tuple[str, ...] = (), slow_s: float = 0.0) -> None:
        self.slow, self.slow_s = slow, slow_s
        self.asked: list[tuple[str, str]] = []
        self.last_orders: dict[str, dict[str, tuple[str, ...]]] = {}
        """Of the boards that it was shown, by phase."""

    async def choose(self, name: str, request: DecisionRequest) -> Choice:
        """See `entente.live_games.game.Players`."""
        self.asked.append((request.board.phase, request.power))
        self.last_orders[request.board.phase] = request.board.last_orders
        if request.board.phase in self.slow:
            await asyncio.sleep(self.slow_s)
        orders = request.legal.completed([options[0] for options in request.legal.options[: request.legal.picks]])
        assert orders is not None
        return Choice(orders=orders, probability=0.5)


@pytest.fixture
def first_orders() -> type[FirstOrders]:
    """The class, for players of a test's own."""
    return FirstOrders


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A running server without games, one for each file of tests."""
    made = ServerProcess(Path(tmp_path_factory.mktemp("entered")) / "server")
    made.start()
    yield made
    made.kill()
