"""Tracks which workers of a pool are living and what they serve: ejects, probes and readmits workers, and publishes versions.

A living worker serves the newest version published in this pool. An ejected or restarted worker gets the versions published
again before it is living. Each event is counted and reported. This module does not handle requests.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import aiohttp

from inference.settings import KEY_VARIABLE, InferenceSettings
from inference.start_engine import start_limit_s
from records.policy_version import BASE, PolicyVersion
from telemetry.errors import DataError, EngineError, EngineLostError, InputError
from telemetry.progress import reporter
from workers.pool_versions import PublishedVersions
from workers.pool_worker import CallFailed, KeyRefused, PoolTimes, PoolWorker, newest_of, serves

FIRST_PROBE_S = 0.25
READY_POLL_S = 0.5
GONE_AFTER_S = 10.0
"""Seconds of refused connections at the start after which a worker counts as absent."""


class Roster:
    """The workers of one pool; used on one event loop.

    `on_change` is called when a worker may have room, `on_ejected` with an ejected worker and whether its requests may be the
    cause, `on_given_up` with the error that ends all waiting.
    """

    def __init__(self, settings: InferenceSettings, key: str | None, model_fingerprint: str, times: PoolTimes) -> None:
        self.workers = [PoolWorker(url, settings, times) for url in settings.urls]
        self.events: Counter[str] = Counter()
        self.given_up: EngineLostError | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.on_ejected: Callable[[PoolWorker, bool], None] = lambda worker, blamed: None
        self.on_given_up: Callable[[EngineLostError], None] = lambda error: None
        self._settings, self._key, self._fingerprint, self._times = settings, key, model_fingerprint, times
        self._session: aiohttp.ClientSession | None = None
        self.versions = PublishedVersions()
        self._publishing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changes: dict[PoolWorker, set[asyncio.Task[None]]] = {worker: set() for worker in self.workers}
        self._give_up_timer: asyncio.TimerHandle | None = None
        self._empty_since = 0.0
        self._any_living = asyncio.Event()

    @property
    def session(self) -> aiohttp.ClientSession:
        """Connections to all workers."""
        if self._session is None:
            raise EngineError("the pool of workers is not started")
        return self._session

    @property
    def living(self) -> list[PoolWorker]:
        """Workers that may get work, in the order of the settings."""
        return [worker for worker in self.workers if worker.state == "living"]

    async def start(self) -> None:
        """Wait until the workers are ready. If at least one is, workers that are not ready in time join later.

        Raises:
            InputError: no worker became ready, or one rejects the key or serves another model.
        """
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = aiohttp.ClientTimeout(total=self._times.request)
        # The pool itself bounds requests in flight. Idle connections close here before a worker would close them.
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=15)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
        # The caller's timeout for this start is as long but has no explanation, so this one ends a little earlier.
        deadline = asyncio.get_running_loop().time() + 0.95 * start_limit_s(self._settings)
        waits = [asyncio.create_task(self._await_ready(worker, deadline)) for worker in self.workers]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
        if not self.living:
            reasons = "; ".join(f"worker {worker.url} is not ready: {worker.reason}" for worker in self.workers)
            raise InputError(f"{reasons}; is `entente serve` running there?")
        if len(self.living) < len(self.workers):  # the progress display ends the stage
            reporter().stage("workers ready", len(self.living), len(self.living))
        for worker in self.workers:
            if worker.state != "living":
                self.eject(worker, worker.reason)
        self._spawn(self._watch())

    async def close(self) -> None:
        """Stop probing and close the connections. The workers keep running."""
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def eject(self, worker: PoolWorker, reason: str, *, blamed: bool = False, reassign: bool = True) -> None:
        """Give `worker` no more work until a probe succeeds.

        Args:
            blamed: its requests may be the cause.
            reassign: send its requests to other workers; if False it may still answer them, as a worker that drains does.
        """
        if worker.state == "ejected":
            return
        worker.state, worker.reason = "ejected", reason
        worker.served.clear()
        worker.recent_ejections += 1
        self.events["ejections"] += 1
        left = len(self.living)
        reporter().say(f"worker {worker.url} gets no more work: {reason}; {left} of {len(self.workers)} workers left")
        if not left:
            self._any_living.clear()
            loop, patience = asyncio.get_running_loop(), self._times.no_worker
            self._empty_since = loop.time()
            self._give_up_timer = loop.call_later(patience, self._give_up)
        for change in self._changes[worker]:
            change.cancel()
        if reassign:
            self.on_ejected(worker, blamed)
        self._spawn(self._recover(worker))

    async def publish(self, policy: PolicyVersion) -> None:
        """Serve `policy` on every living worker, and on others when they are readmitted; see `Engine.publish`.

        A worker that fails is ejected, and so is one that refuses an adapter that another worker accepted.
        """
        async with self._publishing:
            await self._wait_for_any_worker()
            refusals: dict[PoolWorker, DataError] = {}
            # Repeated for workers that were readmitted meanwhile.
            while outdated := [worker for worker in self.living if worker not in refusals and worker.newest != policy]:
                await asyncio.gather(*(self._publish_on(worker, policy, refusals) for worker in outdated))
            self.events["publish_refusals"] += len(refusals)
            if refusals and not any(worker not in refusals for worker in self.living):
                raise next(iter(refusals.values()))
            self.versions.add(policy)
            for worker, refusal in refusals.items():
                self.eject(worker, f"it refused an adapter that others accepted: {refusal}")
            await self._wait_for_any_worker()

    async def retire(self, oldest: int, keep: Collection[int]) -> None:
        """Retire versions on every living worker; see `Engine.retire`."""
        self.versions.retire(oldest, keep)
        await asyncio.gather(*(self._retire_on(worker, oldest, keep) for worker in self.living))

    async def _publish_on(self, worker: PoolWorker, policy: PolicyVersion, refusals: dict[PoolWorker, DataError]) -> None:
        try:
            await self._while_living(worker, worker.publish(self.session, policy))
        except DataError as error:
            refusals[worker] = error
        except CallFailed as error:
            self.eject(worker, f"it could not publish version {policy.version}: {error}")
        self.on_change()

    async def _retire_on(self, worker: PoolWorker, oldest: int, keep: Collection[int]) -> None:
        try:
            await self._while_living(worker, worker.retire(self.session, oldest, keep))
        except (CallFailed, EngineError) as error:
            self.eject(worker, f"it could not retire versions before {oldest}: {error}")

    async def _while_living(self, worker: PoolWorker, change: Coroutine[Any, Any, None]) -> None:
        """Await a change of the versions of `worker`; raises CallFailed as soon as the worker is ejected."""
        task = asyncio.get_running_loop().create_task(change)
        self._changes[worker].add(task)
        try:
            await task
        except asyncio.CancelledError:
            if worker.state == "ejected":
                raise CallFailed(worker.reason) from None
            raise
        finally:
            self._changes[worker].discard(task)

    async def _await_ready(self, worker: PoolWorker, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        refused_since = None
        while True:
            refused = False
            try:
                health = await worker.health(self.session, self._times.heartbeat)
            except KeyRefused as error:
                raise InputError(
                    f"worker {worker.url}: {error}; set {KEY_VARIABLE} to the key that it was started with"
                ) from error
            except CallFailed as error:
                worker.reason, refused = str(error), error.lost
            except EngineError as error:
                raise InputError(str(error)) from error
            else:
                self._check_model(worker, health)
                worker.reason = "it is still warming up"
                if health.get("ready"):
                    worker.state = "living"
                    self._any_living.set()
                    reporter().stage("workers ready", len(self.living), len(self.workers))
                    return
            now = loop.time()
            refused_since = (refused_since or now) if refused else None
            if now > deadline or (refused_since is not None and now - refused_since > GONE_AFTER_S):
                return
            await asyncio.sleep(READY_POLL_S)

    def _check_model(self, worker: PoolWorker, health: dict[str, Any]) -> None:
        if health.get("model") != self._fingerprint:
            raise InputError(f"worker {worker.url} serves another model than this run's: start it with the same --model")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._times.heartbeat)
            await asyncio.gather(*(self._probe(worker) for worker in self.living))

    async def _probe(self, worker: PoolWorker) -> None:
        changes, newest = worker.changes, worker.newest
        try:
            health = await worker.health(self.session, self._times.heartbeat)
        except (CallFailed, EngineError) as error:
            worker.missed_probes += 1
            lost = isinstance(error, CallFailed) and error.lost
            if lost or worker.missed_probes >= 2:
                self.eject(worker, str(error), blamed=True, reassign=not lost)
            return
        worker.missed_probes = 0
        if not health.get("ready"):
            self.eject(worker, "its engine is not ready", blamed=True)
        elif worker.changes == changes and not worker.changing and not serves(health, newest):
            self.eject(worker, f"it serves version {health.get('policy_version')}, not {newest.version}: it was restarted")

    async def _recover(self, worker: PoolWorker) -> None:
        """Probe an ejected worker with growing delays; once it is ready, publish on it and make it living again."""
        longest = self._times.heartbeat
        delay = min(longest, FIRST_PROBE_S * 2 ** min(worker.recent_ejections - 1, 10))
        while True:
            await asyncio.sleep(delay)
            delay = min(longest, 2 * delay)
            try:
                health = await worker.health(self.session, self._times.heartbeat)
                self._check_model(worker, health)
                worker.warming = not health.get("ready") and bool(health.get("alive"))
                if not health.get("ready"):
                    worker.reason = "its engine is not ready"
                    continue
                await self._publish_again(worker, health)
            except (CallFailed, EngineError, DataError, InputError) as error:
                worker.reason, worker.warming = str(error), False
                worker.served.clear()
                continue
            break
        # There is no await from here on, so the published version is still the newest.
        worker.state, worker.failures, worker.missed_probes = "living", 0, 0
        worker.flow.restart()
        self.events["readmissions"] += 1
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
        self._give_up_timer = self.given_up = None
        self._any_living.set()
        reporter().say(f"worker {worker.url} gets work again, under policy version {worker.newest.version}")
        self.on_change()

    async def _publish_again(self, worker: PoolWorker, health: dict[str, Any]) -> None:
        if self.versions.newest == BASE and newest_of(health) != BASE:
            await worker.publish(self.session, BASE)
        while worker.newest != self.versions.newest:
            newest = self.versions.newest
            for policy in self.versions.last():
                if policy.version not in self.versions:  # retired meanwhile
                    continue
                try:
                    await worker.publish(self.session, policy)
                except DataError:
                    if policy == newest:
                        raise
                    self.events["publish_refusals"] += 1  # an old one, whose folder may be gone

    def _give_up(self) -> None:
        loop = asyncio.get_running_loop()
        waited = loop.time() - self._empty_since
        if waited < start_limit_s(self._settings) and any(worker.warming for worker in self.workers):
            self._give_up_timer = loop.call_later(READY_POLL_S, self._give_up)
            return
        reasons = "; ".join(f"{worker.url}: {worker.reason}" for worker in self.workers)
        self.given_up = EngineLostError(
            f"no worker came back within {round(waited, int(waited < 1)):g} s ({reasons}): restart one with `entente serve`"
        )
        self._any_living.set()
        self.on_given_up(self.given_up)

    async def _wait_for_any_worker(self) -> None:
        if not self.living and self.given_up is None:
            await self._any_living.wait()
        if self.given_up is not None:
            raise self.given_up

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug here must not look like absent workers.
            self.given_up = EngineLostError(f"a background task of the pool failed: {error!r}")
            self._any_living.set()
            self.on_given_up(self.given_up)
