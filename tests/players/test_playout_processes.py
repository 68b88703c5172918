"""Playouts in processes: the values are those of this process, and a process that ends is told in a sentence."""

import asyncio
import multiprocessing
import time

import pytest

from entente.game.board import Board
from entente.players.playouts import play_out, play_out_apart
from entente.players.search_settings import SearchSettings
from entente.telemetry.errors import EngineError, InputError
from entente.telemetry.process_pool import ProcessPool

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
        async with ProcessPool(2) as pool:
            found = await play_out_apart(pool, board, "FRANCE", sets, SETTINGS)
            twice = await asyncio.gather(*(play_out_apart(pool, board, "FRANCE", sets, SETTINGS) for _ in range(3)))
            assert twice == [found] * 3
            assert len(multiprocessing.active_children()) == 2
            waiting = asyncio.ensure_future(pool.ask(time.sleep, 600))
            await asyncio.sleep(0)
            multiprocessing.active_children()[0].kill()
            with pytest.raises(EngineError, match="a process that works for this one ended"):
                await waiting
            assert await play_out_apart(pool, board, "FRANCE", sets, SETTINGS) == found, "others take its place"
            with pytest.raises(InputError, match="no scripted player 'nobody'"):
                await play_out_apart(pool, board, "FRANCE", sets, SearchSettings(player=("nobody",)))
        assert not multiprocessing.active_children()
        return found

    assert asyncio.run(both()) == list(play_out(board, "FRANCE", sets, SETTINGS))
