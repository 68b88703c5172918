"""One worker as its client sees it: its address, its state, the versions published there, and the HTTP calls to it.

Every HTTP failure becomes one of a few errors: the request was refused, the version is gone, the worker is lost, or one call
failed. The pool decides what follows. The key is sent in a header only.
"""

import hashlib
import io
import json
import os
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, Literal

import aiohttp

from inference.engine import EngineStats
from inference.settings import InferenceSettings
from records.generation import Generation
from records.policy_version import BASE, PolicyVersion
from telemetry.errors import DataError, EngineError, VersionGoneError
from workers.flow_control import FlowControl, WorkerLoad
from workers.wire import CONTENT_TYPE, unpack_generation

LARGE_BODY = 1 << 20
"""Bytes above which a body is sent in parts, so that it does not block the event loop."""
State = Literal["unknown", "living", "ejected"]
_COUNTS = tuple(field.name for field in fields(EngineStats) if field.name not in ("running", "policy_version"))


class CallFailed(Exception):
    """A worker failed one call; another worker may answer it."""

    def __init__(self, reason: str, *, lost: bool = False, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.lost = lost
        """The worker is lost: it refuses connections, or reports that it cannot answer."""
        self.timed_out = timed_out


class KeyRefused(CallFailed):
    """The worker rejects the key."""


class VersionMoved(VersionGoneError):
    """The requested version is not served; `newest` is the newest that is."""

    def __init__(self, reason: str, newest: PolicyVersion) -> None:
        super().__init__(reason)
        self.newest = newest


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTimes:
    """How long a pool waits, seconds. Tests wait less."""

    request: float = 120.0
    """For the answer to a request."""
    heartbeat: float = 10.0
    """Between health checks of a worker, and for each; after two failures it gets no work until it recovers."""
    scrape: float = 10.0
    """Between readings of a worker's Prometheus page."""
    no_worker: float = 120.0
    """Without a living worker until requests fail; longer while one warms up."""


class PoolWorker:
    """A worker's address, its state in the pool, and the calls that can be made to it."""

    def __init__(self, url: str, settings: InferenceSettings, times: PoolTimes) -> None:
        self.url = url.rstrip("/")
        self.state: State = "unknown"
        self.served: dict[int, PolicyVersion] = {}
        """Versions that this pool published there, the newest last; the base model needs no publishing."""
        self.flow = FlowControl(settings.max_in_flight)
        self.in_flight = 0
        self.failures = 0
        """Failures since the last good answer."""
        self.recent_ejections = 0
        """Ejections, less one for each good answer since; more of them delay the next probe."""
        self.missed_probes = 0
        """Consecutive failed probes."""
        self.changing = 0
        """Publish calls in progress; the worker gets no work meanwhile."""
        self.changes = 0
        """Publish calls so far."""
        self.warming = False
        """It was ejected, and its engine is starting."""
        self.reason = ""
        """Why it was ejected, or is not ready."""
        self._timeout_s = times.request
        self._last: dict[str, int] = dict.fromkeys(_COUNTS, 0)
        self._earlier_counts: dict[str, int] = dict.fromkeys(_COUNTS, 0)

    @property
    def newest(self) -> PolicyVersion:
        """The version last published there by this pool."""
        return next(reversed(self.served.values()), BASE)

    def rank(self, snapshot_id: str) -> bytes:
        """Preference of a position for this worker (rendezvous hashing): the same in every process and for any other workers."""
        return hashlib.blake2b(f"{self.url}\0{snapshot_id}".encode(), digest_size=8).digest()

    async def generate(self, session: aiohttp.ClientSession, body: bytes) -> tuple[Generation, WorkerLoad]:
        """Send one packed request; returns the generation and the worker's load.

        Raises:
            CallFailed: the worker did not answer, or its answer cannot be read.
            VersionMoved: the worker does not serve the version.
            EngineError: the worker refused the request.
        """
        content = body if len(body) < LARGE_BODY else io.BytesIO(body)
        answer = await self._call(session, "POST", "/generate", data=content, headers={"content-type": CONTENT_TYPE})
        try:
            return unpack_generation(answer)
        except DataError as error:
            raise CallFailed(f"its answer cannot be read: {error}") from error

    async def publish(self, session: aiohttp.ClientSession, policy: PolicyVersion) -> None:
        """Publish `policy` on the worker; without an adapter, reset it to the base model.

        Raises:
            CallFailed: the worker did not answer.
            DataError: the worker refused the adapter.
        """
        self.changing, self.changes = self.changing + 1, self.changes + 1
        try:
            await self._json(
                session, "POST", "/publish", self._timeout_s, json=policy.to_json() | {"adapter": str(policy.adapter or "")}
            )
        except EngineError as error:
            raise DataError(str(error)) from error
        finally:
            self.changing -= 1
        if policy.adapter is None:
            self.served.clear()
        else:
            self.served.pop(policy.version, None)
            self.served[policy.version] = policy

    async def retire(self, session: aiohttp.ClientSession, oldest: int, keep: Collection[int]) -> None:
        """Retire versions before `oldest` except `keep` and the newest; raises CallFailed."""
        body = {"oldest": oldest, "keep": sorted(keep)}
        await self._json(session, "POST", "/retire", self._timeout_s, json=body)
        newest = self.newest.version
        self.served = {v: found for v, found in self.served.items() if v >= oldest or v in keep or v == newest}

    async def health(self, session: aiohttp.ClientSession, timeout_s: float) -> dict[str, Any]:
        """The worker's health report; raises CallFailed, or EngineError if the worker refuses the call."""
        return await self._json(session, "GET", "/health", timeout_s)

    async def counts(self, session: aiohttp.ClientSession, timeout_s: float) -> dict[str, int]:
        """Its counts since this pool started, summed over restarts; the last known counts if it does not answer."""
        try:
            found = await self._json(session, "GET", "/stats", timeout_s)
        except (CallFailed, EngineError):
            found = self._last
        now = {name: int(found.get(name, 0)) for name in _COUNTS}
        if now["requests"] < self._last["requests"]:  # it was restarted
            self._earlier_counts = {name: self._earlier_counts[name] + self._last[name] for name in _COUNTS}
        self._last = now
        return {name: self._earlier_counts[name] + now[name] for name in _COUNTS}

    async def page(self, session: aiohttp.ClientSession, timeout_s: float) -> str:
        """Its Prometheus page; raises as `health`."""
        return (await self._call(session, "GET", "/metrics", timeout=aiohttp.ClientTimeout(total=timeout_s))).decode()

    async def log(self, session: aiohttp.ClientSession, after: int, timeout_s: float) -> list[dict[str, Any]]:
        """Its log lines with numbers above `after`; raises as `health`."""
        return (await self._json(session, "GET", f"/log?after={after}", timeout_s))["lines"]

    async def _json(
        self, session: aiohttp.ClientSession, method: str, path: str, timeout_s: float, **body: Any
    ) -> dict[str, Any]:
        content = await self._call(session, method, path, timeout=aiohttp.ClientTimeout(total=timeout_s), **body)
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise CallFailed(f"its answer to {path} is not JSON")
        return found

    async def _call(self, session: aiohttp.ClientSession, method: str, path: str, **body: Any) -> bytes:
        try:
            async with session.request(method, self.url + path, **body) as answer:
                content = await answer.read()
                if answer.status == 200:
                    return content
                raise self._error_for(answer.status, content, path)
        except aiohttp.ClientConnectorError as error:
            reason = os.strerror(error.errno).lower() if error.errno else "no connection"
            raise CallFailed(f"nobody listens there ({reason})", lost=True) from error
        except TimeoutError as error:
            raise CallFailed(f"it did not answer {path} in time", timed_out=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise CallFailed(f"the connection broke at {path} ({type(error).__name__})") from error

    def _error_for(self, status: int, content: bytes, path: str) -> Exception:
        """The error for a status other than 200. A body without kind and sentence comes from a proxy, and is a failed call."""
        try:
            answer_fields = json.loads(content)
            sentence, kind = str(answer_fields["sentence"]), str(answer_fields["kind"])
        except (ValueError, TypeError, KeyError):
            return CallFailed(f"it answered {path} with status {status}")
        if status == 410:
            return VersionMoved(f"worker {self.url}: {sentence}", newest_of(answer_fields))
        if status == 401:
            return KeyRefused(sentence, lost=True)
        if status == 503:
            return CallFailed(f"it answered: {sentence}", lost=True)
        if status >= 500 or kind == "busy":
            return CallFailed(f"it answered: {sentence}")
        return EngineError(f"worker {self.url} refused {path} with {status}: {sentence}")


def serves(answer_fields: dict[str, Any], policy: PolicyVersion) -> bool:
    """Whether a health report lists this version. True for the base model; other clients may have published more versions."""
    versions = answer_fields.get("versions")
    return policy == BASE or (isinstance(versions, dict) and versions.get(str(policy.version)) == policy.adapter_hash)


def newest_of(answer_fields: dict[str, Any]) -> PolicyVersion:
    """The newest version that a worker reports."""
    return PolicyVersion(
        version=int(answer_fields.get("policy_version", -1)), adapter_hash=str(answer_fields.get("adapter_hash", ""))
    )
