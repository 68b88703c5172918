"""Playouts in processes, so that searches use all cores; values are those of `search.playouts` in this process."""

import asyncio
from collections.abc import Sequence
from functools import lru_cache

from game.board import Board
from game.snapshot import Snapshot
from search.playouts import play_out
from search.settings import SearchSettings
from telemetry.process_pool import ProcessPool

NamedSet = tuple[Sequence[str], str]
"""An order set, and the name of its playout's dice."""


async def play_out_apart(
    pool: ProcessPool, board: Board, power: str, sets: Sequence[NamedSet], settings: SearchSettings
) -> list[float]:
    """Values of the playouts of all `sets`, in their order.

    Raises:
        EngineError: a process ended.
    """
    snapshot = board.snapshot(game_id="", seed=0, source="search")
    parts = [sets[first :: pool.size] for first in range(min(pool.size, len(sets)))]
    values = [0.0] * len(sets)
    found = await asyncio.gather(*(pool.ask(_play_part, snapshot, power, part, settings) for part in parts))
    for first, part in enumerate(found):
        values[first :: pool.size] = part
    return values


def _play_part(snapshot: Snapshot, power: str, sets: Sequence[NamedSet], settings: SearchSettings) -> list[float]:
    return [play_out(_board(snapshot), power, orders, name, settings) for orders, name in sets]


@lru_cache(maxsize=64)  # a decision comes back once a round, and many games are in progress
def _board(snapshot: Snapshot) -> Board:
    return Board.restore(snapshot)
