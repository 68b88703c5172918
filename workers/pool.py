"""The client of a pool of workers: an `Engine` whose completions are drawn by remote workers.

Every request is answered once. A failed request is retried on another worker with the same seed and id. Each answer is checked:
version, adapter, table and log-probabilities. Requests wait here, not at the workers: older versions first, then in the order of
arrival. Requests of one position go to the same worker, whose prefix cache has it, unless that worker is much busier than others.
The pool runs on one event loop.
"""

import asyncio
import heapq
import itertools
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inference.engine import EngineStats
from inference.settings import InferenceSettings
from records.generation import Generation, GenerationRequest
from records.policy_version import BASE, BASE_VERSION, PolicyVersion
from telemetry.errors import DataError, EngineError, EngineLostError, EntenteError, VersionGoneError
from workers.pool_roster import Roster
from workers.pool_worker import CallFailed, PoolTimes, PoolWorker, VersionMoved
from workers.wire import MAX_BODY, check_answer, pack_request
from workers.worker_scrape import WorkerScrape

AFFINITY_MARGIN = 16
"""Requests that a position's preferred worker may have in flight beyond the least loaded worker. A smaller margin balances
better; a larger one keeps prefixes cached."""
REQUEST_ATTEMPTS = 4
"""Failed attempts after which a request fails."""
MAX_FAILURES = 3
"""Consecutive failures after which a worker is ejected; a worker that refuses connections is ejected at once."""
MAX_MOVES = 32
"""Times that one request may be sent again because its worker serves another version."""
MAX_SKIPPED = 64
"""Requests that one dispatch may skip because no worker that may answer them has room."""


USUAL_TIMES = PoolTimes()


@dataclass(slots=True, eq=False)
class _Job:
    """A request that waits for an answer."""

    request: GenerationRequest
    name: str
    """Id sent to workers: unique to this request, the same in all retries."""
    place: tuple[int, int]
    """Sort key: version, then number of arrival."""
    is_long: bool
    arrived: float
    answer: asyncio.Future[Generation]
    attempts: int = 0
    moves: int = 0
    failed_on: set[PoolWorker] = field(default_factory=set)
    call: asyncio.Task[None] | None = None
    worker: PoolWorker | None = None

    def __lt__(self, other: "_Job") -> bool:
        return self.place < other.place

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class RemoteEngine:
    """The `Engine` contract over HTTP, with the workers of `settings.urls`."""

    def __init__(
        self,
        settings: InferenceSettings,
        key: str | None,
        model_fingerprint: str,
        *,
        scraped_into: Path | None = None,
        times: PoolTimes = USUAL_TIMES,
    ) -> None:
        """`scraped_into`: file for readings of the workers' Prometheus pages."""
        self.name = "remote"
        self._settings, self._times = settings, times
        self._roster = Roster(settings, key, model_fingerprint, times)
        self._roster.on_change = self._dispatch
        self._roster.on_ejected = self._reassign
        self._roster.on_given_up = self._fail_waiting
        self._waiting: dict[bool, list[_Job]] = {False: [], True: []}
        self._sent: dict[PoolWorker, set[_Job]] = {worker: set() for worker in self._roster.workers}
        self._arrivals = itertools.count()
        self._nonce = uuid.uuid4().hex[:8]
        self._scrape = WorkerScrape(times.scrape, scraped_into)
        self._scraping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait until the workers are ready, accept the key and serve this run's model; see `Roster.start`."""
        await self._roster.start()
        if self._times.scrape:
            self._scraping = asyncio.create_task(self._scrape.run(lambda: self._by_url, self._page, self._log))

    async def generate(self, request: GenerationRequest) -> Generation:
        """Draw one completion on some worker; see `Engine.generate`."""
        if self._roster.given_up is not None:
            raise self._roster.given_up
        if request.version is not None and self._roster.versions.is_gone(request.version):
            raise VersionGoneError(f"version {request.version} of request '{request.request_id}' is not published in this pool")
        number, loop = next(self._arrivals), asyncio.get_running_loop()
        threshold = self._settings.long_prompt_tokens
        job = _Job(
            request=request,
            name=f"{self._nonce}.{number}/{request.request_id}"[:200],
            place=(self._roster.versions.newest.version if request.version is None else request.version, number),
            is_long=bool(threshold) and len(request.prompt_ids) >= threshold,
            arrived=loop.time(),
            answer=loop.create_future(),
        )
        heapq.heappush(self._waiting[job.is_long], job)
        self._dispatch()
        try:
            return await job.answer
        finally:
            if job.call is not None:  # the caller was cancelled: closing the connection cancels the request at the worker
                job.call.cancel()

    async def publish(self, policy: PolicyVersion) -> None:
        """Serve `policy` on all workers; its folder must lie under each worker's adapter root."""
        await self._roster.publish(replace(policy, adapter=policy.adapter and policy.adapter.resolve()))

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        """Retire versions on all workers; see `Engine.retire`."""
        await self._roster.retire(max(oldest, BASE_VERSION), keep)

    async def stats(self) -> EngineStats:
        """Sums over the workers, including counts from before a worker's restart. `running` counts this pool's own requests,
        waiting ones included."""
        roster = self._roster
        each = await asyncio.gather(*(worker.counts(roster.session, self._times.heartbeat) for worker in roster.workers))
        sums = {name: sum(counts[name] for counts in each) for name in each[0]}
        unanswered = sum(map(len, self._sent.values())) + sum(not job.answer.done() for job in self._all_waiting())
        return EngineStats(policy_version=roster.versions.newest.version, running=unanswered, **sums)

    def events(self) -> dict[str, int]:
        """Counts since the start: retries, ejections, readmissions, timeouts, rejected_answers, moved_versions and
        publish_refusals."""
        names = ("retries", "ejections", "readmissions", "timeouts", "rejected_answers", "moved_versions", "publish_refusals")
        return {name: self._roster.events[name] for name in names}

    def scraped(self) -> dict[str, float]:
        """Registered `workers/` figures of the pages read since the last call; {} if pages are not read."""
        return self._scrape.take() if self._scraping is not None else {}

    async def close(self) -> None:
        """Close the connections and fail waiting requests. The workers keep running."""
        if self._scraping is not None:
            self._scraping.cancel()
            await asyncio.gather(self._scraping, return_exceptions=True)
        calls = [job.call for jobs in self._sent.values() for job in jobs if job.call is not None]
        self._fail_waiting(EngineLostError("the pool was closed"))
        for jobs in self._sent.values():
            for job in jobs:
                job.fail(EngineLostError("the pool was closed"))
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._roster.close()

    @property
    def _by_url(self) -> dict[str, PoolWorker]:
        return {worker.url: worker for worker in self._roster.workers}

    async def _page(self, url: str) -> str:
        return await self._by_url[url].page(self._roster.session, self._times.scrape)

    async def _log(self, url: str, after: int) -> list[dict[str, Any]]:
        return await self._by_url[url].log(self._roster.session, after, self._times.scrape)

    def _all_waiting(self) -> list[_Job]:
        return [job for queue in self._waiting.values() for job in queue]

    def _dispatch(self) -> None:
        """Send waiting requests in order while workers have room."""
        for queue in self._waiting.values():
            passed: list[_Job] = []
            while queue and len(passed) < MAX_SKIPPED and any(self._has_room(worker) for worker in self._roster.living):
                job = heapq.heappop(queue)
                if job.answer.done():
                    continue
                worker = self._choose(job)
                if worker is not None:
                    self._send(job, worker)
                elif not job.answer.done():
                    passed.append(job)
                    if not job.failed_on and job.request.version is None:  # no worker has room for any later request either
                        break
            for job in passed:
                heapq.heappush(queue, job)

    @staticmethod
    def _has_room(worker: PoolWorker) -> bool:
        return not worker.changing and worker.flow.has_room(worker.in_flight)

    def _choose(self, job: _Job) -> PoolWorker | None:
        """The preferred worker of the job's position among those within AFFINITY_MARGIN of the least loaded; None: no room."""
        living, version = self._roster.living, job.request.version
        if version is not None and version != BASE_VERSION:
            living = [worker for worker in living if version in worker.served]
            if not living:
                job.fail(VersionGoneError(f"no living worker serves version {version}"))
                return None
        if self._settings.long_prompt_tokens and len(self._roster.workers) > 1:
            last = self._roster.workers[-1]
            living = [worker for worker in living if (worker is last) == job.is_long] or living
        elsewhere = [worker for worker in living if worker not in job.failed_on] or living
        able = [worker for worker in elsewhere if self._has_room(worker)]
        if not able:
            return None
        bound = min(worker.in_flight for worker in able) + AFFINITY_MARGIN
        near = [worker for worker in able if worker.in_flight <= bound]
        return max(near, key=lambda worker: worker.rank(job.request.snapshot_id))

    def _send(self, job: _Job, worker: PoolWorker) -> None:
        version = job.request.version
        expected = worker.newest if version is None else worker.served.get(version, BASE)
        worker.in_flight += 1
        worker.flow.sent(worker.in_flight)
        job.worker = worker
        self._sent[worker].add(job)
        job.call = asyncio.get_running_loop().create_task(self._call(job, worker, expected))

    async def _call(self, job: _Job, worker: PoolWorker, expected: PolicyVersion) -> None:
        try:
            generation = await self._draw(job, worker, expected)
        except asyncio.CancelledError:
            self._release(job, worker)
            self._dispatch()
            raise
        except Exception as error:
            self._release(job, worker)
            self._handle_failure(job, worker, expected, error)
        else:
            self._release(job, worker)
            if not job.answer.done():
                job.answer.set_result(generation)
        self._dispatch()

    async def _draw(self, job: _Job, worker: PoolWorker, expected: PolicyVersion) -> Generation:
        sent = asyncio.get_running_loop().time()
        body = pack_request(replace(job.request, request_id=job.name), expected)
        if len(body) > MAX_BODY:
            raise EngineError(f"request '{job.request.request_id}' has {len(body)} bytes: a worker accepts at most {MAX_BODY}")
        generation, load = await worker.generate(self._roster.session, body)
        try:
            check_answer(generation, job.request.table, expected)
        except DataError as error:
            self._roster.events["rejected_answers"] += 1
            raise CallFailed(f"its answer was rejected: {error}") from error
        worker.failures = worker.missed_probes = 0
        worker.recent_ejections = max(0, worker.recent_ejections - 1)
        worker.flow.answered(load, worker.in_flight)
        waited_ms = generation.cost.queue_ms + 1e3 * (sent - job.arrived)
        return replace(generation, cost=replace(generation.cost, queue_ms=waited_ms))

    def _release(self, job: _Job, worker: PoolWorker) -> None:
        """Record that the job's call on `worker` ended, unless the job was reassigned before."""
        if job in self._sent[worker]:
            self._sent[worker].discard(job)
            worker.in_flight -= 1
            job.call = job.worker = None

    def _handle_failure(self, job: _Job, worker: PoolWorker, expected: PolicyVersion, error: Exception) -> None:
        if isinstance(error, VersionMoved):
            self._version_moved(job, worker, expected, error)
        elif isinstance(error, CallFailed):
            self._roster.events["timeouts"] += error.timed_out
            worker.failures += 1
            if error.lost or worker.failures >= MAX_FAILURES:
                self._roster.eject(worker, str(error), blamed=True, reassign=not error.lost)
            self._retry(job, worker, str(error))
        elif isinstance(error, EntenteError):
            job.fail(error)  # the request itself was refused
        else:
            job.fail(EngineLostError(f"request '{job.request.request_id}' failed because of a bug in the pool: {error!r}"))

    def _version_moved(self, job: _Job, worker: PoolWorker, expected: PolicyVersion, error: VersionMoved) -> None:
        """Fail or retry a job whose version the worker does not serve; eject the worker if it lost what was published there."""
        fits = error.newest == worker.newest or worker.changing
        if (
            self._roster.versions.is_gone(expected.version)
            or job.moves >= MAX_MOVES
            or (fits and job.request.version is not None)
        ):
            job.fail(VersionGoneError(str(error)))
            return
        self._roster.events["moved_versions"] += 1
        job.moves += 1
        heapq.heappush(self._waiting[job.is_long], job)
        if not fits and worker.state == "living":
            self._roster.eject(worker, f"it serves version {error.newest.version}, not {worker.newest.version}: it was restarted")

    def _retry(self, job: _Job, worker: PoolWorker, reason: str) -> None:
        """Queue the job for another worker, unless it failed too often."""
        if job.answer.done():
            return
        job.attempts += 1
        job.failed_on.add(worker)
        if job.attempts >= REQUEST_ATTEMPTS:
            last = f"the last, {worker.url}: {reason}"
            job.fail(EngineLostError(f"request '{job.request.request_id}' failed {job.attempts} times; {last}"))
            return
        self._roster.events["retries"] += 1
        if self._roster.given_up is not None:
            job.fail(self._roster.given_up)
            return
        heapq.heappush(self._waiting[job.is_long], job)

    def _reassign(self, worker: PoolWorker, blamed: bool) -> None:
        """Queue the requests of an ejected worker for other workers; `blamed` counts a failed attempt for each."""
        for job in list(self._sent[worker]):
            call = job.call
            self._release(job, worker)
            if call is not None:
                call.cancel()
            if blamed:
                self._retry(job, worker, worker.reason)
            else:
                heapq.heappush(self._waiting[job.is_long], job)
        self._dispatch()

    def _fail_waiting(self, error: EngineLostError) -> None:
        for job in self._all_waiting():
            job.fail(error)
        for queue in self._waiting.values():
            queue.clear()
