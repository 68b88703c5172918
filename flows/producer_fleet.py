"""The rollout producers of a training run: begun as flow runs of a deployment, counted by what they say of themselves, replaced
when they are lost, ended with the run.

Promise: training never waits for a producer nor for Prefect. A server that refuses is said once, and the run goes on with the
rollouts that it has. Who is at work is read from status files; Prefect is only asked to begin and to cancel.
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

from pipeline.resources import Resources
from pipeline.run_settings import RunSettings
from pipeline.step_figures import FleetStatus
from storage.control import ProducerStatus, read_producers
from storage.files import FILES
from telemetry.progress import reporter

PRODUCER_DEPLOYMENT = "rollout-producer/play-rollouts"
"""Deployment of prefect.yaml whose runs are the rollout producers."""
LOOK_S = 2.0
"""Seconds between two looks at the status files."""
ANSWERS_WITHIN_S = 30.0
"""Seconds until Prefect must have answered."""
ENDS_WITHIN_S = 10.0
"""Seconds that producers have to end by themselves, once the control file says so."""
ASK_PREFECT_S = 15.0
"""Seconds between two questions about a run of which no status file tells."""
_NAME = re.compile(r"fleet-(\d+)")


@dataclass(slots=True, kw_only=True)
class _Begun:
    """A producer of ours."""

    flow_run: UUID | None
    asked_at: float
    """Monotonic seconds, when Prefect was last asked about it."""
    heard: bool = False
    """It has a status file."""


class ProducerFleet:
    """Begins, counts and ends rollout producers; use it as an async context manager around the steps.

        async with ProducerFleet(resources, settings) as fleet:
            ...
            await fleet.ask_for(plan.producers)
            standing = fleet.standing()

    Without `pipeline.producers_max` it does nothing at all, but still counts producers that somebody began by hand.
    """

    def __init__(self, resources: Resources, settings: RunSettings) -> None:
        self._paths, self._control = resources.paths, resources.control
        self._run, self._runs_root = settings.run, Path(settings.runs_root).resolve()
        pipeline = settings.pipeline
        self._deployment = PRODUCER_DEPLOYMENT
        self._least, self._most = pipeline.producers_min, max(pipeline.producers_min, pipeline.producers_max)
        self._wanted = self._least
        self._begun: dict[str, _Begun] = {}
        self._statuses: list[ProducerStatus] = []
        self._damaged: list[str] = []
        self._lost = self._failures = 0
        self._not_before = 0.0
        self._said: set[str] = set()
        self._wake = asyncio.Event()
        self._tending: asyncio.Task[None] | None = None

    async def ask_for(self, producers: int) -> None:
        """Have so many producers play from now on, within `pipeline.producers_min` and `producers_max`.

        Returns at once: they are begun and dismissed aside, and `standing` tells how far that is.
        """
        self._wanted = min(max(producers, self._least), self._most)
        self._wake.set()

    def standing(self) -> FleetStatus:
        """Who is there, as of the last look, at most a few seconds ago; asks nobody."""
        alive = [status for status in self._statuses if status.at_work()]
        return FleetStatus(
            asked=self._wanted,
            alive=len(alive),
            starting=sum(not begun.heard for begun in self._begun.values()),
            lost=self._lost,
            published=sum(status.published for status in self._statuses),
            in_flight=sum(status.in_flight for status in alive),
        )

    async def __aenter__(self) -> Self:
        await self._look()
        for status in self._statuses:  # of this run before it was killed and resumed: they played on
            if _NAME.fullmatch(status.producer) and status.at_work():
                self._begun[status.producer] = _Begun(flow_run=_uuid(status.flow_run), asked_at=time.monotonic(), heard=True)
        self._tending = asyncio.create_task(self._tend())
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all producers of the run: by the control file, and those that do not hear it by Prefect."""
        # Until Python 3.12 `wait_for` swallows a cancellation that comes as what it waits for is done: so it is repeated.
        while self._tending is not None and not self._tending.done():
            self._tending.cancel()
            await asyncio.wait([self._tending], timeout=1)
        if not self._most or self._control is None:
            return
        try:
            await asyncio.to_thread(self._control.stop, "its training has ended")
            until = time.monotonic() + ENDS_WITHIN_S
            while time.monotonic() < until and any(begun.heard for begun in self._begun.values()):
                await asyncio.sleep(0.5)
                await self._look()
                self._forget([status.producer for status in self._statuses if not status.at_work()])
        except OSError as error:
            self._say_once(f"producers could not be told that training has ended: {error}")
        await asyncio.gather(*(self._cancel(name) for name in list(self._begun)))

    # -- aside -----------------------------------------------------------------------------------------------------------

    async def _tend(self) -> None:
        while True:
            await self._look()
            self._take_note()
            if self._most:
                await self._ask_prefect()
                await self._adjust()
            self._wake.clear()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _look(self) -> None:
        try:
            self._statuses, self._damaged = await asyncio.to_thread(read_producers, self._paths)
        except OSError as error:
            self._say_once(f"the status files of producers cannot be read: {error}")
        for sentence in self._damaged:
            self._say_once(sentence)

    def _take_note(self) -> None:
        """What became of ours."""
        for status in self._statuses:
            begun = self._begun.get(status.producer)
            if begun is None:
                continue
            begun.heard = True
            begun.flow_run = begun.flow_run or _uuid(status.flow_run)
            if status.published:
                self._failures = 0
            dismissed = self._control is not None and not self._control.control.wants(status.producer)
            if status.lost():
                self._missed(status.producer, f"producer '{status.producer}' on {status.host} is lost: nothing heard of it")
            elif status.state == "ended" and not dismissed:
                self._missed(status.producer, f"producer '{status.producer}' on {status.host} ended: {status.sentence}")
            elif status.state == "ended":
                self._forget([status.producer])

    def _missed(self, producer: str, sentence: str) -> None:
        """One of ours is gone that should be there; the next is begun the later, the more went like it."""
        self._lost += 1
        self._put_off()
        reporter().say(sentence)
        self._forget([producer])

    def _put_off(self) -> None:
        self._failures += 1
        self._not_before = time.monotonic() + min(300.0, 2.0**self._failures)

    def _forget(self, producers: Sequence[str]) -> None:
        for name in producers:
            self._begun.pop(name, None)

    async def _ask_prefect(self) -> None:
        """What became of runs of which no status file tells: one that failed early, or waits for a worker."""
        now = time.monotonic()
        for name, begun in list(self._begun.items()):
            if begun.heard or begun.flow_run is None or now - begun.asked_at < ASK_PREFECT_S:
                continue
            begun.asked_at = now
            try:
                state = (await asyncio.wait_for(_read(begun.flow_run), ANSWERS_WITHIN_S)).state
            except Exception as error:  # whatever a server or its client may raise: it is asked again
                self._say_once(f"Prefect does not tell of producers ({_short(error)}); training goes on")
                continue
            if state is not None and state.is_final():
                self._missed(name, f"producer '{name}' did not begin: {state.message or state.name}")
            else:
                self._say_once(f"producer '{name}' waits for a worker of the pool of '{self._deployment}'")

    async def _adjust(self) -> None:
        """Begin what is missing, dismiss what is too many."""
        ours = {status.producer for status in self._statuses if status.at_work()} & self._begun.keys()
        others = sum(status.at_work() and status.producer not in self._begun for status in self._statuses)
        there = len(self._begun) + others
        if there < self._wanted and time.monotonic() >= self._not_before:
            await self._begin()
        elif there > self._wanted and self._begun and self._control is not None:
            starting = [name for name in self._begun if name not in ours]
            name = max(starting or self._begun)
            await asyncio.to_thread(self._control.dismiss, [name])
            if starting:
                await self._cancel(name)
            self._forget([name])

    async def _begin(self) -> None:
        name = self._next_name()
        asked = {"run": self._run, "runs_root": str(self._runs_root), "producer": name}
        try:
            run = await asyncio.wait_for(
                # No subflow: a producer plays on while a training flow that was killed is started again.
                arun_deployment(self._deployment, parameters=asked, timeout=0, as_subflow=False, tags=["entente", "producer"]),
                ANSWERS_WITHIN_S,
            )
        except Exception as error:  # whatever a server or its client may raise: training does not need it
            self._say_once(
                f"no rollout producer can be begun by '{self._deployment}' ({_short(error)}); training goes on without"
            )
            self._put_off()
            return
        self._begun[name] = _Begun(flow_run=run.id, asked_at=time.monotonic())
        reporter().say(f"producer '{name}' is asked for")

    def _next_name(self) -> str:
        """A name that no producer of this run ever had."""
        names = [*(status.producer for status in self._statuses), *self._begun, *FILES.folders(self._paths.shards)]
        dismissed = self._control.control.dismissed if self._control is not None else ()
        numbers = [int(found[1]) for name in (*names, *dismissed) if (found := _NAME.fullmatch(name))]
        return f"fleet-{max(numbers, default=0) + 1:04d}"

    async def _cancel(self, name: str) -> None:
        begun = self._begun[name]
        if begun.flow_run is None:
            return
        state: Any = Cancelling() if begun.heard else Cancelled(message="the run wants no producer any more")
        try:
            await asyncio.wait_for(_set(begun.flow_run, state), ANSWERS_WITHIN_S)
        except Exception as error:  # it hears the control file, or nobody hears it
            self._say_once(f"Prefect could not cancel producers ({_short(error)})")

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            reporter().say(sentence)


async def _read(flow_run: UUID) -> Any:
    async with get_client() as client:
        return await client.read_flow_run(flow_run)


async def _set(flow_run: UUID, state: Any) -> None:
    async with get_client() as client:
        await client.set_flow_run_state(flow_run, state)


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
