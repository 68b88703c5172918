"""Flow: play scripted games and freeze mid-game positions, training and held-out ones from different games.

Idempotent: settings that were built before return the version that stands.
"""

from pathlib import Path

from prefect import flow

from flows.run_settings import CACHE_FOLDER
from state_cache.settings import CacheSettings
from state_cache.store import find_cache
from tasks.preparation import freeze_positions


@flow(name="build-state-cache", flow_run_name="cache-seed-{settings.seed}")
async def build_state_cache(settings: CacheSettings | None = None, runs_root: Path = Path("runs")) -> Path:
    """Build, or find, the cache of `settings` under `runs_root`; returns its folder."""
    settings = settings or CacheSettings()
    root = Path(runs_root) / CACHE_FOLDER
    found = find_cache(root, settings)
    return found if found is not None else await freeze_positions(root, settings)
