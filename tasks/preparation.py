"""Tasks that prepare a run: the state cache and the tiny model."""

import asyncio
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from state_cache.build import build
from state_cache.settings import CacheSettings
from state_cache.store import write_cache
from telemetry.progress import reporter
from training.settings import TinyModelSettings


@task(name="build-state-cache", cache_policy=NO_CACHE, persist_result=False, tags=["cache"])
async def freeze_positions(root: Path, settings: CacheSettings) -> Path:
    """Play scripted games, freeze positions, publish the cache; its folder."""
    train, held_out = await asyncio.to_thread(
        build, settings, lambda done, total: reporter().stage("freezing positions", done, total)
    )
    return await asyncio.to_thread(write_cache, root, settings, train, held_out)


@task(name="make-tiny-model", cache_policy=NO_CACHE, persist_result=False, tags=["model"])
async def make_model(root: Path, settings: TinyModelSettings) -> Path:
    """Make the tiny model of this recipe, unless it is there; its folder."""
    from training.tiny_model import make_tiny_model

    return await asyncio.to_thread(
        make_tiny_model,
        root,
        settings,
        lambda stage, done, total: reporter().stage(f"tiny model: {stage}", done, total),
    )
