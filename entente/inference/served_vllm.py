"""vLLM's own server as an engine of this machine: starts the server as a child, and asks it over HTTP as any other server.

The engine is lost once the child has ended. The supervisor then builds another, with a server, port and key of its own, and
publishes the versions again.
"""

import asyncio
import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Collection, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from entente.inference.server_arguments import KEY_OF_SERVER, MODULE, server_arguments, server_environment, start_limit_s
from entente.inference.server_process import LOOPBACK, ServerProcess
from entente.inference.settings import InferenceSettings
from entente.inference.vllm_client import VllmClient
from entente.records.generation import Generation, GenerationRequest
from entente.records.policy_version import PolicyVersion
from entente.telemetry.errors import EngineLostError

T = TypeVar("T")


class ServedVllm(VllmClient):
    """The `Engine` contract over a vLLM server that this process starts, once, and ends."""

    def __init__(self, model: Path, settings: InferenceSettings, *, name: str = "vllm", log: Path | None = None) -> None:
        """
        Args:
            model: folder of the base model.
            log: file of the server's log; None: a temporary one.
        """
        self._scratch = None if log else Path(tempfile.gettempdir()) / f"entente-vllm-{secrets.token_hex(8)}"
        self.server = ServerProcess(
            MODULE,
            lambda port: server_arguments(model, settings, host=LOOPBACK, port=port),
            server_environment(settings),
            key_variable=KEY_OF_SERVER,
            log=log or Path(str(self._scratch), "vllm.log"),
        )
        super().__init__([self.server.url], settings, model, self.server.key, name=name)

    async def start(self) -> None:
        """Start the server, and the client once it answers; see `Engine.start`."""
        if self._scratch is not None:
            self._scratch.mkdir(mode=0o700)
        try:
            await self.server.start(limit_s=start_limit_s(self._settings))
            await self._while_it_runs(super().start())
        except BaseException:
            await asyncio.shield(self.close())
            raise

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `Engine.generate`."""
        return await self._while_it_runs(super().generate(request))

    async def publish(self, policy: PolicyVersion) -> None:
        """See `Engine.publish`."""
        await self._while_it_runs(super().publish(policy))

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        """See `Engine.retire`."""
        await self._while_it_runs(super().retire(oldest, keep))

    async def close(self) -> None:
        """See `Engine.close`."""
        try:
            await super().close()
        finally:
            await self.server.close()
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)

    async def _while_it_runs(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, unless the server ends first."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self.server.end}, return_when=asyncio.FIRST_COMPLETED)
            if not self.server.end.done():
                return task.result()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        raise EngineLostError(f"engine '{self.name}' is lost: its server ended {self.server.ending()}")
