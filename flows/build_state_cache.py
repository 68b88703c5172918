"""Flow: play scripted games and freeze mid-game positions, training and held-out ones from different games.

Idempotent: settings that were built before return the version that stands.
"""

import asyncio
from pathlib import Path

from prefect import flow

from flows.run_names import cache_name
from flows.run_settings import CACHE_FOLDER
from state_cache.settings import CacheSettings
from state_cache.store import find_cache, open_cache
from tasks.artifacts import show_cache
from tasks.preparation import freeze_positions


@flow(name="build-state-cache", flow_run_name=cache_name)
async def build_state_cache(settings: CacheSettings | None = None, runs_root: Path = Path("runs")) -> Path:
    """Build, or find, the cache of `settings` under `runs_root`; returns its folder.

    Args:
        settings: Positions to freeze; left out, the defaults of every setting.
        runs_root: Folder of all runs; the caches lie beside them.
    """
    settings = settings or CacheSettings()
    root = Path(runs_root) / CACHE_FOLDER
    path = find_cache(root, settings) or await freeze_positions(root, settings)
    await show_cache(await asyncio.to_thread(open_cache, path))
    return path
