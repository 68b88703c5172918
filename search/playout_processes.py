"""Processes that play out proposals, so that searches use all cores; values are those of `search.playouts` in this process.

It belongs to one event loop. Processes start when they are first needed, and hold neither model nor engine.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from game.board import Board
from search.settings import SearchSettings
from telemetry.errors import EngineError

NamedSet = tuple[Sequence[str], str]
"""An order set, and the name of its playout's dice."""
_LONGEST_ANSWER = 1 << 24
"""Bytes; a value takes about 20."""


class PlayoutProcesses:
    """Owns up to `count` processes, from the first playout to `close`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._started: list[Process] = []
        self._free: asyncio.Queue[Process | None] = asyncio.Queue()
        for _ in range(count):
            self._free.put_nowait(None)  # a process that is not started yet

    async def play(self, board: Board, power: str, sets: Sequence[NamedSet], settings: SearchSettings) -> list[float]:
        """Values of the playouts of all `sets`, in their order.

        Raises:
            EngineError: a process ended.
        """
        snapshot = json.dumps(asdict(board.snapshot(game_id="", seed=0, source="search")))
        parts = [sets[first :: self._count] for first in range(min(self._count, len(sets)))]
        about = [snapshot, power, settings.model_dump_json()]
        jobs = [json.dumps([*about, part]).encode() + b"\n" for part in parts]
        values = [0.0] * len(sets)
        for first, found in enumerate(await asyncio.gather(*map(self._answer, jobs))):
            values[first :: self._count] = found
        return values

    async def close(self) -> None:
        """End all processes; the caller has ended the searches."""
        for process in self._started:
            _kill(process)
            await process.wait()

    async def _answer(self, job: bytes) -> list[float]:
        process = await self._free.get()
        try:
            process = process or await self._start()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(job)
            line = await process.stdout.readline()
            if not line:
                raise EngineError(
                    f"a process that plays out for a search ended with exit code {await process.wait()}: give the command again, "
                    "and it continues"
                )
        except BaseException:
            if process is not None:
                _kill(process)  # an answer that nobody waits for must not be read as the next one
            self._free.put_nowait(None)
            raise
        self._free.put_nowait(process)
        found = json.loads(line)
        if "error" in found:
            raise EngineError(found["error"])
        return found["values"]

    async def _start(self) -> Process:
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | {"OMP_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "search.playout_process"),
            stdin=PIPE,
            stdout=PIPE,
            limit=_LONGEST_ANSWER,
            env=environment,
            start_new_session=True,  # only the parent receives Ctrl-C
        )
        self._started.append(process)
        return process


def _kill(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
