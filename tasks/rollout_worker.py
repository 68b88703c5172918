"""Rollouts in a worker process without a trainer, opened from a run's folder, with its own engine or vLLM servers by URL.
Before each range of groups it reads `control.json`, serves the newest version and retires old ones. It writes only shards."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from entente.decoding.base_identity import base_identity
from entente.decoding.codec import Codec
from entente.inference.choose_engine import make_engine
from entente.inference.host import EngineHost, start_engine
from entente.players.policy import Tokens
from entente.records.policy_version import BASE
from entente.rollouts.resources import RolloutResources
from entente.settings.find_model import model_of
from entente.settings.layers import settings_of
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import DataError, InputError
from state_cache.store import StateCache, find_cache, open_cache
from storage.adapters import read_adapter
from storage.control import Control, program_differences, read_control
from storage.files import file_marks
from storage.runs import CACHE_FOLDER, RunPaths, hashes_file

TROUBLES = ("retries", "timeouts", "rejected_answers")
"""Events of an engine that concern single requests."""


class RolloutWorker:
    """The rollouts of one run in this worker process; create it with `open`."""

    def __init__(self, resources: RolloutResources, settings: RunSettings, stack: AsyncExitStack) -> None:
        self.resources = resources
        self.settings = settings
        self._stack = stack
        self._followed: Control | None = None
        self._served = BASE
        self._troubles = Counter[str]()
        self._changing = asyncio.Lock()

    @classmethod
    async def open(cls, root: Path, *, worker: str = "") -> Self:
        """Open the run and serve its newest version; `worker` names this process in shard metadata.

        Raises:
            InputError: there is no such run, another release trains it, or its model or state cache is not on this machine.
            DataError: the control file, the state cache or the adapter is damaged.
        """
        paths = RunPaths(root.resolve())
        started = file_marks(paths.settings)  # before it is read: a start meanwhile counts
        settings = settings_of(paths)
        control = await asyncio.to_thread(read_control, paths)
        _check_wanted(paths, settings, control)
        model = await asyncio.to_thread(_model, paths, settings, control)
        cache = await asyncio.to_thread(cache_of, paths, settings)
        inference = settings.inference
        async with AsyncExitStack() as stack:
            host = EngineHost()
            stack.callback(host.close)
            engine = make_engine(inference, model)
            stack.push_async_callback(lambda: host.run(engine.close()))
            await start_engine(host, engine, inference)
            tokens = Tokens(Codec(model), settings.prompts)
            resources = RolloutResources(
                paths=paths,
                model=model,
                seed=settings.seed,
                rollouts=settings.rollouts,
                cache=cache,
                host=host,
                engine=engine,
                tokens=tokens,
                provenance={"run": settings.run, "base_model": control.base_model, "settings": settings.plays, "side": worker},
                started=started,
            )
            side = cls(resources, settings, stack.pop_all())
        try:
            await side.follow()
        except BaseException:
            await side.close()
            raise
        return side

    async def follow(self) -> None:
        """Read the control file and serve its version. Raises InputError if the run's settings changed, DataError if control
        file or adapter is damaged, and EngineError if the engine cannot load the version."""
        await self.resources.host.run(self._follow())

    def take_troubles(self) -> dict[str, float]:
        """Requests with trouble since the last call, as metrics. That a server is lost, the flow's own client sees too."""
        before, self._troubles = self._troubles, Counter(self.resources.engine.events())
        return {f"engine/{name}": float(self._troubles[name] - before[name]) for name in TROUBLES if name in self._troubles}

    async def close(self) -> None:
        """Close the engine. Rollouts in flight are lost."""
        await self._stack.aclose()

    async def _follow(self) -> None:
        async with self._changing:
            paths = self.resources.paths
            control = await asyncio.to_thread(read_control, paths)
            if control != self._followed:
                _check_program(self.settings, control)
                if control.plays != self.settings.plays:
                    raise InputError(f"run '{self.settings.run}' has other settings now")
                if control.policy != self._served:
                    policy = await asyncio.to_thread(read_adapter, paths, control.version)
                    if policy != control.policy:
                        raise DataError(
                            f"{policy.adapter} is not the adapter named in {paths.control}: wait for the next version"
                        )
                    await self.resources.past.publish(policy)
                    self._served = policy
                await self.resources.past.retire(control.oldest)
                self._followed = control


def _check_wanted(paths: RunPaths, settings: RunSettings, control: Control) -> None:
    """Raise InputError if the run's control file belongs to other settings, or another release trains it."""
    _check_program(settings, control)
    if control.plays != settings.plays:
        raise InputError(f"{paths.control} belongs to other settings than {paths.settings}: resume the run's training first")


def _check_program(settings: RunSettings, control: Control) -> None:
    """Raise InputError if the training process has other code than this one: of Entente, or of a user's bot."""
    if differences := program_differences(control.program, settings.rollouts.scripted_opponents):
        raise InputError(
            f"run '{settings.run}' is trained by another version of the program: {differences}; "
            "install the same version on both machines, and start the workers again"
        )


def _model(paths: RunPaths, settings: RunSettings, control: Control) -> Path:
    """Folder of the run's base model; raises InputError if it is missing or another model."""
    model = model_of(settings, paths.root.parent, settings.run)
    if (identity := base_identity(model, hashes_file(paths.root.parent))) != control.base_model:
        raise InputError(
            f"run '{settings.run}' trains the model {control.base_model}, but '{settings.inference.model}' is {identity} here: "
            "copy the same model to this machine"
        )
    return model


def cache_of(paths: RunPaths, settings: RunSettings) -> StateCache:
    """The state cache of an existing run; raises InputError if it is missing."""
    root = paths.root.parent / CACHE_FOLDER
    folder = find_cache(root, settings.cache)
    if folder is None:
        raise InputError(f"the state cache of run '{settings.run}' is not in '{root}': share the whole runs folder")
    return open_cache(folder, settings.cache)
