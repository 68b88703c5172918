"""Tasks that prepare a run: the state cache and the tiny model."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from game.prompt_settings import PromptSettings
from state_cache.build import build
from state_cache.settings import CacheSettings
from state_cache.store import write_cache
from telemetry.progress import reporter
from training.settings import TinyModelSettings


@task(name="build-state-cache", cache_policy=NO_CACHE, persist_result=False, tags=["cache"])
async def freeze_positions(root: Path, settings: CacheSettings) -> Path:
    """Play scripted games, freeze positions, publish the cache; its folder."""
    with _heard_when_cancelled() as still_wanted:

        def told(done: int, total: int) -> None:
            still_wanted()
            reporter().stage("freezing positions", done, total)

        train, held_out = await asyncio.to_thread(build, settings, told)
    return await asyncio.to_thread(write_cache, root, settings, train, held_out)


@task(name="make-tiny-model", cache_policy=NO_CACHE, persist_result=False, tags=["model"])
async def make_model(root: Path, settings: TinyModelSettings, prompts: PromptSettings) -> Path:
    """Make the tiny model of this recipe for these prompts, unless it is there; its folder."""
    from training.tiny_model import make_tiny_model

    with _heard_when_cancelled() as still_wanted:

        def told(stage: str, done: int, total: int) -> None:
            still_wanted()
            reporter().stage(f"tiny model: {stage}", done, total)

        return await asyncio.to_thread(make_tiny_model, root, settings, told, prompts)


class _NoLongerWanted(BaseException):
    """Ends the work of a thread whose task was cancelled; nobody waits for it."""


@contextmanager
def _heard_when_cancelled() -> Iterator[Callable[[], None]]:
    """For work in a thread, which cancelling its task cannot end: gives what it has to ask as it moves on."""
    cancelled = threading.Event()

    def still_wanted() -> None:
        if cancelled.is_set():
            raise _NoLongerWanted

    try:
        yield still_wanted
    except asyncio.CancelledError:
        cancelled.set()
        raise
