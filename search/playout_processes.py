"""Processes that play out proposals, so that searches use all cores; values are those of `search.playouts` in this process.

They start when they are first needed, hold neither model nor engine, and end with this process.
"""

import asyncio
import multiprocessing
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache

from game.board import Board
from game.snapshot import Snapshot
from search.playouts import play_out
from search.settings import SearchSettings
from telemetry.errors import EngineError
from telemetry.parent import end_with_parent

NamedSet = tuple[Sequence[str], str]
"""An order set, and the name of its playout's dice."""


class PlayoutProcesses:
    """Owns up to `count` processes, from the first playout to `close`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = _new_pool(count)

    async def play(self, board: Board, power: str, sets: Sequence[NamedSet], settings: SearchSettings) -> list[float]:
        """Values of the playouts of all `sets`, in their order.

        Raises:
            EngineError: a process ended.
        """
        snapshot, pool = board.snapshot(game_id="", seed=0, source="search"), self._pool
        loop, values = asyncio.get_running_loop(), [0.0] * len(sets)
        parts = [sets[first :: self._count] for first in range(min(self._count, len(sets)))]
        try:
            work = (loop.run_in_executor(pool, _play_part, snapshot, power, part, settings) for part in parts)
            for first, found in enumerate(await asyncio.gather(*work)):
                values[first :: self._count] = found
        except BrokenProcessPool as error:
            if pool is self._pool:
                self._pool = _new_pool(self._count)
            raise EngineError("a process that plays out for a search ended: give the command again, and it continues") from error
        return values

    async def close(self) -> None:
        """End all processes; the caller has ended the searches."""
        self._pool.shutdown(cancel_futures=True)


def _new_pool(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), initializer=_begin_process)


def _begin_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business, which ends the processes
    end_with_parent()


def _play_part(snapshot: Snapshot, power: str, sets: Sequence[NamedSet], settings: SearchSettings) -> list[float]:
    board = _board(snapshot)
    return [play_out(board, power, orders, name, settings) for orders, name in sets]


@lru_cache(maxsize=64)  # a decision comes back once a round, and many games are in progress
def _board(snapshot: Snapshot) -> Board:
    return Board.restore(snapshot)
