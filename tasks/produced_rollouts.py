"""The work of a rollout producer: it plays start groups under its own name and numbers, and updates its status file.

A number is written to disk before its start group is played, so no number is used twice, even after a kill. The status file shows
that the producer is alive, and why it ended if it could write that.
"""

import asyncio
import os
import socket
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, Self

from prefect import task
from prefect.cache_policies import NO_CACHE

from pipeline.play import RolloutReport, play_missing
from pipeline.rollout_side import RolloutSide, producer_positions
from storage.control import BEAT_S, ProducerState, ProducerStatus, read_producer, write_producer
from storage.files import FILES
from storage.runs import RunPaths, held
from storage.shards import SHARD_NAME, describe_shard, open_shard, shard_path
from telemetry.errors import DataError, InputError, StoreAwayError
from telemetry.progress import reporter

_BEYOND_A_SHARD = 4096
"""Upper bound of start groups in a shard: the distance to the next free number after a shard that cannot be read."""


@task(
    name="rollout",
    task_run_name="rollout-{producer}-g{first_group}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def produce_groups(side: RolloutSide, producer: str, first_group: int, count: int) -> RolloutReport:
    """Play the producer's start groups from `first_group` on under the newest version, and publish their shard."""
    await side.follow()
    positions = await asyncio.to_thread(producer_positions, side.resources, producer, first_group, count, side.version)
    settings = side.resources.rollouts.at(side.version + 1)  # the step that trains on them, at the earliest
    return await play_missing(side.resources, f"rollout {first_group}", producer, positions, first_group, rollouts=settings)


def next_free_number(paths: RunPaths, producer: str) -> int:
    """The first start group number that is beyond the producer's last status and beyond its shards."""
    try:
        status = read_producer(paths, producer)
    except DataError as error:
        reporter().say(str(error))
        status = None
    announced = status.next_group if status is not None else 0
    numbers = [int(found[1]) for name in FILES.names(paths.shards / producer) if (found := SHARD_NAME.fullmatch(name))]
    if not numbers:
        return announced
    newest = shard_path(paths, producer, max(numbers))
    try:
        return max(announced, describe_shard(newest, open_shard(newest), already=True).next_start_group)
    except DataError:  # the index reports the damaged shard
        return max(announced, max(numbers) + _BEYOND_A_SHARD)


class ProducerDesk:
    """Writes one producer's status file: regularly, and before anything that depends on it."""

    def __init__(self, paths: RunPaths, producer: str, flow_run: str) -> None:
        """
        Raises:
            InputError: on entering the context, if a producer of this name is already at work.
        """
        self._paths, self._producer = paths, producer
        now = time.time()
        self._status = ProducerStatus(
            producer=producer,
            state="opening",
            published=0,
            in_flight=0,
            next_group=0,
            version=0,
            alive_at=now,
            began_at=now,
            host=socket.gethostname(),
            pid=os.getpid(),
            flow_run=flow_run,
            sentence="",
        )
        self._lock: AbstractContextManager[bool] | None = None
        self._writing = asyncio.Lock()
        self._beat: asyncio.Task[None] | None = None

    @property
    def status(self) -> ProducerStatus:
        """The status as last written."""
        return self._status

    async def update(self, state: ProducerState, **fields: Any) -> None:
        """Change fields of the status; it is on disk when this returns."""
        async with self._writing:
            self._status = replace(self._status, state=state, alive_at=time.time(), **fields)
            await asyncio.to_thread(write_producer, self._paths, self._status)

    async def __aenter__(self) -> Self:
        paths, producer = self._paths, self._producer
        self._lock = held(paths.producers / f".{producer}.lock")
        if not self._lock.__enter__():
            self._lock.__exit__(None, None, None)
            raise InputError(f"a producer '{producer}' of run '{paths.root.name}' is at work on this machine: give another name")
        try:
            with suppress(DataError):
                before = read_producer(paths, producer)
                if before is not None and before.at_work() and before.host != self._status.host:
                    raise InputError(
                        f"a producer '{producer}' of run '{paths.root.name}' is at work on {before.host}: give another name"
                    )
                self._status = replace(self._status, published=before.published if before else 0)
            await self.update("opening", next_group=await asyncio.to_thread(next_free_number, paths, producer))
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        self._beat = asyncio.create_task(self._update_regularly())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)
        try:
            why = self._status.sentence if error is None else str(error) or "it was cancelled"
            await self.update("ended", in_flight=0, sentence=why)
        finally:
            if self._lock is not None:
                self._lock.__exit__(None, None, None)

    async def _update_regularly(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                await self.update(self._status.state)
            except (OSError, StoreAwayError) as error:  # a full disk, say: readers see no sign of life, and shards wait for room
                reporter().say(f"the status of producer '{self._producer}' could not be written: {error}")
