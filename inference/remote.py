"""Engines elsewhere: a client of one or several workers, with the same contract as the engine in this process.

One position stays on one worker, so that its forks meet a warm prefix cache. A worker that refuses or does not answer is an
`EngineError` that names it.
"""

import asyncio
import hashlib
import json
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

import aiohttp

from inference.engine import EngineStats, Generation, GenerationRequest
from inference.settings import InferenceSettings
from inference.wire import pack_request, unpack_generation
from telemetry.errors import EngineError, InputError


class RemoteEngine:
    """The `Engine` contract over HTTP; lives on one event loop."""

    def __init__(self, settings: InferenceSettings, key: str | None, model_fingerprint: str) -> None:
        self.name = "remote"
        self._settings = settings
        self._key = key
        self._fingerprint = model_fingerprint
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Check that every worker answers, accepts the key, and serves this run's model.

        Raises:
            InputError: one does not; the sentence names it.
        """
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = aiohttp.ClientTimeout(total=self._settings.request_timeout_s)
        connector = aiohttp.TCPConnector(limit_per_host=4 * self._settings.max_sequences)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
        for url in self._settings.urls:
            try:
                health = await self._json("GET", url, "/health")
            except EngineError as error:
                raise InputError(
                    f"{error}; is `entente serve` running there, and is {self._settings.key_variable} set?"
                ) from error
            if health.get("model") != self._fingerprint:
                raise InputError(f"worker {url} serves another model than this run's: start it with the same --model")

    async def generate(self, request: GenerationRequest) -> Generation:
        """Draw one completion on the worker that keeps this position; see `Engine.generate`."""
        digest = hashlib.blake2b(request.snapshot_id.encode(), digest_size=4).digest()
        url = self._settings.urls[int.from_bytes(digest, "big") % len(self._settings.urls)]
        return unpack_generation(await self._call("POST", url, "/generate", data=pack_request(request)))

    async def publish(self, version: int, adapter: Path, adapter_hash: str) -> None:
        """Publish on all workers; they must see `adapter` under their own adapters' root."""
        body = {"version": version, "adapter": str(adapter.resolve()), "adapter_hash": adapter_hash}
        await asyncio.gather(*(self._json("POST", url, "/publish", json=body) for url in self._settings.urls))

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        """Workers serve one version at a time: the newest."""

    async def stats(self) -> EngineStats:
        """Sums over the workers; the version is the oldest one served."""
        each = [EngineStats(**await self._json("GET", url, "/stats")) for url in self._settings.urls]
        sums = {field.name: sum(getattr(stats, field.name) for stats in each) for field in fields(EngineStats)}
        del sums["policy_version"]
        return EngineStats(policy_version=min(stats.policy_version for stats in each), **sums)

    async def close(self) -> None:
        """Close the connections; the workers go on."""
        if self._session is not None:
            await self._session.close()

    async def _json(self, method: str, url: str, path: str, **body: Any) -> dict[str, Any]:
        return json.loads(await self._call(method, url, path, **body))

    async def _call(self, method: str, url: str, path: str, **body: Any) -> bytes:
        if self._session is None:
            raise EngineError("the remote engine is not started")
        try:
            async with self._session.request(method, url.rstrip("/") + path, **body) as answer:
                content = await answer.read()
                if answer.status != 200:
                    raise EngineError(
                        f"worker {url} refused {path} with {answer.status}: {content[:300].decode(errors='replace')}"
                    )
                return content
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"worker {url} does not answer {path}: {error or type(error).__name__}") from error
