"""Serves past versions as opponents, as adapters of the run's own engine. Their decisions are not recorded."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager

from entente.inference.engine import Engine
from entente.players.opponents import seat_name
from entente.players.policy import PolicyPlayer, Tokens
from entente.records.policy_version import BASE, BASE_VERSION, PolicyVersion
from storage.adapters import read_adapter
from storage.runs import RunPaths


class PastVersions:
    """The versions that the engine serves, including opponents. All methods run on the engine's event loop."""

    def __init__(self, paths: RunPaths, engine: Engine, tokens: Tokens, *, always: Collection[int]) -> None:
        self.engine = engine
        self._paths, self._tokens, self._always = paths, tokens, frozenset(always)
        self._playing: Counter[int] = Counter()
        """Version -> number of blocks of `served` that use it."""
        self._last: frozenset[int] = frozenset()
        """The versions of the newest block, which the next one probably uses too."""
        self._loaded: set[int] = {BASE_VERSION}
        self._newest = BASE
        self._changing = asyncio.Lock()

    @property
    def kept(self) -> frozenset[int]:
        return self._always | self._last | {version for version, blocks in self._playing.items() if blocks}

    @property
    def run_version(self) -> int:
        return self._newest.version

    async def publish(self, policy: PolicyVersion) -> None:
        async with self._changing:
            await self.engine.publish(policy)
            self._newest = policy
            self._loaded.add(policy.version)

    async def retire(self, oldest: int) -> None:
        async with self._changing:
            kept = self.kept
            await self.engine.retire(oldest, kept)
            self._loaded = {version for version in self._loaded if version >= oldest or version in kept} | {self._newest.version}

    @asynccontextmanager
    async def served(self, versions: Collection[int]) -> AsyncIterator[Mapping[str, PolicyPlayer]]:
        """Serve these versions inside the block; yields deciders by seat name. A missing or damaged adapter is a DataError."""
        self._playing.update(versions)
        self._last = frozenset(versions)
        try:
            await self._load(versions)
            yield {seat_name(f"v{version}"): PolicyPlayer(self.engine, self._tokens, version) for version in versions}
        finally:
            self._playing.subtract(versions)

    async def _load(self, versions: Collection[int]) -> None:
        async with self._changing:
            for version in sorted(set(versions) - self._loaded):
                policy = await asyncio.to_thread(read_adapter, self._paths, version)
                await self.engine.publish(policy)
                self._loaded.add(version)
                # It only becomes the newest again, without a pause, so no request without a version uses the older one.
                await self.engine.publish(self._newest)
