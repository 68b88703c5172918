"""The worker behind the HTTP routes: its engine, the versions it serves, and the adapters it accepts.

Only checked adapters from under the root folder reach the engine. A request is drawn under the version and adapter that it names.
This module does not handle HTTP.
"""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from decoding.model_files import model_fingerprint
from inference.engine import Engine
from inference.host import EngineHost
from inference.supervisor import EngineSupervisor
from records.generation import GenerationRequest
from records.policy_version import BASE, BASE_VERSION, PolicyVersion
from telemetry.errors import DataError, EngineLostError, EntenteError, VersionGoneError
from workers.wire import pack_generation, unpack_request, version_fields
from workers.worker_memory import AnswerMemory
from workers.worker_metrics import WorkerMetrics

_Version = Annotated[int, Field(ge=0, lt=2**31)]


class PublishBody(BaseModel):
    """The body of a publish request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: _Version
    adapter: Annotated[str, Field(max_length=4096)]
    adapter_hash: Annotated[str, Field(max_length=128)]


class RetireBody(BaseModel):
    """The body of a retire request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    oldest: _Version
    keep: Annotated[list[_Version], Field(max_length=1024)] = []


class Worker:
    """An engine on its host's event loop, and the versions that it serves."""

    def __init__(
        self, engine: Engine, host: EngineHost, model: Path, adapters_root: Path, vocabulary_size: int, max_rank: int
    ) -> None:
        self.engine, self.host = engine, host
        self.answers = AnswerMemory(self._draw)
        self.metrics = WorkerMetrics()
        self.started = False
        self.failure: EntenteError | None = None
        """Why the worker ends."""
        self.on_ready: Callable[[], None] = lambda: None
        self.on_failure: Callable[[], None] = lambda: None
        self._model, self._root = model, adapters_root.resolve()
        self._vocabulary_size, self._max_rank = vocabulary_size, max_rank
        self._fingerprint = model_fingerprint(model)
        self._served: dict[int, PolicyVersion] = {}
        self._changing = asyncio.Lock()

    @property
    def ready(self) -> bool:
        """Whether requests are accepted. Does not wait for the engine's thread, which may be busy."""
        return self.started and (not isinstance(self.engine, EngineSupervisor) or self.engine.ready)

    @property
    def newest(self) -> PolicyVersion:
        """The version last published."""
        return next(reversed(self._served.values()), BASE)

    async def start(self) -> None:
        """Start the engine; a failure ends the worker."""
        try:
            await self.host.run(self.engine.start())
        except Exception as error:
            self.fail(error)
            return
        self.started = True
        self.on_ready()

    def fail(self, error: Exception) -> None:
        """End the worker because its engine is lost; `serve` raises the error."""
        if isinstance(error, EntenteError):
            self.failure = error
        else:
            self.failure = EngineLostError(f"the worker's engine failed: {error!r}")
            self.failure.__cause__ = error
        self.on_failure()

    async def generate(self, body: bytes) -> bytes:
        """The packed answer to a packed request."""
        request, asked = unpack_request(body, self._vocabulary_size)
        self._check_up()
        if asked is not None and asked != (BASE if asked.version == BASE_VERSION else self._served.get(asked.version)):
            raise VersionGoneError(f"{asked} is not published here")
        return await self.answers.answer(request, hashlib.blake2b(body, digest_size=16).digest())

    async def publish(self, body: PublishBody) -> None:
        """Check the adapter and serve it. Version 0 without an adapter resets the worker to the base model."""
        self._check_up()
        async with self._changing:
            if not body.adapter and body.version == BASE_VERSION:
                return await self._reset()
            adapter = await asyncio.to_thread(self._adapter_folder, body.adapter)
            policy = PolicyVersion(version=body.version, adapter_hash=body.adapter_hash, adapter=adapter)
            from inference.adapter_check import check_adapter

            await asyncio.to_thread(check_adapter, policy, self._model, self._max_rank)
            await self.host.run(self.engine.publish(policy))
            self._served.pop(policy.version, None)  # the newest is last
            self._served[policy.version] = policy

    async def retire(self, body: RetireBody) -> None:
        """Retire versions before `oldest`, except those in `keep` and the newest."""
        self._check_up()
        async with self._changing:
            await self.host.run(self.engine.retire(body.oldest, body.keep))
            kept = (*body.keep, self.newest.version)
            self._served = {
                version: found for version, found in self._served.items() if version >= body.oldest or version in kept
            }

    def health(self) -> dict[str, object]:
        """The worker's state and the versions that it serves."""
        supervised = self.engine if isinstance(self.engine, EngineSupervisor) else None
        alive = self.failure is None and (supervised is None or supervised.lost is None)
        return {
            "ready": self.ready,
            "alive": alive,
            "model": self._fingerprint,
            "worker": self.engine.name,
            "versions": {str(version): policy.adapter_hash for version, policy in sorted(self._served.items())},
            "restarts": supervised.restarts if supervised else 0,
            **version_fields(self.newest),
        }

    def _check_up(self) -> None:
        if not self.started:
            raise EngineLostError("the worker is still warming up")

    async def _draw(self, request: GenerationRequest) -> bytes:
        async def draw() -> bytes:
            generation = await self.engine.generate(request)
            stats = await self.engine.stats()
            self.metrics.answered(generation)
            return pack_generation(generation, running=stats.running, preemptions=stats.preemptions)

        try:
            return await self.host.run(draw())
        except EngineLostError:
            if isinstance(self.engine, EngineSupervisor) and self.engine.lost is not None:
                self.fail(self.engine.lost)
            raise

    async def _reset(self) -> None:
        if not self._served:
            return
        if not isinstance(self.engine, EngineSupervisor):
            raise DataError("this worker cannot return to the base model: restart it")
        await self.host.run(self.engine.reset())
        self._served.clear()

    def _adapter_folder(self, path: str) -> Path:
        """The folder of an adapter. It and its files, with links resolved, must lie under the root; its files must be regular."""
        adapter = None
        try:
            adapter = (self._root / path.removeprefix(f"{self._root}/")).resolve()
            inside = adapter.is_relative_to(self._root) and adapter != self._root and adapter.is_dir()
            inside = inside and all(self._is_file_under_root(file) for file in adapter.iterdir())
        except (OSError, ValueError):  # not a valid path
            inside = False
        if adapter is None or not inside:
            raise ForbiddenPath(f"adapter '{path[:200]}' is not a folder of regular files under this worker's root")
        return adapter

    def _is_file_under_root(self, file: Path) -> bool:
        """Whether `file`, with links resolved, is a regular file under the root. It is not opened: a named pipe would block."""
        target = file.resolve()
        return target.is_relative_to(self._root) and target.is_file()


class ForbiddenPath(EntenteError):
    """The path of an adapter is not allowed."""
