"""vLLM's own server as an engine of this machine: starts it as a child process, and uses it over HTTP like any other.

The engine is lost once the child exits; the supervisor then builds another (server, port, key) and republishes the versions."""

import asyncio
import secrets
import shutil
import tempfile
from pathlib import Path

from entente.inference.engine_cards import check_vllm
from entente.inference.page_gate import KEY_OF_SERVER
from entente.inference.server_arguments import MODULE, server_arguments, server_environment, start_limit_s
from entente.inference.server_process import LOOPBACK, ServerProcess
from entente.inference.settings import InferenceSettings
from entente.inference.vllm_client import VllmClient
from entente.telemetry.errors import EngineLostError


class ServedVllm(VllmClient):
    """The `Engine` contract over a vLLM server that this process starts, once, and stops."""

    def __init__(self, model: Path, settings: InferenceSettings, *, log: Path | None = None) -> None:
        """`model`: folder of the base model; `log`: the server's log file, None: a temporary one.

        Raises InputError as `check_vllm`.
        """
        self._scratch = None if log else Path(tempfile.gettempdir()) / f"entente-vllm-{secrets.token_hex(8)}"
        vllm = check_vllm()
        self.server = ServerProcess(
            vllm.python,
            MODULE,
            lambda port: server_arguments(model, settings, host=LOOPBACK, port=port),
            server_environment(settings) | vllm.variables(),
            key_variable=KEY_OF_SERVER,
            log=log or Path(str(self._scratch), "vllm.log"),
        )
        super().__init__([self.server.url], settings, model, self.server.key)

    async def start(self) -> None:
        if self._scratch is not None:
            self._scratch.mkdir(mode=0o700)
        try:
            await self.server.start(limit_s=start_limit_s(self._settings))
            self.server.end.add_done_callback(self._end)
            await super().start()
        except BaseException:
            await asyncio.shield(self.close())
            raise

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            await self.server.close()
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)

    def _end(self, _: asyncio.Future[int]) -> None:
        self.give_up(EngineLostError(f"engine '{self.name}' is lost: its server ended {self.server.ending()}"))
