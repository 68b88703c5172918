"""Opens the game processes of a run: `pipeline.game_processes` more processes on this machine for games, prompts and tables.

The engine stays where it is. Without game processes the games are played on the engine's event loop.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pipeline.resources import RolloutResources
from rollouts.game_pool import GamePool


@asynccontextmanager
async def game_processes(resources: RolloutResources, count: int) -> AsyncIterator[None]:
    """Have the rollouts of `resources` played in `count` game processes inside the block; 0: on the engine's event loop."""
    if not count:
        yield
        return
    host = resources.host
    pool = await host.run(_start(count, resources))
    resources.games = pool
    try:
        yield
    finally:
        resources.games = None
        await host.run(pool.close())


async def _start(count: int, resources: RolloutResources) -> GamePool:
    pool = GamePool(count, resources.model, resources.tokens.prompts, resources.paths.games_log)
    await pool.start()
    return pool
