"""Starts the rollout producers of a training run as flow runs of a deployment, replaces lost ones, and ends them with the run.

Training never waits for a producer or for Prefect. If the server refuses a request, this is reported once, and the run continues
with the rollouts that it has. The state of a producer is read from its status file; Prefect only starts and cancels flow runs.
"""

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.deployments import arun_deployment
from prefect.states import Cancelled, Cancelling

from pipeline.producer_rule import FleetStatus
from pipeline.resources import Resources
from pipeline.run_settings import RunSettings
from storage.control import ProducerStatus, read_producers
from storage.files import FILES
from storage.run_roots import as_given
from telemetry.errors import StoreAwayError
from telemetry.progress import reporter

PRODUCER_DEPLOYMENT = "rollout-producer/play-rollouts"
"""Deployment of prefect.yaml whose runs are the rollout producers."""
LOOK_S = 2.0
"""Seconds between two reads of the status files."""
ANSWERS_WITHIN_S = 30.0
"""Time limit of a request to Prefect, in seconds."""
ENDS_WITHIN_S = 10.0
"""Seconds that producers have to end by themselves after the control file tells them to stop."""
ASK_PREFECT_S = 15.0
"""Seconds between two requests for the state of a flow run that has no status file yet."""
_NAME = re.compile(r"fleet-(\d+)")


@dataclass(slots=True, kw_only=True)
class _Started:
    """A producer that this fleet started."""

    flow_run: UUID | None
    asked_at: float
    """Monotonic seconds of the last request to Prefect about it."""
    has_status: bool = False
    """Whether it has a status file."""


class ProducerFleet:
    """Starts, counts and ends rollout producers; use it as an async context manager around the steps.

        async with ProducerFleet(resources, settings) as fleet:
            ...
            fleet.set_target(plan.producers)
            status = fleet.status()

    If `pipeline.producers_max` is 0 it starts none, and only counts producers that were started by hand.
    """

    def __init__(self, resources: Resources, settings: RunSettings) -> None:
        self._paths, self._control = resources.paths, resources.control
        self._run, self._runs_root = settings.run, Path(settings.runs_root).resolve()
        pipeline = settings.pipeline
        self._deployment = PRODUCER_DEPLOYMENT
        self._least, self._most = pipeline.producers_min, max(pipeline.producers_min, pipeline.producers_max)
        self._target = self._least
        self._started: dict[str, _Started] = {}
        self._statuses: list[ProducerStatus] = []
        self._damaged: list[str] = []
        self._losses = self._failures = 0
        self._next_start_at = 0.0
        self._reported: set[str] = set()
        self._wake = asyncio.Event()
        self._managing: asyncio.Task[None] | None = None

    def set_target(self, producers: int) -> None:
        """Set the number of producers, limited to `pipeline.producers_min` .. `producers_max`.

        Returns at once. A background task starts and dismisses producers; `status` shows its progress.
        """
        self._target = min(max(producers, self._least), self._most)
        self._wake.set()

    def status(self) -> FleetStatus:
        """The producers as of the last read of the status files, a few seconds ago at most."""
        alive = [status for status in self._statuses if status.at_work()]
        return FleetStatus(
            asked=self._target,
            alive=len(alive),
            starting=sum(not started.has_status for started in self._started.values()),
            lost=self._losses,
            published=sum(status.published for status in self._statuses),
            in_flight=sum(status.in_flight for status in alive),
            playing=sum(status.state == "playing" for status in alive),
            proven=sum(status.published > 0 for status in alive),
        )

    async def __aenter__(self) -> Self:
        await self._read_statuses()
        self._adopt()
        self._managing = asyncio.create_task(self._manage())
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all producers of the run by the control file; cancel by Prefect those that do not end."""
        # Before Python 3.12, `wait_for` swallows a cancellation that arrives when its task is just done, so it is repeated.
        while self._managing is not None and not self._managing.done():
            self._managing.cancel()
            await asyncio.wait([self._managing], timeout=1)
        if not self._most or self._control is None:
            return
        try:
            await asyncio.to_thread(self._control.stop, "its training has ended")
            until = time.monotonic() + ENDS_WITHIN_S
            while time.monotonic() < until and any(started.has_status for started in self._started.values()):
                await asyncio.sleep(0.5)
                await self._read_statuses()
                self._forget([status.producer for status in self._statuses if not status.at_work()])
        except OSError as error:
            self._report_once(f"the control file could not tell producers that training has ended: {error}")
        await asyncio.gather(*(self._cancel(name) for name in list(self._started)))

    # -- background task -------------------------------------------------------------------------------------------------

    async def _manage(self) -> None:
        while True:
            await self._read_statuses()
            self._update_started()
            if self._most:
                await self._ask_prefect()
                await self._match_target()
            self._wake.clear()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _read_statuses(self) -> None:
        try:
            self._statuses, self._damaged = await asyncio.to_thread(read_producers, self._paths)
        except (OSError, StoreAwayError) as error:
            self._report_once(f"the status files of producers cannot be read: {error}")
        for sentence in self._damaged:
            self._report_once(sentence)

    def _adopt(self) -> None:
        """Take in producers of this fleet's names that outlived a kill of this run, or that were thought to be lost."""
        for status in self._statuses:
            wanted = self._control is None or self._control.control.wants(status.producer)
            if _NAME.fullmatch(status.producer) and status.producer not in self._started and wanted and status.at_work():
                self._started[status.producer] = _Started(
                    flow_run=_uuid(status.flow_run), asked_at=time.monotonic(), has_status=True
                )

    def _update_started(self) -> None:
        """Update the producers of this fleet from their status files."""
        self._adopt()
        for status in self._statuses:
            started = self._started.get(status.producer)
            if started is None:
                continue
            started.has_status = True
            started.flow_run = started.flow_run or _uuid(status.flow_run)
            if status.published:
                self._failures = 0
            dismissed = self._control is not None and not self._control.control.wants(status.producer)
            if status.lost():
                self._record_loss(
                    status.producer, f"producer '{status.producer}' on {status.host} is lost: it sends no sign of life"
                )
            elif status.state == "ended" and not dismissed:
                self._record_loss(status.producer, f"producer '{status.producer}' on {status.host} ended: {status.sentence}")
            elif status.state == "ended":
                self._forget([status.producer])

    def _record_loss(self, producer: str, sentence: str) -> None:
        """Count a lost producer, and wait before the next start; the wait grows with each loss."""
        self._losses += 1
        self._delay_next_start()
        reporter().say(sentence)
        self._forget([producer])

    def _delay_next_start(self) -> None:
        self._failures += 1
        self._next_start_at = time.monotonic() + min(300.0, 2.0**self._failures)

    def _forget(self, producers: Sequence[str]) -> None:
        for name in producers:
            self._started.pop(name, None)

    async def _ask_prefect(self) -> None:
        """Ask Prefect for the state of flow runs without a status file: they failed early, or wait for a worker."""
        now = time.monotonic()
        for name, started in list(self._started.items()):
            if started.has_status or started.flow_run is None or now - started.asked_at < ASK_PREFECT_S:
                continue
            started.asked_at = now
            try:
                state = (await asyncio.wait_for(_read_flow_run(started.flow_run), ANSWERS_WITHIN_S)).state
            except Exception as error:  # whatever the server or its client raises, it is asked again later
                self._report_once(f"Prefect does not answer questions about producers ({_short(error)}); training continues")
                continue
            if state is not None and state.is_final():
                self._record_loss(name, f"producer '{name}' did not start: {state.message or state.name}")
            else:
                self._report_once(f"producer '{name}' waits for a worker of the pool of '{self._deployment}'")

    async def _match_target(self) -> None:
        """Start one producer if there are too few, dismiss one if there are too many."""
        ours = {status.producer for status in self._statuses if status.at_work()} & self._started.keys()
        others = sum(status.at_work() and status.producer not in self._started for status in self._statuses)
        there = len(self._started) + others
        if there < self._target and time.monotonic() >= self._next_start_at:
            await self._start()
        elif there > self._target and self._started and self._control is not None:
            starting = [name for name in self._started if name not in ours]
            name = max(starting or self._started)
            await asyncio.to_thread(self._control.dismiss, [name])
            if starting:
                await self._cancel(name)
            self._forget([name])

    async def _start(self) -> None:
        name = self._next_name()
        asked = {"run": self._run, "runs_root": as_given(self._runs_root), "producer": name}
        try:
            run = await asyncio.wait_for(
                # Not a subflow: the producer continues while a killed training flow is restarted.
                arun_deployment(self._deployment, parameters=asked, timeout=0, as_subflow=False, tags=["entente", "producer"]),
                ANSWERS_WITHIN_S,
            )
        except Exception as error:  # whatever the server or its client raises, training does not depend on it
            self._report_once(
                f"no rollout producer can be started by '{self._deployment}' ({_short(error)}); training continues without"
            )
            self._delay_next_start()
            return
        self._started[name] = _Started(flow_run=run.id, asked_at=time.monotonic())
        reporter().say(f"producer '{name}' is requested")

    def _next_name(self) -> str:
        """A name that no producer of this run has had."""
        names = [*(status.producer for status in self._statuses), *self._started, *FILES.folders(self._paths.shards)]
        dismissed = self._control.control.dismissed if self._control is not None else ()
        numbers = [int(found[1]) for name in (*names, *dismissed) if (found := _NAME.fullmatch(name))]
        return f"fleet-{max(numbers, default=0) + 1:04d}"

    async def _cancel(self, name: str) -> None:
        started = self._started[name]
        if started.flow_run is None:
            return
        state: Any = Cancelling() if started.has_status else Cancelled(message="the run needs no producer any more")
        try:
            await asyncio.wait_for(_set_state(started.flow_run, state), ANSWERS_WITHIN_S)
        except Exception as error:  # it ends by the control file, or no worker has started it
            self._report_once(f"Prefect could not cancel producers ({_short(error)})")

    def _report_once(self, sentence: str) -> None:
        if sentence not in self._reported:
            self._reported.add(sentence)
            reporter().say(sentence)


async def _read_flow_run(flow_run: UUID) -> Any:
    async with get_client() as client:
        return await client.read_flow_run(flow_run)


async def _set_state(flow_run: UUID, state: Any) -> None:
    async with get_client() as client:
        await client.set_flow_run_state(flow_run, state)


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
