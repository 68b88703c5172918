"""Flow: play scripted games and freeze mid-game positions; training and held-out positions come from different games.

With `run`, the flow refreshes that run's cache with positions that its rollouts reached. Settings that were built before return
the existing cache.
"""

import asyncio
from pathlib import Path

from prefect import flow

from entente.telemetry.errors import InputError
from entente.telemetry.progress import reporter
from flows.given_parameters import check_given, named_after
from flows.refresh_settings import drop_unused, newest_run, refreshed_settings
from state_cache.settings import CacheSettings
from state_cache.store import find_cache, open_cache
from storage.files import folders_in
from storage.runs import CACHE_FOLDER, RunPaths
from tasks.artifacts import show_cache
from tasks.preparation import freeze_positions, refresh_positions

NEWEST = "newest"
"""Stands for the run that trained last; if there is none, nothing is built."""


@flow(name="build-state-cache", flow_run_name=named_after("cache", "run"))
async def build_state_cache(
    settings: CacheSettings | None = None, runs_root: Path = Path("runs"), run: str = "", share: float = 0.25
) -> Path | None:
    """Build or find the cache of `settings` under `runs_root`. Returns its folder, or None if no run has trained.

    Args:
        settings: Settings of the cache; default: the default of every setting.
        runs_root: Folder of all runs and caches.
        run: Run whose cache is refreshed instead, with positions that its rollouts have reached; "newest" for the one that
            trained last, empty for none.
        share: Share of the training positions that come from that run.
    """
    settings = settings or CacheSettings()
    check_given(runs_root, runs=[settings.from_run, run])
    root = runs_root / CACHE_FOLDER
    name = newest_run(runs_root) if run == NEWEST else run
    if run == NEWEST and not name:
        reporter().say(f"no run in '{runs_root}' has trained a step yet, so there is no state cache to refresh")
        return None
    if name:
        settings = refreshed_settings(runs_root, name, share)
    found = await asyncio.to_thread(find_cache, root, settings)
    path = found or await _made(root, settings, runs_root)
    if name:
        await asyncio.to_thread(drop_unused, root, runs_root, path)
    await show_cache(await asyncio.to_thread(open_cache, path))
    return path


async def _made(root: Path, settings: CacheSettings, runs_root: Path) -> Path:
    if not settings.from_run:
        return await freeze_positions(root, settings)
    paths = RunPaths(runs_root / settings.from_run)
    if not folders_in(paths.shards):
        raise InputError(
            f"there is no run '{settings.from_run}' in '{runs_root}' to take positions from: leave cache.from_run out"
        )
    base = find_cache(root, settings.scripted) or await freeze_positions(root, settings.scripted)
    return await refresh_positions(root, settings, base, paths)
