"""One vLLM server as its client sees it: its calls over HTTP, what is loaded there, and how many requests are in flight.

Every failure of HTTP becomes one of a few errors; the client decides what follows. The key is sent in a header only.
"""

import asyncio
import hashlib
import io
import json
import os
from collections.abc import Mapping
from typing import Any

import aiohttp

from entente.inference.vllm_wire import Answer, adapter_name, error_message, read_answer, read_series, request_body
from entente.records.generation import GenerationRequest
from entente.records.policy_version import PolicyVersion
from entente.telemetry.errors import DataError, EngineError

RUNNING, WAITING, PREEMPTED = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions_total"
STEPS = "vllm:iteration_tokens_total_count"
LARGE_BODY = 1 << 20
"""Bytes above which a body is sent in parts, so that it does not block the event loop."""


class CallFailed(Exception):
    """A server failed one call; another one may answer it."""

    def __init__(self, reason: str, *, lost: bool = False, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.lost, self.timed_out = lost, timed_out
        """`lost`: it can answer nothing before it is looked at again. `timed_out`: it did not answer in time."""


class KeyRefused(CallFailed):
    """The server rejects the key."""


class NotThere(CallFailed):
    """The server has no such route, or no adapter of that name: it may have been started again."""


class AnswerRejected(CallFailed):
    """The answer must not become a row."""


class Server:
    """A server's address and state, and the calls to it."""

    def __init__(self, url: str, most: int, eos_id: int) -> None:
        """`most`: requests that may be in flight there."""
        self.url = url.rstrip("/")
        self.name = self.url.partition("://")[2]
        self.living, self.ejected = False, False
        """It gets work; it gets none until it is admitted again."""
        self.reason = "nobody has looked yet"
        """Why it gets no work."""
        self.loaded: dict[str, PolicyVersion] = {}
        """Adapters by name."""
        self.calls: dict[asyncio.Task[Any], PolicyVersion] = {}
        """Requests in flight, and the version that draws each."""
        self.in_flight = 0
        self.failures, self.missed = 0, 0
        """Failures and looks without an answer since the last good one."""
        self.counts = {STEPS: 0.0, PREEMPTED: 0.0}
        """Sums since the start of this client, over restarts of the server."""
        self.base = ""
        """Its name of the base model."""
        self._most, self._eos_id = most, eos_id
        self._last: dict[str, float] = {}
        self._session: aiohttp.ClientSession | None = None

    def open(self, key: str | None) -> None:
        """Open connections that bear the key. Idle ones close here before a server closes them, after 5 s."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=4)
        self._session = aiohttp.ClientSession(headers=headers, connector=connector)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    @property
    def has_room(self) -> bool:
        """Whether one more request may be sent."""
        return self.living and self.in_flight < self._most

    def rank(self, position: str) -> bytes:
        """Preference of a position for this server (rendezvous hashing): the same in every process and for any other servers."""
        return hashlib.blake2b(f"{self.url}\0{position}".encode(), digest_size=8).digest()

    def forget(self) -> None:
        """Forget what a process said, because another one may answer from now on."""
        self.loaded.clear()
        self.failures, self.missed = 0, 0

    async def ask(self, request: GenerationRequest, policy: PolicyVersion, timeout_s: float) -> Answer:
        """The checked answer to a request under a version.

        Raises:
            CallFailed: no answer, or one that must not become a row (`AnswerRejected`).
            EngineError: the server refused the request.
        """
        model = adapter_name(policy, self.base)
        content = await self.call("POST", "/inference/v1/generate", timeout_s, request_body(request, model, self._eos_id))
        try:
            return read_answer(content, request, model)
        except DataError as error:
            raise AnswerRejected(f"its answer was rejected: {error}") from error

    async def read(self, timeout_s: float) -> dict[str, float]:
        """Its metrics page, added to `counts`; raises as `call`."""
        page = await self.call("GET", "/metrics", timeout_s)
        try:
            series = read_series(page)
        except DataError as error:
            raise CallFailed(str(error)) from error
        for name in self.counts:
            now, last = series.get(name, 0.0), self._last.get(name)
            # What a first page counts came before this client; a smaller number comes from a new process.
            self.counts[name] += 0.0 if last is None else now - last if now >= last else now
            self._last[name] = now
        return series

    async def post(self, path: str, fields: Mapping[str, str], timeout_s: float) -> None:
        """Send JSON; raises as `call`."""
        await self.call("POST", path, timeout_s, json.dumps(fields).encode())

    async def models(self, timeout_s: float) -> list[dict[str, Any]]:
        """The base model, then the adapters; raises as `call`."""
        try:
            models = json.loads(await self.call("GET", "/v1/models", timeout_s))["data"]
            return [{**card, "id": str(card["id"])} for card in models]
        except (ValueError, TypeError, KeyError) as error:
            raise CallFailed(f"its list of models cannot be read ({error!r})") from error

    async def call(self, method: str, path: str, timeout_s: float, body: bytes | None = None) -> bytes:
        """Make one call. It is made again if a kept connection closes before a byte of answer: the server closes idle ones.

        Raises:
            CallFailed: no answer, or an answer that is not this server's.
            EngineError: the server refused the call.
        """
        try:
            try:
                return await self._send(method, path, timeout_s, body)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if isinstance(error, aiohttp.ClientConnectorError):
                    raise
                return await self._send(method, path, timeout_s, body)
        except aiohttp.ClientConnectorError as error:
            reason = os.strerror(error.errno).lower() if error.errno else "no connection"
            raise CallFailed(f"nobody listens there ({reason})", lost=True) from error
        except TimeoutError as error:
            raise CallFailed(f"it did not answer {path} in time", timed_out=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise CallFailed(f"the connection broke at {path} ({type(error).__name__})") from error

    async def _send(self, method: str, path: str, timeout_s: float, body: bytes | None) -> bytes:
        if self._session is None or self._session.closed:
            raise EngineError(f"the client of vLLM server {self.url} is not started, or closed")
        content = io.BytesIO(body) if body is not None and len(body) >= LARGE_BODY else body
        headers = {} if body is None else {"content-type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.request(method, self.url + path, data=content, headers=headers, timeout=timeout) as answer:
            text = await answer.read()
        if answer.status == 200:
            return text
        sentence = f"it answered {path} with {answer.status}: {error_message(text)}"
        match answer.status:
            case 401 | 403:
                raise KeyRefused(sentence, lost=True)
            case 404:
                raise NotThere(sentence, lost=True)
            case 400 | 413 | 422:
                raise EngineError(f"vLLM server {self.url} refused {path} with {answer.status}: {error_message(text)}")
        raise CallFailed(sentence)
