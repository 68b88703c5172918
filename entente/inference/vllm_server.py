"""One vLLM server as its client sees it: HTTP calls, the policy versions loaded there, and probes of its sampling.

A policy version is an adapter with a name of its own. A probe shows that the server samples under the mask, with the weights of
the other servers, and not with the base model's under an adapter's name. The key is sent only in a header.
"""

import asyncio
import hashlib
import io
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from entente.decoding.base_identity import base_identity
from entente.decoding.model_files import end_token_ids
from entente.inference.server_arguments import START_S
from entente.inference.settings import KEY_VARIABLE, InferenceSettings
from entente.inference.vllm_wire import (
    FLOAT32,
    ROUNDED,
    SIDE_BY_SIDE,
    adapter_name,
    error_message,
    probe_request,
    read_answer,
    read_counter,
    request_body,
    same_weights,
)
from entente.records.policy_version import BASE, PolicyVersion
from entente.records.rows import Generation, GenerationRequest
from entente.telemetry.errors import DataError, EngineError, InputError

STEPS, SAMPLED, PREEMPTED = "vllm:iteration_tokens_total_count", "vllm:generation_tokens_total", "vllm:num_preemptions_total"
LARGE_BODY = 1 << 20
"""Bytes above which a body is sent in chunks, so that it does not block the event loop."""


class CallFailed(Exception):
    """A call to a server failed; another server may answer it."""

    def __init__(self, reason: str, *, lost: bool = False, cure: str = "", event: str = "") -> None:
        """`lost`: cannot answer before it passes a check; `cure`: advice for the first check; `event`: name to count under."""
        super().__init__(reason)
        self.lost, self.cure, self.event = lost, cure, event


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimes:
    """Timeouts of a client, seconds. Tests use shorter ones."""

    request: float = 300.0
    """For the answer to a request, which may wait in the server's queue."""
    look: float = 2.0
    """Between two checks of a server."""
    heartbeat: float = 10.0
    """For the answer to a check; after two without one the server gets no requests until it recovers."""
    no_server: float = START_S
    """Without a living server until requests fail."""


@dataclass(slots=True, eq=False)
class Call:
    task: asyncio.Task[Generation]
    policy: PolicyVersion
    reason: Exception | None = None

    def end(self, reason: Exception) -> None:
        self.reason = reason
        self.task.cancel()


class Server:
    def __init__(
        self, url: str, model: Path, settings: InferenceSettings, times: ClientTimes, probes: dict[PolicyVersion, Generation]
    ) -> None:
        """`model`: folder of the base model; `probes`: samples of the first probed server, shared by all servers of a client."""
        self.url = url.rstrip("/")
        self.name = self.url.partition("://")[2]
        self.living = False
        """It gets work: it passed all checks and has all versions."""
        self.reason = "it was not checked yet"
        self.loaded: set[PolicyVersion] = set()
        self.calls: set[Call] = set()
        self.failures = 0
        self.counts = {STEPS: 0.0, SAMPLED: 0.0, PREEMPTED: 0.0}
        """Sums since the start of this client, over restarts of the server."""
        self._model, self._settings, self._times, self._probes = model, settings, times, probes
        self._eos_id = end_token_ids(model)[0]
        self._tolerance = FLOAT32 if settings.dtype == "float32" else ROUNDED
        self._base = ""
        self._missed = 0
        self._last: dict[str, float] = {}
        self._session: aiohttp.ClientSession | None = None

    def open(self, key: str | None) -> None:
        """Open connections that send the key. Idle ones close here before a server closes them, after 5 s."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=4)
        self._session = aiohttp.ClientSession(headers=headers, connector=connector)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def rank(self, position: str) -> bytes:
        """Preference of a position for this server (rendezvous hashing): equal in all processes, independent of other servers."""
        return hashlib.blake2b(f"{self.url}\0{position}".encode(), digest_size=8).digest()

    async def ask(self, request: GenerationRequest, policy: PolicyVersion) -> Generation:
        """The checked answer. Raises CallFailed without a valid one, and EngineError if the server refused the request."""
        model, sent = adapter_name(policy, self._base), time.monotonic()
        body = request_body(request, model, self._eos_id)
        content = await self._call("POST", "/inference/v1/generate", self._times.request, body)
        took_ms = 1e3 * (time.monotonic() - sent)
        try:
            return read_answer(content, request, policy, model=model, worker=self.name, took_ms=took_ms)
        except DataError as error:
            raise _rejected(str(error)) from error

    async def look(self) -> None:
        """Health check; raises CallFailed at the second one without an answer, or if the connection is refused."""
        try:
            await self._call("GET", "/health", self._times.heartbeat)
            self._missed = 0
        except CallFailed as error:
            self._missed += 1
            if self._missed >= 2 or error.lost:
                raise

    async def count(self) -> None:
        page = await self._call("GET", "/metrics", self._times.heartbeat)
        for name in self.counts:
            try:
                now, last = read_counter(page, name), self._last.get(name)
            except ValueError as error:
                raise CallFailed(f"its metrics page cannot be read ({error})") from error
            # What a first page counts came before this client; a smaller number comes from a new process.
            self.counts[name] += 0.0 if last is None else now - last if now >= last else now
            self._last[name] = now

    # -- checks and versions --------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Check whether a server, which may have restarted, can serve this run. Raises CallFailed if it is not ready,
        InputError if it is not a server for this run, and DataError if it has other weights."""
        self.loaded.clear()
        self.failures = self._missed = 0
        await self._call("GET", "/health", self._times.heartbeat)
        base, *_ = await self._models()
        self._base = base["id"]
        length, root = base.get("max_model_len"), Path(str(base.get("root")))
        if not isinstance(length, int) or length < self._settings.max_model_length:
            raise InputError(
                f"vLLM server {self.url} takes {length} tokens but inference.max_model_length is "
                f"{self._settings.max_model_length}: start it by `entente serve` with --max-model-length "
                f"{self._settings.max_model_length} (without it, vLLM's --max-model-len)"
            )
        # A folder that is not on this machine cannot be compared; the trainer's check of the first rows notices another model.
        if (root / "config.json").is_file() and not await asyncio.to_thread(_same_base, root, self._model):
            raise InputError(f"vLLM server {self.url} serves '{root}', which is another model than '{self._model}'")
        probe = await self.ask(probe_request(self._eos_id, BASE.version), BASE)
        if not probe.logprobs.any():
            raise _rejected("every log-probability is 0")
        self._compare(BASE, probe)
        await self.count()

    async def load(self, policy: PolicyVersion, *, is_zero: bool) -> None:
        """Load a version, and verify that the server samples from it. `is_zero`: it may sample as the base model does. Raises
        CallFailed if the server fails, and DataError if it refuses the version or samples with other weights."""
        name = adapter_name(policy, self._base)
        try:
            await self._post("/v1/load_lora_adapter", lora_name=name, lora_path=str(policy.folder.absolute()))
        except (EngineError, CallFailed) as error:
            # Another client may have loaded it, or this one before its connection broke.
            if not await self._has(name):
                raise DataError(
                    f"vLLM server {self.url} cannot serve adapter '{policy.folder}': {error}; it must see that folder, and run "
                    "with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                ) from error
        probe = probe_request(self._eos_id, policy.version)
        sampled, base = await asyncio.gather(self.ask(probe, policy), self.ask(probe, BASE))
        if not is_zero and same_weights(sampled, base, SIDE_BY_SIDE, probe):
            raise DataError(
                f"vLLM server {self.url} draws by the same weights under the adapter's name '{name}' and the base model's: start "
                "it again as `entente serve` does, with our processor"
            )
        self._compare(policy, sampled)
        self.loaded.add(policy)

    async def unload(self, policy: PolicyVersion) -> None:
        if policy not in self.loaded:
            return
        self.loaded.discard(policy)
        name = adapter_name(policy, self._base)
        try:
            await self._post("/v1/unload_lora_adapter", lora_name=name)
        except CallFailed:
            if await self._has(name):  # else another client of the same run was faster
                raise

    def _compare(self, policy: PolicyVersion, sampled: Generation) -> None:
        probe = probe_request(self._eos_id, policy.version)
        if not same_weights(sampled, self._probes.setdefault(policy, sampled), self._tolerance, probe):
            raise DataError(f"vLLM server {self.url} has other weights under {policy} than the first server")

    # -- HTTP -----------------------------------------------------------------------------------------------------------

    async def _post(self, path: str, **fields: str) -> None:
        await self._call("POST", path, self._times.request, json.dumps(fields).encode())

    async def _has(self, name: str) -> bool:
        return name in [card["id"] for card in await self._models()]

    async def _models(self) -> list[dict[str, Any]]:
        try:
            models = json.loads(await self._call("GET", "/v1/models", self._times.heartbeat))["data"]
            return [{**card, "id": str(card["id"])} for card in models]
        except (ValueError, TypeError, KeyError) as error:
            raise CallFailed(f"its list of models cannot be read ({error!r})") from error

    async def _call(self, method: str, path: str, timeout_s: float, body: bytes | None = None) -> bytes:
        """Make one call; retry if a kept-alive connection closes before the first byte, because servers close idle ones.
        Raises CallFailed without an answer of this server, and EngineError if the server refused the call."""
        for last in (False, True):
            try:
                return await self._send(method, path, timeout_s, body)
            except aiohttp.ClientConnectorError as error:
                reason = os.strerror(error.errno).lower() if error.errno else "no connection"
                raise CallFailed(f"nobody listens there ({reason})", lost=True) from error
            except TimeoutError as error:
                raise CallFailed(f"it did not answer {path} in time", event="timeouts") from error
            except (aiohttp.ClientError, OSError) as error:
                if last or not isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
                    raise CallFailed(f"the connection broke at {path} ({type(error).__name__})") from error
        raise AssertionError

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
            case 401:
                raise CallFailed(sentence, lost=True, cure=f"set {KEY_VARIABLE} to its --api-key")
            case 403:  # of a key, or of a route that this server does not have
                cure = f"set {KEY_VARIABLE} to its --api-key, or start it with --enable-scale-out"
                raise CallFailed(sentence, lost=True, cure=cure)
            case 404:  # no such route, or no adapter of that name: it may have been started again
                raise CallFailed(sentence, lost=True, cure="start it with --enable-scale-out")
            case 400 | 413 | 422:
                raise EngineError(f"vLLM server {self.url} refused {path} with {answer.status}: {error_message(text)}")
        raise CallFailed(sentence)


def _same_base(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve() or base_identity(one) == base_identity(other)


def _rejected(reason: str) -> CallFailed:
    cure = "start it as `entente serve` does, with our processor and --logprobs-mode processed_logits"
    return CallFailed(f"its answer was rejected: {reason}", cure=cure, event="rejected_answers")
