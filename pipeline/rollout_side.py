"""Playing without a trainer: everything that rollouts need, opened from a run's folder alone, and following the run as it trains.

A rollout side has an engine of its own, or workers by URL, and reads `control.json` on a beat: it serves the newest version, lets
go what is too old, and says when the run wants no more. It writes shards and nothing else. Whoever opens one closes it.
"""

import asyncio
import concurrent.futures
import hashlib
import json
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from decoding.codec import Codec
from decoding.model_files import model_fingerprint, resolve_model
from game.prompt_settings import PromptSettings
from game.snapshot import Snapshot
from inference.host import EngineHost
from inference.settings import InferenceSettings
from pipeline.frozen_opponent import open_frozen
from pipeline.removed_settings import without_removed
from pipeline.resources import PRODUCER, Playing
from rollouts.fork import Tokens
from rollouts.seeds import seed_of
from rollouts.settings import RolloutSettings
from state_cache.sampling import sample_start_positions
from state_cache.settings import CacheSettings
from state_cache.store import StateCache, find_cache, open_cache
from storage.adapters import read_adapter
from storage.control import Control, read_control
from storage.learnable_process import PastSpreadsProcess
from storage.runs import CACHE_FOLDER, MODEL_FOLDER, RunPaths
from storage.settings import StorageSettings
from telemetry.errors import DataError, EntenteError, InputError
from telemetry.progress import reporter
from training.recipe import find_tiny
from training.settings import TinyModelSettings
from workers.make_engine import make_engine

FOLLOW_S = 1.0
"""Seconds between two looks at the control file."""


class SidePipeline(BaseModel):
    """What rollouts elsewhere need of the run's `pipeline` settings."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    full_disk_wait_s: float
    groups_per_task: int
    rollout_timeout_s: float


class SideSettings(BaseModel):
    """What of a run's settings shapes its rollouts, read from its settings.json."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run: str
    seed: int
    inference: InferenceSettings
    tiny_model: TinyModelSettings
    cache: CacheSettings
    prompts: PromptSettings
    rollouts: RolloutSettings
    storage: StorageSettings
    pipeline: SidePipeline

    @property
    def plays(self) -> str:
        """Hash of what shapes the rows that are played: who plays under another one plays for another run."""
        told = self.model_dump_json(include={"seed", "tiny_model", "cache", "prompts", "rollouts"})
        return hashlib.sha256(f"{told} {self.inference.model}".encode()).hexdigest()[:16]


def side_settings(paths: RunPaths) -> SideSettings:
    """The settings of the run in this folder.

    Raises:
        InputError: there is no run there, or one of another version.
    """
    if not paths.settings.is_file():
        raise InputError(f"there is no run in '{paths.root}': it has no settings.json; is its folder shared with this machine?")
    try:
        return SideSettings.model_validate(without_removed(json.loads(paths.settings.read_bytes()), stored=paths.root.name))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InputError(f"'{paths.settings}' is not of this version or was altered: {name}: {first['msg']}") from error
    except ValueError as error:
        raise InputError(f"'{paths.settings}' cannot be used: {error}") from error


class RolloutSide:
    """One run's rollouts, played in this process; made by `open`."""

    def __init__(self, playing: Playing, settings: SideSettings, stack: AsyncExitStack) -> None:
        self.playing = playing
        self.settings = settings
        self.control: Control
        """As last followed."""
        self.trouble = ""
        """Why the last look at the control file failed; empty where it did not."""
        self._stack = stack
        self._followed = -1
        self._version = 0
        self._changing: asyncio.Lock | None = None
        self._beat: concurrent.futures.Future[None] | None = None

    @classmethod
    async def open(cls, root: Path, *, urls: Iterable[str] = (), worker: str = "") -> Self:
        """Open the run in this folder and serve its newest version.

        Args:
            urls: workers that draw, in the place of those of the run's settings.
            worker: name for this side in the shards' provenance.

        Raises:
            InputError: there is no such run, it is not at work, or what it plays with is not on this machine.
            DataError: its control file, or something that it plays with, is damaged.
        """
        paths = RunPaths(root.resolve())
        settings = side_settings(paths)
        control = await asyncio.to_thread(read_control, paths)
        check_wanted(paths, settings, control)
        model = await asyncio.to_thread(_model, paths, settings)
        if (found := model_fingerprint(model)) != control.base_model:
            raise InputError(
                f"run '{settings.run}' trains the model {control.base_model}, but '{settings.inference.model}' is {found} here: "
                "bring the same model to this machine"
            )
        cache = await asyncio.to_thread(_cache, paths, settings)
        inference = settings.inference.model_copy(update={"urls": tuple(urls)} if urls else {})
        async with AsyncExitStack() as stack:
            spreads = PastSpreadsProcess(paths, blend=settings.storage.blend, discount=settings.storage.discount)
            stack.callback(spreads.close)
            host = EngineHost()
            stack.callback(host.close)
            engine = make_engine(inference, model)
            stack.push_async_callback(_close_engine, host, engine)
            await asyncio.wait_for(host.run(engine.start()), inference.start_timeout_s)
            tokens = Tokens(Codec(model), settings.prompts)
            frozen = await open_frozen(stack, paths, model, host, engine, tokens, settings.rollouts, inference)
            playing = Playing(
                paths=paths,
                model=model,
                seed=settings.seed,
                rollouts=settings.rollouts,
                cache=cache,
                host=host,
                engine=engine,
                tokens=tokens,
                frozen=frozen,
                provenance={"run": settings.run, "base_model": found, "settings": settings.plays, "side": worker},
                past_spreads=spreads,
                max_policy_lag=settings.storage.max_policy_lag,
                full_disk_wait_s=settings.pipeline.full_disk_wait_s,
            )
            side = cls(playing, settings, stack.pop_all())
        try:
            await side.follow()
        except BaseException:
            await side.close()
            raise
        side._beat = host.submit(side._follow_on())
        return side

    @property
    def version(self) -> int:
        """Newest policy version that is served here."""
        return self._version

    async def follow(self) -> Control:
        """Look at the control file now, and serve what it says.

        Raises:
            InputError: the run plays under other settings by now.
            DataError: the control file or the adapter is damaged.
            EngineError: the engine could not take the version.
        """
        return await self.playing.host.run(self._follow())

    async def close(self) -> None:
        """Free the engine; what is being played is given up."""
        await self._stack.aclose()

    async def _follow(self) -> Control:
        self._changing = self._changing or asyncio.Lock()
        async with self._changing:
            paths = self.playing.paths
            control = await asyncio.to_thread(read_control, paths)
            if control.counter != self._followed:
                if control.plays != self.settings.plays:
                    raise InputError(f"run '{self.settings.run}' plays under other settings by now: begin its producers again")
                if control.version != self._version:
                    policy = await asyncio.to_thread(read_adapter, paths, control.version)
                    if policy != control.policy:
                        raise DataError(
                            f"{policy.adapter} is not the adapter that {paths.control} names: wait for the next version"
                        )
                    await self.playing.engine.publish(policy)
                    self._version = control.version
                await self.playing.engine.retire(control.oldest, self.playing.frozen.kept)
                self._followed = control.counter
            self.control, self.trouble = control, ""
            return control

    async def _follow_on(self) -> None:
        """On a beat, so that long games are played on by new versions, too. A stretch looks for itself before it begins."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                await self._follow()
            except (EntenteError, OSError) as error:
                if str(error) != self.trouble:
                    reporter().say(str(error))
                self.trouble = str(error)


def check_wanted(paths: RunPaths, settings: SideSettings, control: Control) -> None:
    """Refuse to play for a run that wants nothing.

    Raises:
        InputError: it is done or stopped, or its control file is of other settings.
    """
    if paths.summary.is_file() and control.stop:
        raise InputError(
            f"run '{settings.run}' has done its steps: there is nothing to play for; give it more with --steps first"
        )
    if control.stop:
        raise InputError(f"run '{settings.run}' is not at work ({control.reason}): resume its training first")
    if control.plays != settings.plays:
        raise InputError(f"{paths.control} is of other settings than {paths.settings}: resume the run's training first")


def producer_positions(playing: Playing, producer: str, first_group: int, count: int, version: int) -> list[tuple[Snapshot, str]]:
    """Positions of a producer's start groups, and the power that the policy plays in each.

    Drawn in rounds of a step's size, as the training flow draws its own, but under the producer's name: so two producers begin at
    the same positions no more often than two steps do. A round is the same whenever it is drawn, but for what was learnt of
    positions since.
    """
    rollouts, size, spreads = playing.rollouts, playing.rollouts.start_groups, None
    if rollouts.sampling == "learnable":
        spreads = playing.past_spreads.before(PRODUCER, version * size)
    seed, found = seed_of("producer", producer, playing.seed), []
    for number in range(first_group // size, (first_group + count - 1) // size + 1):
        found += sample_start_positions(playing.cache.train, size, seed, number + 1, sampling=rollouts.sampling, spreads=spreads)
    return found[first_group % size :][:count]


async def _close_engine(host: EngineHost, engine: Any) -> None:
    await host.run(engine.close())


def _model(paths: RunPaths, settings: SideSettings) -> Path:
    if settings.inference.model != "tiny":
        return resolve_model(settings.inference.model).resolve()
    root = paths.root.parent / MODEL_FOLDER
    found = find_tiny(root, settings.tiny_model, settings.prompts)
    if found is None:
        raise InputError(
            f"the model of run '{settings.run}' is not in '{root}': share the whole folder of runs with this machine"
        )
    return found.resolve()


def _cache(paths: RunPaths, settings: SideSettings) -> StateCache:
    root = paths.root.parent / CACHE_FOLDER
    found = find_cache(root, settings.cache)
    if found is None:
        raise InputError(f"the state cache of run '{settings.run}' is not in '{root}': share the whole folder of runs")
    return open_cache(found, settings.cache)
