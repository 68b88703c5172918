"""Playouts in processes: the values are those of this process, and a process that ends is told in a sentence."""

import asyncio
import os
import signal

import pytest

from game.board import Board
from search.playout_processes import PlayoutProcesses
from search.playouts import play_out
from search.settings import SearchSettings
from telemetry.errors import EngineError

SETTINGS = SearchSettings(years=2, player=("dumbbot", "mover"), value="squares")
SETS = [([f"A MAR {what}", "F BRE H", "A PAR H"], f"g/{number}") for what in ("H", "- SPA") for number in range(3)]


@pytest.fixture
def sets() -> list[tuple[list[str], str]]:
    """Orders of France in spring 1901, in the order of its sites, with names of dice."""
    sites = Board.start().legal_orders()["FRANCE"].sites
    return [(sorted(orders, key=lambda order: sites.index(order[:5])), name) for orders, name in SETS]


@pytest.mark.system
def test_processes_give_the_values_of_this_process_and_one_that_is_killed_is_told(sets):
    board = Board.start()

    async def both() -> list[float]:
        processes = PlayoutProcesses(2)
        try:
            found = await processes.play(board, "FRANCE", sets, SETTINGS)
            twice = await asyncio.gather(*(processes.play(board, "FRANCE", sets, SETTINGS) for _ in range(3)))
            first, *others = processes._pool._processes
            assert twice == [found] * 3 and len(others) == 1
            os.kill(first, signal.SIGKILL)
            with pytest.raises(EngineError, match="a process that plays out for a search ended"):
                await processes.play(board, "FRANCE", sets, SETTINGS)
            assert await processes.play(board, "FRANCE", sets, SETTINGS) == found, "others take their place"
        finally:
            await processes.close()
        return found

    assert asyncio.run(both()) == [play_out(board, "FRANCE", orders, name, SETTINGS) for orders, name in sets]
