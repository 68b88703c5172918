"""vLLM's own server as an engine of this machine: starts the server as a child, and asks it over HTTP as any other server.

The engine is lost once the child has ended. The supervisor then builds another, with a server, port and key of its own, and
publishes the versions again.
"""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Collection, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from inference.engine import EngineStats
from inference.server_arguments import KEY_OF_SERVER, MODULE, server_arguments, server_environment, start_limit_s
from inference.server_process import LOOPBACK, ServerProcess
from inference.settings import InferenceSettings
from inference.vllm_client import VllmClient
from records.generation import Generation, GenerationRequest
from records.policy_version import PolicyVersion
from telemetry.errors import EngineError, EngineLostError

T = TypeVar("T")


class ServedVllm:
    """The `Engine` contract over a vLLM server that this process starts, once, and ends."""

    def __init__(self, model: Path, settings: InferenceSettings, *, name: str = "vllm", log: Path | None = None) -> None:
        """
        Args:
            model: folder of the base model.
            log: file of the server's log; None: a temporary one.
        """
        self.name = name
        self._model, self._settings, self._log = model, settings, log
        self._scratch: Path | None = None
        self._server: ServerProcess | None = None
        self._client: VllmClient | None = None

    @property
    def server(self) -> ServerProcess:
        """The running server."""
        if self._server is None:
            raise EngineError(f"engine '{self.name}' is not running")
        return self._server

    async def start(self) -> None:
        """Start the server, and the client once it answers; see `Engine.start`."""
        await self.close()
        settings, model = self._settings, self._model
        self._server = ServerProcess(
            MODULE,
            lambda port: server_arguments(model, settings, host=LOOPBACK, port=port),
            server_environment(settings),
            key_variable=KEY_OF_SERVER,
            log=self._log or self._temporary_log(),
        )
        try:
            await self._server.start(limit_s=start_limit_s(settings))
            self._client = VllmClient([self._server.url], settings, model, self._server.key, name=self.name)
            await self._while_it_runs(self._client.start())
        except BaseException:
            await asyncio.shield(self.close())
            raise

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `Engine.generate`."""
        return await self._while_it_runs(self._asked.generate(request))

    async def publish(self, policy: PolicyVersion) -> None:
        """See `Engine.publish`."""
        await self._while_it_runs(self._asked.publish(policy))

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        """See `Engine.retire`."""
        await self._while_it_runs(self._asked.retire(oldest, keep))

    async def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return EngineStats() if self._client is None else await self._client.stats()

    def events(self) -> dict[str, int]:
        """See `EngineWithEvents`."""
        return {} if self._client is None else self._client.events()

    def scraped(self) -> dict[str, float]:
        """See `EngineWithWorkerFigures`."""
        return {} if self._client is None else self._client.scraped()

    async def close(self) -> None:
        """See `Engine.close`."""
        client, server, self._client, self._server = self._client, self._server, None, None
        try:
            if client is not None:
                await client.close()
        finally:
            if server is not None:
                await server.close()
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)
                self._scratch = None

    @property
    def _asked(self) -> VllmClient:
        if self._client is None:
            raise EngineError(f"engine '{self.name}' is not running")
        return self._client

    async def _while_it_runs(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, unless the server ends first."""
        server = self.server
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, server.end}, return_when=asyncio.FIRST_COMPLETED)
            if not server.end.done():
                return task.result()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        raise EngineLostError(f"engine '{self.name}' is lost: its server ended {server.ending()}")

    def _temporary_log(self) -> Path:
        self._scratch = self._scratch or Path(tempfile.mkdtemp(prefix="entente-vllm-"))
        return self._scratch / "vllm.log"
