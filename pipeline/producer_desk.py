"""The status file of a rollout producer: its name, its numbers, its signs of life.

A number is written to disk before its start group is played, so no number is used twice, even after a kill. The status file shows
that the producer is alive, and why it ended if it could write that. Of two producers of one name the later one gives way.
"""

import asyncio
import os
import re
import socket
import threading
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, Self

from storage.control import BEAT_S, ProducerState, ProducerStatus, read_producer, write_producer
from storage.files import FILES
from storage.runs import RunPaths, held
from storage.shards import SHARD_NAME, describe_shard, open_shard, shard_path
from telemetry.errors import DataError, InputError, StoreAwayError
from telemetry.progress import reporter

_BEYOND_A_SHARD = 4096
"""Upper bound of start groups in a shard: the distance to the next free number after a shard that cannot be read."""


def own_name(flow_run: str = "") -> str:
    """A name for a producer of this process: host, and the flow run or the process's number."""
    host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname()).strip("-")[:40] or "host"
    return f"{host}-{flow_run[:8] or os.getpid()}"


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
        self._writing = threading.Lock()
        self._ended = threading.Event()
        # A thread: the event loop stands still for a long time while a large model is opened.
        self._beat = threading.Thread(target=self._update_regularly, name="producer-desk", daemon=True)
        self._taken: InputError | None = None

    @property
    def status(self) -> ProducerStatus:
        """The status as last written."""
        return self._status

    async def update(self, state: ProducerState, **fields: Any) -> None:
        """Change fields of the status; it is on disk when this returns.

        Raises:
            InputError: a producer of this name that began earlier is at work on another machine.
        """
        await asyncio.to_thread(self._set, state=state, **fields)

    def check_name(self) -> None:
        """Raise the InputError of `update` if a regular write met it."""
        if self._taken is not None:
            raise self._taken

    def _set(self, **fields: Any) -> None:
        with self._writing:
            self._status = replace(self._status, alive_at=time.time(), **fields)
            self._write()

    def _write(self) -> None:
        if self._taken is None:
            with suppress(DataError):  # it is replaced
                other = read_producer(self._paths, self._producer)
                elsewhere = other is not None and other.host != self._status.host and other.at_work()
                if other is not None and elsewhere and _age(other) < _age(self._status):
                    self._taken = self._taken_by(other)
        if self._taken is not None:
            raise self._taken  # the file is the other's
        write_producer(self._paths, self._status)

    def _taken_by(self, other: ProducerStatus) -> InputError:
        run = self._paths.root.name
        return InputError(f"a producer '{self._producer}' of run '{run}' is at work on {other.host}: give another name")

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
                    raise self._taken_by(before)
                self._status = replace(self._status, published=before.published if before else 0)
            await self.update("opening", next_group=await asyncio.to_thread(next_free_number, paths, producer))
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        self._beat.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self._ended.set()
        await asyncio.to_thread(self._beat.join)
        try:
            why = self._status.sentence if error is None else str(error) or "it was cancelled"
            if self._taken is None:
                await self.update("ended", in_flight=0, sentence=why)
        finally:
            if self._lock is not None:
                self._lock.__exit__(None, None, None)

    def _update_regularly(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                self._set()
            except (OSError, StoreAwayError) as error:  # a full disk, say: readers see no sign of life, and shards wait for room
                reporter().say(f"the status of producer '{self._producer}' could not be written: {error}")
            except InputError:  # the loop asks `check_name`
                return


def _age(status: ProducerStatus) -> tuple[float, str]:
    """Orders producers of one name on several machines: the smaller one stays. On one machine the lock decides."""
    return status.began_at, status.host
