"""The client of vLLM servers: an `Engine` whose completions are drawn by stock vLLM with our processor, over HTTP.

Every request is answered once. A failed one is repeated at another server with the same seed, so with the same answer. No answer
becomes a generation unchecked (`vllm_wire.read_answer`). Requests wait here, not at the servers: older versions first, then in
the order of arrival. Requests of one position go to the same server, whose prefix cache has it, unless it is much busier than
others. The client runs on one event loop.
"""

import asyncio
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from entente.decoding.legal_table import END
from entente.decoding.model_files import read_config
from entente.inference.engine import EngineStats
from entente.inference.settings import InferenceSettings
from entente.inference.vllm_roster import ClientTimes, Roster
from entente.inference.vllm_server import PREEMPTED, RUNNING, STEPS, WAITING, CallFailed, Server
from entente.records.generation import Generation, GenerationRequest
from entente.records.policy_version import PolicyVersion
from entente.telemetry.errors import EngineError, EngineLostError, VersionGoneError

AFFINITY_MARGIN = 16
"""Requests that a position's preferred server may have in flight beyond the least loaded one. A smaller margin balances better; a
larger one keeps prefixes cached."""
ATTEMPTS = 4
"""Failed attempts after which a request fails."""
MAX_SKIPPED = 64
"""Requests that one dispatch may skip because no server that may answer them has room."""
EVENTS = ("retries", "ejections", "readmissions", "timeouts", "rejected_answers", "publish_refusals")


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for a server with room."""

    request: GenerationRequest
    policy: PolicyVersion
    failed_on: Collection[Server]
    place: asyncio.Future[Server] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class VllmClient:
    """The `Engine` contract over the vLLM servers at `urls`."""

    def __init__(
        self,
        urls: Sequence[str],
        settings: InferenceSettings,
        model: Path,
        key: str | None,
        *,
        times: ClientTimes | None = None,
        name: str = "vllm",
    ) -> None:
        """`model`: folder of the base model."""
        self.name = name
        self._settings, self._key, self._times = settings, key, times or ClientTimes()
        self._roster = Roster(urls, settings, model, self._times)
        self._roster.on_change, self._roster.on_lost = self._dispatch, self._fail_waiting
        config = read_config(model)
        self._vocabulary = int(config.get("text_config", config)["vocab_size"])
        self._waiting: list[tuple[int, int, _Waiting]] = []
        self._numbers = itertools.count()
        self._counts = Counter[str]()

    async def start(self) -> None:
        """Wait until the servers are ready; see `Roster.start`."""
        await self._roster.start(self._key)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Draw one completion at some server; see `Engine.generate`."""
        policy, length = self._find(request), len(request.prompt_ids) + request.table.longest
        if length > self._settings.max_model_length:
            raise EngineError(
                f"request '{request.request_id}' needs {length} tokens but max_model_length is "
                f"{self._settings.max_model_length}: raise inference.max_model_length"
            )
        # The server admits requests in a process that does not know the vocabulary.
        if request.table.largest_id >= self._vocabulary:
            raise EngineError(
                f"request '{request.request_id}' has ids outside the vocabulary of {self._vocabulary}: "
                "it was made for another model"
            )
        self._counts["requests"] += 1
        if request.table.is_sound and request.table.forced(request.table.start)[1] == END:  # there is nothing to draw
            tokens = np.array(request.table.forced(0)[0], np.int32)
            logprobs = np.zeros(len(tokens), np.float32)
            return self._counted(request, Generation(token_ids=tokens, logprobs=logprobs, policy=policy, worker=self.name))
        self._counts["running"] += 1
        try:
            return self._counted(request, await self._draw(request, time.monotonic()))
        finally:
            self._counts["running"] -= 1

    async def publish(self, policy: PolicyVersion) -> None:
        """Serve `policy` at all servers; see `Roster.publish`."""
        await self._roster.publish(policy)

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        """Unload old versions at all servers; see `Roster.retire`."""
        await self._roster.retire(oldest, keep)

    async def stats(self) -> EngineStats:
        """Counts of this client. Forward passes and preemptions are the servers', for whichever client they were."""
        with suppress(CallFailed, EngineError):  # then the last known
            await asyncio.gather(*(server.read(self._times.heartbeat) for server in self._roster.living))
        steps, preempted = (int(sum(each.counts[name] for each in self._roster.servers)) for name in (STEPS, PREEMPTED))
        version = self._roster.newest.version
        return EngineStats(policy_version=version, engine_steps=steps, preemptions=preempted, **self._counts)

    def events(self) -> dict[str, int]:
        """Counts of failures since the start, by event name."""
        return {name: self._roster.events[name] for name in EVENTS}

    def scraped(self) -> dict[str, float]:
        """Registered `workers/` figures of the pages read since the last call."""
        roster = self._roster
        readings, roster.readings, unread, roster.unread = roster.readings, [], roster.unread, 0
        figures = {"pages_read": float(len(readings)), "pages_unread": float(unread)}
        for name, series, fold in (
            ("running_mean", RUNNING, np.mean),
            ("waiting_mean", WAITING, np.mean),
            ("waiting_max", WAITING, max),
            ("kv_cache_share_max", "vllm:kv_cache_usage_perc", max),
        ):
            if values := [reading[series] for reading in readings if series in reading]:
                figures[name] = float(fold(values))
        return {f"workers/{name}": value for name, value in figures.items()}

    async def close(self) -> None:
        """Close the connections and fail what is in flight; see `Roster.close`."""
        await self._roster.close()

    # -- requests -------------------------------------------------------------------------------------------------------

    def _find(self, request: GenerationRequest) -> PolicyVersion:
        """The version that must draw the request now."""
        if self._roster.lost is not None:
            raise self._roster.lost
        newest = self._roster.newest
        found = newest if request.version is None else self._roster.versions.get(request.version)
        if found is None:
            raise VersionGoneError(
                f"version {request.version} of request '{request.request_id}' is not published: ask for {newest.version}"
            )
        return found

    async def _draw(self, request: GenerationRequest, arrived: float) -> Generation:
        failed_on, failures, reason = set[Server](), 0, ""
        while failures < ATTEMPTS:
            server = await self._await_place(_Waiting(request, self._find(request), failed_on))
            try:
                return await self._call(server, request, arrived)
            except VersionGoneError:
                if request.version is not None:
                    raise
            except CallFailed as error:
                failures, reason = failures + 1, f"{server.url}: {error}"
                failed_on.add(server)
                self._roster.events["retries"] += failures < ATTEMPTS
                self._roster.blame(server, error)
        raise EngineLostError(f"request '{request.request_id}' failed {failures} times; the last, {reason}")

    async def _call(self, server: Server, request: GenerationRequest, arrived: float) -> Generation:
        """Send a request to a server that has a place for it, and give the place back."""
        call = None
        try:
            policy, sent = self._find(request), time.monotonic()
            call = asyncio.ensure_future(server.ask(request, policy, self._times.request))
            server.calls[call] = policy
            await asyncio.wait({call})
            reason = self._roster.reason_for(call)
            if call.cancelled():
                raise reason or self._roster.lost or EngineLostError(f"engine '{self.name}' ends")
            answer = call.result()
        finally:
            if call is not None:
                call.cancel()
                del server.calls[call]
            self._free(server)
        server.failures = 0
        waited, took = 1e3 * (sent - arrived), 1e3 * (time.monotonic() - sent)
        return Generation(
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            policy=policy,
            worker=server.name,
            queue_ms=waited,
            decode_ms=took,
            cached_tokens=answer.cached_tokens,
        )

    def _counted(self, request: GenerationRequest, generation: Generation) -> Generation:
        tokens, forced = len(generation.token_ids), int(np.count_nonzero(generation.logprobs == 0))
        self._counts.update(
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=generation.cached_tokens,
            completion_tokens=tokens,
            forced_tokens=forced,
            drawn_tokens=tokens - forced,
        )
        return generation

    # -- which server ---------------------------------------------------------------------------------------------------

    async def _await_place(self, waiting: _Waiting) -> Server:
        heapq.heappush(self._waiting, (waiting.policy.version, next(self._numbers), waiting))
        self._dispatch()
        try:
            return await waiting.place
        except asyncio.CancelledError:
            if waiting.place.done() and not waiting.place.cancelled() and waiting.place.exception() is None:
                self._free(waiting.place.result())
            raise

    def _free(self, server: Server) -> None:
        server.in_flight -= 1
        self._dispatch()

    def _dispatch(self) -> None:
        """Give places to waiting requests in order while servers have room."""
        passed = []
        while self._waiting and len(passed) < MAX_SKIPPED and any(server.has_room for server in self._roster.servers):
            entry = heapq.heappop(self._waiting)
            waiting = entry[2]
            if waiting.place.done():
                continue
            server = self._choose(waiting)
            if server is None:
                passed.append(entry)
            else:
                server.in_flight += 1
                waiting.place.set_result(server)
        for entry in passed:
            heapq.heappush(self._waiting, entry)

    def _choose(self, waiting: _Waiting) -> Server | None:
        """The server that the position prefers among those within AFFINITY_MARGIN of the least loaded; None: no room."""
        request, long = waiting.request, self._settings.long_prompt_tokens
        able = self._roster.living
        if long and len(self._roster.servers) > 1:
            is_long, last = len(request.prompt_ids) >= long, self._roster.servers[-1]
            able = [server for server in able if (server is last) == is_long] or able
        able = [server for server in able if server not in waiting.failed_on] or able
        able = [server for server in able if server.has_room]
        bound = min((server.in_flight for server in able), default=0) + AFFINITY_MARGIN
        near = [server for server in able if server.in_flight <= bound]
        return max(near, key=lambda server: server.rank(request.snapshot_id), default=None)

    def _fail_waiting(self, error: EngineLostError) -> None:
        for _, _, waiting in self._waiting:
            if not waiting.place.done():
                waiting.place.set_exception(error)
        self._waiting.clear()
