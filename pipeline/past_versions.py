"""Serves the past versions that play opponents. Their decisions are not recorded.

An engine that serves several versions at a time (LoRA slots, or the torch engine) serves these beside the run's own. One with
merged weights serves one version at a time, so a second engine serves the opponents: of the same kind for a single version, and
the torch engine for several, because it holds many adapters.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from inference.choose_engine import engine_here
from inference.engine import Engine
from inference.host import EngineHost
from inference.make_engine import make_engine, serving
from inference.settings import InferenceSettings
from inference.start_engine import start_engine
from pipeline.league import check_opponent_versions
from records.policy_version import BASE, BASE_VERSION, PolicyVersion
from rollouts.deciders import PolicyDecider, Tokens
from rollouts.opponents import seat_name
from rollouts.settings import RolloutSettings
from storage.adapters import read_adapter
from storage.runs import RunPaths
from telemetry.progress import reporter


class PastVersions:
    """The versions that an engine serves for opponents. All methods run on the engines' event loop."""

    def __init__(self, paths: RunPaths, engine: Engine, tokens: Tokens, *, beside: bool, always: Collection[int]) -> None:
        """
        Args:
            engine: serves the opponents.
            beside: it also serves the run's own versions.
            always: versions that may play at any time.
        """
        self.engine = engine
        self._paths, self._tokens, self._beside, self._always = paths, tokens, beside, frozenset(always)
        self._playing: Counter[int] = Counter()
        """Version -> number of blocks of `served` that use it."""
        self._last: frozenset[int] = frozenset()
        """The versions of the newest block; the next one probably uses them too."""
        self._loaded: set[int] = {BASE_VERSION}
        self._newest = BASE
        """The newest version on the opponents' engine."""
        self.run_version = BASE_VERSION
        """The newest version of the run that was published."""
        self._changing = asyncio.Lock()

    @property
    def kept(self) -> frozenset[int]:
        """Versions that the engine must not retire."""
        return self._always | self._last | {version for version, blocks in self._playing.items() if blocks}

    async def publish(self, engine: Engine, policy: PolicyVersion) -> None:
        """Serve `policy` on `engine` as the newest version of the run."""
        async with self._changing:
            await engine.publish(policy)
            self.run_version = policy.version
            if engine is self.engine:
                self._newest = policy
                self._loaded.add(policy.version)

    async def retire(self, engine: Engine, oldest: int) -> None:
        """Stop serving versions before `oldest` on `engine`, except those that play opponents there."""
        async with self._changing:
            await self._retire(engine, oldest)

    async def _retire(self, engine: Engine, oldest: int) -> None:
        if engine is not self.engine:
            await engine.retire(oldest)
            return
        kept = self.kept
        await engine.retire(oldest, kept)
        self._loaded = {version for version in self._loaded if version >= oldest or version in kept} | {self._newest.version}

    @asynccontextmanager
    async def served(self, versions: Collection[int]) -> AsyncIterator[Mapping[str, PolicyDecider]]:
        """Serve these versions inside the block; gives their deciders by name of the seat.

        Raises:
            DataError: an adapter is not published, or is damaged.
        """
        self._playing.update(versions)
        self._last = frozenset(versions)
        try:
            await self._load(versions)
            yield {seat_name(f"v{version}"): PolicyDecider(self.engine, self._tokens, version) for version in versions}
        finally:
            self._playing.subtract(versions)

    async def _load(self, versions: Collection[int]) -> None:
        async with self._changing:
            for version in sorted(set(versions) - self._loaded):
                policy = await asyncio.to_thread(read_adapter, self._paths, version)
                await self.engine.publish(policy)
                self._loaded.add(version)
                if self._beside:
                    # It only becomes the newest again, without a pause: no request without a version meets the older one.
                    await self.engine.publish(self._newest)
                else:
                    self._newest = policy
                    await self._retire(self.engine, sys.maxsize)


async def open_opponent_engine(
    stack: AsyncExitStack, paths: RunPaths, model: Path, host: EngineHost, rollouts: RolloutSettings, inference: InferenceSettings
) -> Engine | None:
    """A second engine for the past versions among the opponents, which `stack` closes; None if the run's engine can serve them.

    Raises:
        InputError: the run has no such version, or its servers cannot serve it.
    """
    check_opponent_versions(paths, rollouts, inference)
    versions = rollouts.opponent_versions
    if not versions and not rollouts.has_league:
        return None
    if serving(None if inference.urls else engine_here(inference)[0], inference.adapters, 2) == "one":
        return None
    one = len(versions) == 1 and not rollouts.has_league
    reporter().say("starting a second engine, for past versions as opponents")
    second = make_engine(inference.model_copy(update={"adapters": "merge_reload"} if one else {"engine": "torch"}), model)
    stack.push_async_callback(lambda: host.run(second.close()))
    await start_engine(host, second, inference)
    return second
