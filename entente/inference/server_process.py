"""vLLM's own server as a child of this process.

The child and its descendants are one process group. The group is killed in every case: at close, when the start fails or takes
too long, and when this process exits in any way (that closes the pipe to its stdin). Only this child is killed, by id.
"""

import asyncio
import contextlib
import os
import random
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import aiohttp

from entente.telemetry.child import how_it_ended, last_lines
from entente.telemetry.errors import EngineError

LOOPBACK = "127.0.0.1"
_PORTS = range(20_000, 32_000)
"""Below the ephemeral ports, so that a port that is free now is still free when the server binds it."""
_LOOK_EVERY_S, _GRACE_S = 0.2, 10.0


class ServerProcess:
    def __init__(
        self,
        python: Path,
        module: str,
        arguments: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        *,
        key_variable: str,
        log: Path,
    ) -> None:
        """`python`: of the server's environment, which has `entente` too; `arguments`: of the module, by port;
        `key_variable`: passes the key to the server; `log` gets its output."""
        self.key = secrets.token_urlsafe(32)
        self._port = free_port()
        self._command = [str(python), "-P", "-m", "entente.telemetry.child", module, *arguments(self._port)]
        self._environment = os.environ | dict(environment) | {key_variable: self.key}
        self._log = log
        self._child: asyncio.subprocess.Process | None = None
        self._end: asyncio.Future[int] | None = None

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._port}"

    @property
    def pid(self) -> int:
        """The child's process id; 0 before the start."""
        return self._child.pid if self._child is not None else 0

    @property
    def end(self) -> asyncio.Future[int]:
        if self._end is None:
            raise EngineError("the server was not started")
        return self._end

    async def start(self, *, limit_s: float) -> None:
        """Start and wait for an answer. Raises EngineError if the server exited, or was killed after `limit_s` without one."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as written:
            self._child = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=written,
                stderr=written,
                start_new_session=True,
                env=self._environment,
            )
        self._end = asyncio.ensure_future(self._child.wait())
        try:
            await self._wait_until_ready(limit_s)
        except BaseException:
            await asyncio.shield(self.close(grace_s=0.0))
            raise

    async def _wait_until_ready(self, limit_s: float) -> None:
        began = time.monotonic()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while not await self._answers(session):
                if self.end.done():
                    raise EngineError(f"vLLM's server ended {self.ending()}")
                if time.monotonic() - began >= limit_s:
                    raise EngineError(f"vLLM's server did not start within {limit_s:g} s; {self._last_words()}")
                await asyncio.wait({self.end}, timeout=_LOOK_EVERY_S)

    async def _answers(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.url}/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    def ending(self) -> str:
        code = self._child.returncode if self._child is not None else None
        return f"{how_it_ended(code)}; {self._last_words()}"

    def _last_words(self) -> str:
        """In the sentence, because the log may be a temporary file that goes with the server."""
        return f"the last lines of its log '{self._log}':\n{last_lines(self._log)}"

    async def close(self, *, grace_s: float = _GRACE_S) -> None:
        """Stop the process group. It gets `grace_s` seconds to free its shared memory."""
        if self._child is None:
            return
        child, self._child = self._child, None
        try:
            if grace_s and not self.end.done():
                child.terminate()
                await asyncio.wait({self.end}, timeout=grace_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        await asyncio.shield(self.end)
        if child.stdin is not None:
            child.stdin.close()


def free_port() -> int:
    for port in random.SystemRandom().sample(_PORTS, 50):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise EngineError(f"no port between {_PORTS.start} and {_PORTS.stop} is free for vLLM's server")
