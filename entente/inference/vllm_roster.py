"""Which vLLM servers get work, and the policy versions that all of them serve.

A policy version is an adapter with a name of its own at every server. A server gets work only while a probe shows that it draws
under the mask, by the weights that the other servers have, and not by the base model's under an adapter's name. One that fails
gets no more work until it passes again, with all versions loaded. This module draws nothing but probes.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entente.decoding.model_files import eos_token_id, model_fingerprint
from entente.inference.server_arguments import START_S, start_limit_s
from entente.inference.settings import KEY_VARIABLE, InferenceSettings
from entente.inference.vllm_server import AnswerRejected, CallFailed, KeyRefused, NotThere, Server
from entente.inference.vllm_wire import FLOAT32, ROUNDED, SIDE_BY_SIDE, Answer, adapter_name, probe_request, same_weights
from entente.records.policy_version import BASE, PolicyVersion
from entente.telemetry.errors import DataError, EngineError, EngineLostError, EntenteError, InputError, VersionGoneError
from entente.telemetry.progress import reporter

FIRST_LOOK_S, GONE_AFTER_S = 0.25, 10.0
"""Seconds until the first look at a server that failed; seconds of refused connections at the start after which it is absent."""
CURES: dict[type[CallFailed], str] = {
    KeyRefused: f"set {KEY_VARIABLE} to its --api-key",
    NotThere: "start it with --enable-scale-out",
    AnswerRejected: "start it as `entente serve` does, with our processor and --logprobs-mode processed_logits",
}
"""What mends a server of which the first look shows that it cannot serve this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimes:
    """How long a client waits, seconds. Tests wait less."""

    request: float = 120.0
    """For the answer to a request."""
    look: float = 2.0
    """Between two looks at a server."""
    heartbeat: float = 10.0
    """For the answer to a look; after two without one the server gets no work until it recovers."""
    no_server: float = START_S
    """Without a living server until requests fail."""


class Roster:
    """The servers of one client; used on one event loop.

    `on_change` is called when a server may have room, `on_lost` with the error that ends all waiting.
    """

    def __init__(self, urls: Sequence[str], settings: InferenceSettings, model: Path, times: ClientTimes) -> None:
        self._settings, self._model, self._times = settings, model, times
        self._eos_id = eos_token_id(model)
        self.servers = [Server(url, settings.max_in_flight, self._eos_id) for url in urls]
        self._tolerance = FLOAT32 if settings.dtype == "float32" else ROUNDED
        self.newest, self.versions = BASE, {BASE.version: BASE}
        self.lost: EngineLostError | None = None
        """Why requests fail: no server came back, or the client was closed."""
        self.events = Counter[str]()
        self.readings: list[dict[str, float]] = []
        self.unread = 0
        """Metrics pages that were read, and that could not be, since the last step."""
        self.on_change: Callable[[], None] = lambda: None
        self.on_lost: Callable[[EngineLostError], None] = lambda error: None
        self._probes: dict[PolicyVersion, Answer] = {}
        self._not_zero: set[PolicyVersion] = set()
        """Versions that must not draw as the base model does."""
        self._reasons: dict[asyncio.Task[Any], Exception] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changing, self._any_living = asyncio.Lock(), asyncio.Event()
        self._last_living = 0.0

    @property
    def living(self) -> list[Server]:
        """Servers that get work, in the order of the settings."""
        return [server for server in self.servers if server.living]

    async def start(self, key: str | None) -> None:
        """Wait until the servers are ready. If at least one is, those that are not ready in time join later.

        Raises:
            InputError: none became ready, or one rejects the key, serves another model, or does not draw under our mask.
        """
        for server in self.servers:
            server.open(key)
        # The caller's limit is as long but has no explanation, so this one ends a little earlier.
        deadline = time.monotonic() + 0.95 * start_limit_s(self._settings)
        waits = [asyncio.create_task(self._await_first(server, deadline)) for server in self.servers]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
        if not self.living:
            reasons = "; ".join(f"vLLM server {server.url} is not ready: {server.reason}" for server in self.servers)
            raise InputError(f"{reasons}; is `entente serve` running there?")
        for server in self.servers:
            if not server.living:
                self.eject(server, server.reason)
        self._spawn(self._watch())

    async def close(self) -> None:
        """Fail what is in flight and close the connections. The servers keep running, and keep their adapters."""
        self._give_up(EngineLostError("the client of vLLM servers was closed"))
        tasks = [*self._tasks, *(call for server in self.servers for call in server.calls)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self.servers:
            await server.close()

    # -- versions -------------------------------------------------------------------------------------------------------

    async def publish(self, policy: PolicyVersion) -> None:
        """Serve `policy` at all servers, which must see its folder under the same path; see `Engine.publish`."""
        async with self._changing:
            if self.versions.get(policy.version) != policy:
                if policy != BASE:
                    from entente.inference.adapter_check import check_adapter

                    facts = await asyncio.to_thread(check_adapter, policy, self._model, self._settings.adapter_rank)
                    if not facts.is_zero:
                        self._not_zero.add(policy)
                    await self._load_everywhere(policy)
                replaced = self.versions.get(policy.version)
                self.versions[policy.version] = self.newest = policy
                if replaced is not None:
                    await self._drop([replaced])
            self.newest = policy

    async def retire(self, oldest: int, keep: Collection[int]) -> None:
        """Unload versions at all servers once nothing of this client is in flight under them; see `Engine.retire`."""
        async with self._changing:
            kept = {*keep, self.newest.version}
            gone = [policy for version, policy in self.versions.items() if version < oldest and version not in kept]
            for policy in gone:
                del self.versions[policy.version]
            await self._drop(gone)

    async def _load_everywhere(self, policy: PolicyVersion) -> None:
        """Load a version at every living server. One that refuses what another accepts gets no more work."""
        refusals: dict[Server, DataError] = {}
        while True:  # once more for servers that were admitted meanwhile
            await self._await_any()
            outdated = [each for each in self.living if each not in refusals and policy not in each.loaded.values()]
            if not outdated:
                break
            await asyncio.gather(*(self._load_or_eject(server, policy, refusals) for server in outdated))
        self.events["publish_refusals"] += len(refusals)
        if refusals and all(server in refusals for server in self.living):
            raise next(iter(refusals.values()))
        for server, refusal in refusals.items():
            self.eject(server, f"it refused an adapter that others accepted: {refusal}")

    async def _load_or_eject(self, server: Server, policy: PolicyVersion, refusals: dict[Server, DataError]) -> None:
        try:
            await self._load(server, policy)
        except DataError as error:
            refusals[server] = error
        except (CallFailed, EngineError) as error:
            self.eject(server, f"it could not load version {policy.version}: {error}")

    async def _load(self, server: Server, policy: PolicyVersion) -> None:
        """Load a version at a server, and make sure that the server draws by it.

        Raises:
            CallFailed: the server failed.
            DataError: the server refused it, or draws by other weights.
        """
        name, wait = adapter_name(policy, server.base), self._times.request
        probe = probe_request(self._eos_id, policy.version)
        before = await server.ask(probe, BASE, wait)
        try:
            fields = {"lora_name": name, "lora_path": str(policy.folder.absolute())}
            await server.post("/v1/load_lora_adapter", fields, wait)
        except (EngineError, CallFailed) as error:
            # Another client may have loaded it, or this one before its connection broke.
            if name not in [card["id"] for card in await server.models(self._times.heartbeat)]:
                raise DataError(
                    f"vLLM server {server.url} cannot serve adapter '{policy.folder}': {error}; it must see that folder, and run "
                    "with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                ) from error
        drawn, after = await asyncio.gather(server.ask(probe, policy, wait), server.ask(probe, BASE, wait))
        if policy in self._not_zero and same_weights(drawn, before, SIDE_BY_SIDE):
            raise DataError(
                f"vLLM server {server.url} draws by the same weights under the adapter's name '{name}' and the base model's: "
                "start it again"
            )
        if not same_weights(before, after, self._tolerance):
            # Kernels for CPUs take the slot of a request without an adapter, -1, for the last one. Those for GPUs do not.
            raise DataError(
                f"vLLM server {server.url} draws the base model by the adapter in its last slot, as vLLM 0.32 for CPUs does once "
                "all are in use: start it with one more of --max-loras"
            )
        self._check_agreement(server, policy, drawn)
        server.loaded[name] = policy

    def _check_agreement(self, server: Server, policy: PolicyVersion, drawn: Answer) -> None:
        """Raises DataError if the server's probe is not what the first server drew under this version."""
        if not same_weights(drawn, self._probes.setdefault(policy, drawn), self._tolerance):
            raise DataError(f"vLLM server {server.url} has other weights under {policy} than the server that was asked first")

    async def _drop(self, gone: Sequence[PolicyVersion]) -> None:
        """Fail requests in flight under these versions, then unload them."""
        calls = [(call, policy) for server in self.servers for call, policy in server.calls.items() if policy in gone]
        for call, policy in calls:
            self._cancel(call, VersionGoneError(f"{policy} was retired: ask for version {self.newest.version}"))
        await asyncio.gather(*(call for call, _ in calls), return_exceptions=True)
        self.on_change()
        for policy in gone:
            self._probes.pop(policy, None)
            self._not_zero.discard(policy)
        await asyncio.gather(*(self._unload(server, policy) for server in self.servers for policy in gone))

    async def _unload(self, server: Server, policy: PolicyVersion) -> None:
        name = adapter_name(policy, server.base)
        if server.loaded.pop(name, None) is None:
            return
        try:
            await server.post("/v1/unload_lora_adapter", {"lora_name": name}, self._times.request)
        except NotThere:
            pass  # another client of the same run was faster
        except (CallFailed, EngineError) as error:
            self.eject(server, f"it could not unload version {policy.version}: {error}")

    # -- servers that come and go ---------------------------------------------------------------------------------------

    def blame(self, server: Server, error: CallFailed) -> None:
        """Count a failed request, and give the server no more work if it is lost or failed too often."""
        self.events["timeouts"] += error.timed_out
        self.events["rejected_answers"] += isinstance(error, AnswerRejected)
        server.failures += 1
        if error.lost or server.failures >= 3:
            self.eject(server, str(error))

    def eject(self, server: Server, reason: str) -> None:
        """Give a server no more work until it is admitted again. What is in flight there is repeated elsewhere."""
        if server.ejected:
            return
        server.ejected, server.living, server.reason = True, False, reason
        self.events["ejections"] += 1
        left = len(self.living)
        reporter().say(f"vLLM server {server.url} gets no more work: {reason}; {left} of {len(self.servers)} left")
        if not left:
            self._any_living.clear()
            self._last_living = time.monotonic()
        for call in list(server.calls):
            self._cancel(call, CallFailed(reason))
        self._spawn(self._recover(server))

    def reason_for(self, call: asyncio.Task[Any]) -> Exception | None:
        """Why this module cancelled a call; asked once."""
        return self._reasons.pop(call, None)

    def _cancel(self, call: asyncio.Task[Any], reason: Exception) -> None:
        if not call.done():
            self._reasons[call] = reason
            call.cancel()

    async def _admit(self, server: Server) -> None:
        """Check a server, load all versions there, and give it work.

        Raises:
            CallFailed: it is not ready.
            InputError: it is no server for this run.
            DataError: it does not draw what it should.
        """
        server.forget()
        await server.call("GET", "/health", self._times.heartbeat)
        base, *_ = await server.models(self._times.heartbeat)
        server.base = base["id"]
        self._check_model(server, base)
        probe = await server.ask(probe_request(self._eos_id, BASE.version), BASE, self._times.request)
        if not probe.logprobs.any():
            raise AnswerRejected("every log-probability is 0")
        self._check_agreement(server, BASE, probe)
        while missing := [p for p in self.versions.values() if p != BASE and p not in server.loaded.values()]:
            await self._load(server, missing[0])
        await server.read(self._times.heartbeat)
        # There is no await from here on, so nothing was published meanwhile.
        server.living, server.ejected, server.missed, self.lost = True, False, 0, None
        self._any_living.set()
        self.on_change()

    def _check_model(self, server: Server, base: dict[str, Any]) -> None:
        length, root = base.get("max_model_len"), Path(str(base.get("root")))
        if not isinstance(length, int) or length < self._settings.max_model_length:
            raise InputError(
                f"vLLM server {server.url} takes {length} tokens but inference.max_model_length is "
                f"{self._settings.max_model_length}: start it with --max-model-len {self._settings.max_model_length}"
            )
        # A folder that is not on this machine cannot be compared; the trainer's check of the first rows notices another model.
        if (root / "config.json").is_file() and model_fingerprint(root) != model_fingerprint(self._model):
            raise InputError(f"vLLM server {server.url} serves '{root}', which is another model than '{self._model}'")

    async def _await_first(self, server: Server, deadline: float) -> None:
        refused_since = None
        while not server.living:
            now, lost = time.monotonic(), False
            try:
                await self._admit(server)
                break
            except CallFailed as error:
                if cure := CURES.get(type(error)):
                    raise InputError(f"vLLM server {server.url}: {error}; {cure}") from error
                server.reason, lost = str(error), error.lost
            except (DataError, EngineError) as error:
                raise InputError(str(error)) from error
            refused_since = (refused_since or now) if lost else None
            if now > deadline or (refused_since is not None and now - refused_since > GONE_AFTER_S):
                return
            await asyncio.sleep(2 * FIRST_LOOK_S)
        reporter().stage("vLLM servers ready", len(self.living), len(self.servers))

    async def _recover(self, server: Server) -> None:
        """Look at a server with growing delays until it is admitted again."""
        delay = FIRST_LOOK_S
        while not server.living:
            await asyncio.sleep(delay)
            delay = min(self._times.heartbeat, 2 * delay)
            try:
                await self._admit(server)
            except (CallFailed, EntenteError) as error:
                server.reason = str(error)
        self.events["readmissions"] += 1
        reporter().say(f"vLLM server {server.url} gets work again, under policy version {self.newest.version}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._times.look)
            await asyncio.gather(*(self._look(server) for server in self.living))
            if not self.living and time.monotonic() - self._last_living > self._times.no_server:
                reasons = "; ".join(f"{server.url}: {server.reason}" for server in self.servers)
                self._give_up(EngineLostError(f"no vLLM server came back within {self._times.no_server:g} s ({reasons})"))

    async def _look(self, server: Server) -> None:
        """Read a server's page. After two looks without an answer it gets no more work."""
        try:
            await server.call("GET", "/health", self._times.heartbeat)
            series = await server.read(self._times.heartbeat)
        except (CallFailed, EngineError) as error:
            self.unread += 1
            server.missed += 1
            if server.missed >= 2 or (isinstance(error, CallFailed) and error.lost):
                self.eject(server, str(error))
            return
        server.missed = 0
        self.readings.append(series)
        self.on_change()

    async def _await_any(self) -> None:
        """Wait for a living server; raises EngineLostError if none comes back."""
        if self.lost is None:
            await self._any_living.wait()
        if self.lost is not None:
            raise self.lost

    def _give_up(self, error: EngineLostError) -> None:
        self.lost = error
        self._any_living.set()
        self.on_lost(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A mistake here must not look like absent servers.
            self._give_up(EngineLostError(f"a background task of the vLLM client failed: {error!r}"))
