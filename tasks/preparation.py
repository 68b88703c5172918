"""Tasks that prepare a run: they build the state cache and the tiny model."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect import task

from entente.game.prompts import PromptSettings
from entente.game.snapshot import Snapshot
from entente.settings.cache_version import cache_sources
from entente.telemetry.process_pool import ProcessPool
from entente.telemetry.progress import reporter
from entente.training.settings import TinyModelSettings
from state_cache.build import build
from state_cache.refresh import refresh
from state_cache.settings import CacheSettings
from state_cache.store import open_cache, write_cache
from storage.runs import RunPaths


@task(name="build-state-cache", persist_result=False, retries=0, tags=["cache"])
async def freeze_positions(root: Path, settings: CacheSettings) -> Path:
    with _cancellable_thread() as check_cancelled:

        def report(done: int, total: int) -> None:
            check_cancelled()
            reporter().stage("freezing positions", done, total)

        train, held_out = await asyncio.to_thread(build, settings, report)
    return await asyncio.to_thread(write_cache, root, settings, train, held_out, cache_sources(settings))


@task(name="refresh-state-cache", persist_result=False, retries=0, tags=["cache"])
async def refresh_positions(root: Path, settings: CacheSettings, base: Path, run: RunPaths) -> Path:
    reporter().stage("taking in positions", 0, 1)
    path = await asyncio.to_thread(_refreshed, root, settings, base, run)
    reporter().stage("taking in positions", 1, 1)
    return path


def _refreshed(root: Path, settings: CacheSettings, base: Path, run: RunPaths) -> Path:
    cache = open_cache(base)
    held_out = {snapshot.snapshot_id for snapshot in cache.held_out}
    # In a separate process, so that the index takes no memory and leaves no threads in the flow's process.
    with ProcessPool(1) as process:
        reached = process.submit(_reached, run, settings.from_groups, held_out).result()
    train = refresh(settings, cache.train, cache.held_out, reached)
    return write_cache(root, settings, train, cache.held_out, cache_sources(settings, run))


def _reached(run: RunPaths, before: int, held_out: set[str]) -> list[Snapshot]:
    from storage.on_policy import reached_positions
    from storage.shards import LOCAL_PRODUCER

    return reached_positions(run, producer=LOCAL_PRODUCER, before=before, held_out=held_out)


@task(name="make-tiny-model", persist_result=False, retries=0, tags=["model"])
async def make_model(root: Path, settings: TinyModelSettings, prompts: PromptSettings) -> Path:
    from entente.training.tiny_model import make_tiny_model

    with _cancellable_thread() as check_cancelled:

        def report(stage: str, done: int, total: int) -> None:
            check_cancelled()
            reporter().stage(f"tiny model: {stage}", done, total)

        return await asyncio.to_thread(make_tiny_model, root, settings, report, prompts)


class _ThreadCancelled(BaseException):
    """Stops the work of a thread whose task was cancelled. It is never awaited."""


@contextmanager
def _cancellable_thread() -> Iterator[Callable[[], None]]:
    """Cancels work in a thread with its task. The thread must call the yielded function regularly."""
    cancelled = threading.Event()

    def check_cancelled() -> None:
        if cancelled.is_set():
            raise _ThreadCancelled

    try:
        yield check_cancelled
    except asyncio.CancelledError:
        cancelled.set()
        raise
