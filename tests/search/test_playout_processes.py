"""Playouts in processes: the values are those of this process, and a process that ends is told in a sentence."""

import asyncio
import json
from dataclasses import asdict

import pytest

from game.board import Board
from search.playout_process import answer
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


def test_a_job_is_answered_with_the_values_of_its_playouts_or_with_a_sentence(sets):
    board = Board.start()
    snapshot = json.dumps(asdict(board.snapshot(game_id="", seed=0, source="")))

    def answered(settings: SearchSettings) -> dict:
        return json.loads(answer(json.dumps([snapshot, "FRANCE", settings.model_dump_json(), sets]).encode()))

    assert answered(SETTINGS)["values"] == [play_out(board, "FRANCE", orders, name, SETTINGS) for orders, name in sets]
    assert "no scripted player 'nobody'" in answered(SearchSettings(player=("nobody",)))["error"]


@pytest.mark.system
def test_processes_give_the_values_of_this_process_and_one_that_is_killed_is_told(sets):
    board = Board.start()

    async def both() -> list[float]:
        processes = PlayoutProcesses(2)
        try:
            found = await processes.play(board, "FRANCE", sets, SETTINGS)
            twice = await asyncio.gather(*(processes.play(board, "FRANCE", sets, SETTINGS) for _ in range(3)))
            assert twice == [found] * 3 and len(processes._started) == 2
            processes._started[0].kill()
            with pytest.raises(EngineError, match="a process that plays out for a search ended with exit code -9"):
                await processes.play(board, "FRANCE", sets, SETTINGS)
            assert await processes.play(board, "FRANCE", sets, SETTINGS) == found, "another takes its place"
        finally:
            await processes.close()
        assert all(process.returncode is not None for process in processes._started)
        return found

    assert asyncio.run(both()) == [play_out(board, "FRANCE", orders, name, SETTINGS) for orders, name in sets]
