"""The client of vLLM servers: an `Engine` over HTTP to stock vLLM with our processor.

Every request is answered once; a failed one is repeated at another server with the same seed, so with the same answer. Each
answer is checked (`vllm_wire.read_answer`). Requests of one position go to the same server, whose prefix cache has it, unless it
is much busier than others. A server gets requests only while it passes `Server.check` and has all versions.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from entente.decoding.legal_table import END
from entente.decoding.model_files import read_config
from entente.inference.engine import Engine, EngineStats, check_request
from entente.inference.server_arguments import start_limit_s
from entente.inference.settings import InferenceSettings
from entente.inference.vllm_server import PREEMPTED, SAMPLED, STEPS, Call, CallFailed, ClientTimes, Server
from entente.records.policy_version import BASE, PolicyVersion
from entente.records.rows import Generation, GenerationRequest
from entente.telemetry.errors import DataError, EngineError, EngineLostError, EntenteError, InputError, VersionGoneError
from entente.telemetry.progress import reporter

AFFINITY_MARGIN = 16
"""Requests in flight by which a preferred server may exceed the least loaded: smaller balances, larger keeps prefixes cached."""
ATTEMPTS = 4
EVENTS = ("retries", "ejections", "readmissions", "timeouts", "rejected_answers", "publish_refusals")
FIRST_LOOK_S, GONE_AFTER_S = 0.25, 10.0
"""Seconds until the first check of a failed server; seconds of refused connections after which a starting server is absent."""


class VllmClient(Engine):
    name = "vllm"

    def __init__(
        self,
        urls: Sequence[str],
        settings: InferenceSettings,
        model: Path,
        key: str | None,
        *,
        times: ClientTimes | None = None,
    ) -> None:
        self._settings, self._model, self._key, self._times = settings, model, key, times or ClientTimes()
        self._probes: dict[PolicyVersion, Generation] = {}
        self._servers = [Server(url, model, settings, self._times, self._probes) for url in urls]
        config = read_config(model)
        self._vocabulary = int(config.get("text_config", config)["vocab_size"])
        self._newest, self._versions = BASE, {BASE.version: BASE}
        self._zero: set[PolicyVersion] = set()
        """Versions that sample as the base model does."""
        self._counts, self._events = Counter[str](), Counter[str]()
        self._lost: EngineLostError | None = None
        self._any_living, self._changing = asyncio.Event(), asyncio.Lock()
        self._last_living = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Wait until a server is ready; others may join later. Raises InputError if none is ready or one fails its check."""
        for server in self._servers:
            server.open(self._key)
        waits = [asyncio.create_task(self._await_first(server)) for server in self._servers]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
        if self._lost is not None:
            raise self._lost
        if not self._living:
            reasons = "; ".join(f"vLLM server {server.url} is not ready: {server.reason}" for server in self._servers)
            raise InputError(f"{reasons}; is `entente serve` running there?")
        for server in self._servers:
            if not server.living:
                self._say_ejected(server)
            self._tasks.append(asyncio.create_task(self._attend(server)))

    async def generate(self, request: GenerationRequest) -> Generation:
        policy = self._find(request)
        # The server admits requests in a process that does not know the vocabulary.
        check_request(request, self._settings.max_model_length, self._vocabulary)
        self._counts["requests"] += 1
        forced, state = request.table.forced(request.table.start)
        if state == END:  # nothing to sample
            tokens, logprobs = np.array(forced, np.int32), np.zeros(len(forced), np.float32)
            generation = Generation(token_ids=tokens, logprobs=logprobs, policy=policy, worker=self.name)
            self._count(request, generation)
            return generation
        self._counts["running"] += 1
        try:
            generation = await self._sample(request)
            self._count(request, generation)
            return generation
        finally:
            self._counts["running"] -= 1

    async def publish(self, policy: PolicyVersion) -> None:
        """Serve `policy` at all servers, which must see its folder under the same path."""
        async with self._changing:
            if self._versions.get(policy.version) != policy:
                if policy != BASE:
                    from entente.inference.adapter_check import check_adapter

                    facts = await asyncio.to_thread(check_adapter, policy, self._model, self._settings.adapter_rank)
                    if facts.is_zero:
                        self._zero.add(policy)
                    await self._load_everywhere(policy)
                replaced = self._versions.get(policy.version)
                self._versions[policy.version] = self._newest = policy
                if replaced is not None:
                    await self._drop([replaced])
            self._newest = policy

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        """Unload versions at all servers once this client has no request in flight under them."""
        async with self._changing:
            kept = {*keep, self._newest.version}
            gone = [policy for version, policy in self._versions.items() if version < oldest and version not in kept]
            for policy in gone:
                del self._versions[policy.version]
            await self._drop(gone)

    async def stats(self) -> EngineStats:
        """Counts of this client; forward passes, tokens sampled in them, and preemptions are the servers', for all clients."""
        with suppress(CallFailed, EngineError):  # keep the last known counts
            await asyncio.gather(*(server.count() for server in self._living))
        steps, sampled, preempted = (
            int(sum(each.counts[name] for each in self._servers)) for name in (STEPS, SAMPLED, PREEMPTED)
        )
        return EngineStats(
            policy_version=self._newest.version,
            engine_steps=steps,
            sampled_tokens=sampled,
            preemptions=preempted,
            **self._counts,
        )

    def events(self) -> dict[str, int]:
        return {name: self._events[name] for name in EVENTS}

    async def close(self) -> None:
        """Fail the requests in flight and close the connections. The servers and their adapters stay."""
        self.give_up(EngineLostError(f"engine '{self.name}' was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(
            *self._tasks, *(call.task for server in self._servers for call in server.calls), return_exceptions=True
        )
        for server in self._servers:
            await server.close()

    # -- requests -------------------------------------------------------------------------------------------------------

    @property
    def _living(self) -> list[Server]:
        """Servers that get requests, in the order of the settings."""
        return [server for server in self._servers if server.living]

    def _find(self, request: GenerationRequest) -> PolicyVersion:
        if self._lost is not None:
            raise self._lost
        policy = self._newest if request.version is None else self._versions.get(request.version)
        if policy is None:
            raise VersionGoneError(
                f"version {request.version} of request '{request.request_id}' is not published: ask for {self._newest.version}"
            )
        return policy

    async def _sample(self, request: GenerationRequest) -> Generation:
        failed_on: list[Server] = []
        while True:
            server = self._choose(await self._await_living(), failed_on, request.snapshot_id)
            try:
                generation = await self._ask(server, request)
            except CallFailed as error:
                failed_on.append(server)
                self._blame(server, error)
                if len(failed_on) == ATTEMPTS:
                    reason = f"request '{request.request_id}' failed {ATTEMPTS} times; the last, {server.url}: {error}"
                    raise EngineLostError(reason) from error
                self._events["retries"] += 1
            else:
                server.failures = 0
                return generation

    @staticmethod
    def _choose(living: list[Server], failed_on: Sequence[Server], position: str) -> Server:
        """The position's preferred server among those within AFFINITY_MARGIN of the least loaded."""
        able = [server for server in living if server not in failed_on] or living
        bound = min(len(server.calls) for server in able) + AFFINITY_MARGIN
        return max((server for server in able if len(server.calls) <= bound), key=lambda server: server.rank(position))

    async def _ask(self, server: Server, request: GenerationRequest) -> Generation:
        policy = self._find(request)
        call = Call(asyncio.ensure_future(server.ask(request, policy)), policy)
        server.calls.add(call)
        try:
            await asyncio.wait({call.task})
        finally:
            call.task.cancel()
            server.calls.discard(call)
        if call.reason is not None:
            raise call.reason
        return call.task.result()

    def _count(self, request: GenerationRequest, generation: Generation) -> None:
        _, offsets = request.table.legal_sets(generation.token_ids.tolist())
        self._counts.update(
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=generation.cached_tokens,
            completion_tokens=len(generation.token_ids),
            forced_tokens=int(np.count_nonzero(np.diff(offsets) == 1)),
        )

    # -- versions -------------------------------------------------------------------------------------------------------

    async def _load_everywhere(self, policy: PolicyVersion) -> None:
        """Load a version at every living server; ejects one that refuses what another accepts."""
        refusals: dict[Server, DataError] = {}
        while outdated := [each for each in await self._await_living() if policy not in each.loaded and each not in refusals]:
            await asyncio.gather(*(self._load_or_eject(server, policy, refusals) for server in outdated))
        self._events["publish_refusals"] += len(refusals)
        if refusals and all(server in refusals for server in self._living):
            raise next(iter(refusals.values()))
        for server, refusal in refusals.items():
            self._eject(server, f"it refused an adapter that others accepted: {refusal}")

    async def _load_or_eject(self, server: Server, policy: PolicyVersion, refusals: dict[Server, DataError]) -> None:
        try:
            await server.load(policy, is_zero=policy in self._zero)
        except DataError as error:
            refusals[server] = error
        except (CallFailed, EngineError) as error:
            self._eject(server, f"it could not load version {policy.version}: {error}")

    async def _drop(self, gone: Sequence[PolicyVersion]) -> None:
        calls = [call for server in self._servers for call in server.calls if call.policy in gone]
        for call in calls:
            call.end(VersionGoneError(f"{call.policy} was retired: ask for version {self._newest.version}"))
        await asyncio.gather(*(call.task for call in calls), return_exceptions=True)
        for policy in gone:
            self._probes.pop(policy, None)
            self._zero.discard(policy)
        await asyncio.gather(*(self._unload_or_eject(server, policy) for server in self._servers for policy in gone))

    async def _unload_or_eject(self, server: Server, policy: PolicyVersion) -> None:
        try:
            await server.unload(policy)
        except (CallFailed, EngineError) as error:
            self._eject(server, f"it could not unload version {policy.version}: {error}")

    # -- servers that come and go ---------------------------------------------------------------------------------------

    async def _admit(self, server: Server) -> None:
        await server.check()
        while missing := [each for each in self._versions.values() if each != BASE and each not in server.loaded]:
            await server.load(missing[0], is_zero=missing[0] in self._zero)
        # There was no await since the last look at the versions, so nothing was published meanwhile.
        server.living, self._lost = True, None
        self._any_living.set()

    async def _await_first(self, server: Server) -> None:
        began = time.monotonic()
        while self._lost is None:
            try:
                await self._admit(server)
                reporter().stage("vLLM servers ready", len(self._living), len(self._servers))
                return
            except CallFailed as error:
                if error.cure:
                    raise InputError(f"vLLM server {server.url}: {error}; {error.cure}") from error
                server.reason = str(error)
                # The caller's limit is as long but has no explanation, so this one ends a little earlier.
                limit = GONE_AFTER_S if error.lost else 0.95 * start_limit_s(self._settings)
            except (DataError, EngineError) as error:
                raise InputError(str(error)) from error
            if time.monotonic() - began > limit:
                return
            await asyncio.sleep(2 * FIRST_LOOK_S)

    async def _attend(self, server: Server) -> None:
        """Check a server until the client is closed; readmit an ejected one, with growing delays."""
        delay = FIRST_LOOK_S
        while True:
            await asyncio.sleep(self._times.look if server.living else delay)
            try:
                if server.living:
                    await server.look()
                    delay = FIRST_LOOK_S
                else:
                    delay = min(self._times.heartbeat, 2 * delay)
                    await self._admit(server)
                    self._events["readmissions"] += 1
                    reporter().say(f"vLLM server {server.url} is readmitted with policy version {self._newest.version}")
            except (CallFailed, EntenteError) as error:
                if server.living:
                    self._eject(server, str(error))
                server.reason = str(error)
            except Exception as error:
                # A mistake here must not look like absent servers.
                self.give_up(EngineLostError(f"a background task of the vLLM client failed: {error!r}"))
                raise
            if not self._living and time.monotonic() - self._last_living > self._times.no_server:
                reasons = "; ".join(f"{server.url}: {server.reason}" for server in self._servers)
                self.give_up(EngineLostError(f"no vLLM server came back within {self._times.no_server:g} s ({reasons})"))

    def _blame(self, server: Server, error: CallFailed) -> None:
        self._events[error.event] += 1
        server.failures += 1
        if error.lost or server.failures >= 3:
            self._eject(server, str(error))

    def _eject(self, server: Server, reason: str) -> None:
        if server.living:
            server.living, server.reason = False, reason
            self._say_ejected(server)
            for call in server.calls:
                call.end(CallFailed(reason))

    def _say_ejected(self, server: Server) -> None:
        self._events["ejections"] += 1
        left = len(self._living)
        reporter().say(f"vLLM server {server.url} gets no more work: {server.reason}; {left} of {len(self._servers)} left")
        if not left:
            self._any_living.clear()
            self._last_living = time.monotonic()

    async def _await_living(self) -> list[Server]:
        while self._lost is None and not self._living:
            await self._any_living.wait()
        if self._lost is not None:
            raise self._lost
        return self._living

    def give_up(self, error: EngineLostError) -> None:
        self._lost = self._lost or error
        self._any_living.set()
        for call in [call for server in self._servers for call in server.calls]:
            call.end(error)
