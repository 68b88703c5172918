"""One worker as its client sees it: where it is, what it is believed to serve, and what its answers over HTTP mean.

Every failure of HTTP becomes one of few: the request was refused, the version is gone, the worker is lost, or failed this once.
The key goes into a header and nowhere else. What follows from a failure is the pool's to decide.
"""

import hashlib
import io
import json
import os
from collections.abc import Collection
from dataclasses import fields
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
"""Bytes beyond which a body is sent in pieces, so that the event loop goes on."""
State = Literal["unknown", "living", "ejected"]
_COUNTS = tuple(field.name for field in fields(EngineStats) if field.name not in ("running", "policy_version"))


class CallFailed(Exception):
    """A worker failed one call; nothing says that the call was at fault, and another worker may answer it."""

    def __init__(self, reason: str, *, lost: bool = False, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.lost = lost
        """The worker needs no second chance: nobody listens there, or it says itself that it cannot."""
        self.timed_out = timed_out


class KeyRefused(CallFailed):
    """The worker wants another key, and waiting changes nothing."""


class VersionMoved(VersionGoneError):
    """The version asked for is not served; `newest` is what the worker serves instead."""

    def __init__(self, reason: str, newest: PolicyVersion) -> None:
        super().__init__(reason)
        self.newest = newest


class PoolWorker:
    """A worker's address, its state in the pool, and the calls that can be made to it."""

    def __init__(self, url: str, settings: InferenceSettings) -> None:
        self.url = url.rstrip("/")
        self.state: State = "unknown"
        self.served: dict[int, PolicyVersion] = {}
        """Versions that this pool published there, the newest last; the base model needs no publishing."""
        self.flow = FlowControl(settings.max_in_flight)
        self.in_flight = 0
        self.failures = 0
        """Failures since the last good answer."""
        self.recent_ejections = 0
        """Ejections since it last did well: the more, the longer until it is looked at."""
        self.missed_probes = 0
        """Looks in a row that it did not answer."""
        self.changing = 0
        """Calls under way that change what it serves; it gets no work meanwhile."""
        self.changes = 0
        """Such calls so far."""
        self.warming = False
        """It was ejected, and said since that its engine is being built."""
        self.reason = ""
        """Why it was ejected."""
        self._timeout_s = settings.request_timeout_s
        self._last: dict[str, int] = dict.fromkeys(_COUNTS, 0)
        self._earlier_counts: dict[str, int] = dict.fromkeys(_COUNTS, 0)

    @property
    def newest(self) -> PolicyVersion:
        """The version last published there by this pool."""
        return next(reversed(self.served.values()), BASE)

    def rank(self, snapshot_id: str) -> bytes:
        """How near this worker is to a position; the same in every process, whichever other workers come and go."""
        return hashlib.blake2b(f"{self.url}\0{snapshot_id}".encode(), digest_size=8).digest()

    async def generate(self, session: aiohttp.ClientSession, body: bytes) -> tuple[Generation, WorkerLoad]:
        """Have one packed request answered.

        Raises:
            CallFailed: the worker did not answer, or not with an answer.
            VersionMoved: it does not serve the version.
            EngineError: it refused the request.
        """
        content = body if len(body) < LARGE_BODY else io.BytesIO(body)
        answer = await self._call(session, "POST", "/generate", data=content, headers={"content-type": CONTENT_TYPE})
        try:
            return unpack_generation(answer)
        except DataError as error:
            raise CallFailed(f"its answer cannot be read: {error}") from error

    async def publish(self, session: aiohttp.ClientSession, policy: PolicyVersion) -> None:
        """Serve `policy` there from now on; one without an adapter is the base model alone.

        Raises:
            CallFailed: as above.
            DataError: the worker refuses the adapter.
        """
        self.changing, self.changes = self.changing + 1, self.changes + 1
        try:
            await self._json(session, "POST", "/publish", self._timeout_s, json=policy.to_json())
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
        """Serve nothing before `oldest` there but `keep`; raises CallFailed."""
        body = {"oldest": oldest, "keep": sorted(keep)}
        await self._json(session, "POST", "/retire", self._timeout_s, json=body)
        self.forget(oldest, keep)

    def forget(self, oldest: int, keep: Collection[int]) -> None:
        """Believe no longer that it serves what was retired."""
        newest = self.newest.version
        self.served = {v: found for v, found in self.served.items() if v >= oldest or v in keep or v == newest}

    async def health(self, session: aiohttp.ClientSession, timeout_s: float) -> dict[str, Any]:
        """What it says of itself; raises CallFailed, or EngineError where it refuses us."""
        return await self._json(session, "GET", "/health", timeout_s)

    async def counts(self, session: aiohttp.ClientSession, timeout_s: float) -> dict[str, int]:
        """Its counts since this pool began, over restarts of its process; the last known where it does not answer."""
        try:
            found = await self._json(session, "GET", "/stats", timeout_s)
        except (CallFailed, EngineError):
            found = self._last
        now = {name: int(found.get(name, 0)) for name in _COUNTS}
        if now["requests"] < self._last["requests"]:  # it began again at nothing
            self._earlier_counts = {name: self._earlier_counts[name] + self._last[name] for name in _COUNTS}
        self._last = now
        return {name: self._earlier_counts[name] + now[name] for name in _COUNTS}

    async def page(self, session: aiohttp.ClientSession, timeout_s: float) -> str:
        """Its Prometheus page; raises as `health`."""
        return (await self._call(session, "GET", "/metrics", timeout=aiohttp.ClientTimeout(total=timeout_s))).decode()

    async def log(self, session: aiohttp.ClientSession, after: int, timeout_s: float) -> list[dict[str, Any]]:
        """Lines of its log after that number; raises as `health`."""
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
        """What a status other than 200 says; one without our own words comes from something in between, and is a failure."""
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
    """Does a worker say that it serves this? Others may have published there too; the base is asked for when it is needed."""
    versions = answer_fields.get("versions")
    return policy == BASE or (isinstance(versions, dict) and versions.get(str(policy.version)) == policy.adapter_hash)


def newest_of(answer_fields: dict[str, Any]) -> PolicyVersion:
    """The newest version that a worker says it serves."""
    return PolicyVersion(
        version=int(answer_fields.get("policy_version", -1)), adapter_hash=str(answer_fields.get("adapter_hash", ""))
    )
