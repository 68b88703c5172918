"""Flow: play rollouts for a run that trains in another process, until the run needs no more.

It needs only the run's folder. The run's control file says which version to play, how much, and when to end. The shards are
published under the producer's own name; the trainer reads the shards of every producer.
"""

import asyncio
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.given_parameters import check_given
from flows.run_names import producer_name
from game.players import check_player
from pipeline.cancel_on_sigterm import cancelled_by_sigterm
from pipeline.play import RolloutReport
from pipeline.resources import PROBE, PRODUCER
from pipeline.rollout_side import FOLLOW_S, RolloutSide, check_wanted, side_settings
from pipeline.stretches import ROLLOUT_RETRIES
from pipeline.threads import apply_threads, usable_cores
from storage.control import read_control
from storage.files import FILES
from storage.run_roots import RunsFolder
from storage.runs import RunPaths, check_name
from tasks.produced_rollouts import ProducerDesk, produce_groups
from telemetry.errors import InputError
from telemetry.memory import freeze_old_objects
from telemetry.progress import reporter

URLS_VARIABLE = "ENTENTE_PRODUCER_URLS"
"""Environment variable with the addresses of the inference workers for producers on this machine, separated by commas."""
STRETCHES = 2
"""Tasks in flight: while one plays its last games, the next keeps the engine busy."""
FAILURES_IN_A_ROW = 3
"""Tasks in a row that may fail, retries included, before the producer ends with an error."""
IDLE_S = 1800.0
"""Seconds without a change of the control file after which a producer ends: the training process is gone."""


@flow(name="rollout-producer", flow_run_name=producer_name)
async def produce_rollouts(
    run: str, runs_root: RunsFolder = Path("runs"), urls: tuple[str, ...] = (), producer: str = "", threads: int = 0
) -> dict[str, Any]:
    """Play start groups for `run` until the run ends or dismisses this producer.

    Args:
        run: Name of the run, its folder under `runs_root`.
        runs_root: Folder of all runs, shared with the machine that trains.
        urls: Inference workers (`entente serve`) for this producer alone. Default: those in ENTENTE_PRODUCER_URLS on this
            machine, else those of the run's settings, else an engine in this process.
        producer: Name of the producer; default: host and flow run.
        threads: CPU threads of an engine in this process; 0: as in the run's settings, else all cores.

    Raises:
        InputError: there is no such run, it is not being trained, or this machine lacks its model, players or engine.
    """
    check_given(runs_root, runs=[run], addresses=urls)
    paths = RunPaths(runs_root / run)
    name = check_name(producer, "The producer") if producer else _own_name()
    if name in (PRODUCER, PROBE):
        raise InputError(f"'{name}' is the training flow's own name: give the producer another")
    FILES.check(runs_root)
    settings = side_settings(paths)
    check_wanted(paths, settings, read_control(paths))
    for player in settings.rollouts.scripted_opponents:
        check_player(player)
    apply_threads(threads or settings.inference.threads or usable_cores())
    with cancelled_by_sigterm():
        async with ProducerDesk(paths, name, str(flow_run.id or "")) as desk:
            reporter().say("starting the engine")
            side = await RolloutSide.open(paths.root, urls=urls or _urls_here(), worker=name)
            try:
                production = Production(side, desk, name)
                with freeze_old_objects():
                    reason = await production.run()
                await desk.update("ended", sentence=reason)
            finally:
                await side.close()
    reporter().say(f"producer '{name}' ends: {reason}")
    return {"run": run, "producer": name, "start_groups": production.published, "decisions": production.decisions, "why": reason}


class Production:
    """The loop of a producer: it keeps up to STRETCHES tasks in flight, within the run's quota."""

    def __init__(self, side: RolloutSide, desk: ProducerDesk, producer: str) -> None:
        self.published = self.decisions = 0
        self._side, self._desk, self._producer = side, desk, producer
        rollouts, pipeline = side.settings.rollouts, side.settings.pipeline
        wanted = pipeline.groups_per_task or -(-rollouts.start_groups // STRETCHES)
        self._family = rollouts.family
        self._each = -(-wanted // self._family) * self._family
        self._next = -(-desk.status.next_group // self._family) * self._family
        self._before = desk.status.published
        self._task = produce_groups.with_options(
            timeout_seconds=pipeline.rollout_timeout_s,
            retries=ROLLOUT_RETRIES,
            retry_delay_seconds=1,
            retry_jitter_factor=1,
        )
        self._in_flight: dict[asyncio.Task[RolloutReport], int] = {}
        self._failures = 0
        self._version, self._started = -1, 0  # start groups started under that version

    async def run(self) -> str:
        """Play until the run needs no more. Returns the reason.

        Raises:
            Exception: the error of the last of FAILURES_IN_A_ROW failed tasks.
        """
        last_change, counter = time.monotonic(), -1
        try:
            while True:
                control = await self._side.follow()
                if control.stop:
                    return control.reason
                if control.counter != counter:
                    last_change, counter = time.monotonic(), control.counter
                if not control.wants(self._producer):
                    await self._finish_tasks()
                    return "the run needs fewer producers"
                if control.version != self._version:
                    self._version, self._started = control.version, 0
                await self._start_tasks(control.quota)
                if not self._in_flight and time.monotonic() - last_change > IDLE_S:
                    return f"the run's control file has not changed for {IDLE_S / 60:.0f} minutes"
                await self._wait()
        finally:
            for each in self._in_flight:
                each.cancel()
            await asyncio.gather(*self._in_flight, return_exceptions=True)

    async def _start_tasks(self, quota: int) -> None:
        """Start tasks up to the quota of this version: whole families of start groups, at least one."""
        while len(self._in_flight) < STRETCHES and self._started < quota:
            left = -(-(quota - self._started) // self._family) * self._family
            first, count = self._next, min(self._each, left)
            self._next, self._started = first + count, self._started + count
            # Written before playing: a later process of this name starts after these numbers.
            await self._write_status(count)
            self._in_flight[asyncio.create_task(self._task(self._side, self._producer, first, count))] = count

    async def _wait(self) -> None:
        """Wait until a task ends, or until the control file is read again."""
        if not self._in_flight:
            await asyncio.sleep(FOLLOW_S)
            return
        done, _ = await asyncio.wait(self._in_flight, timeout=FOLLOW_S, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            await self._record_result(each)

    async def _record_result(self, ended: asyncio.Task[RolloutReport]) -> None:
        count = self._in_flight.pop(ended)
        if (error := ended.exception()) is not None:
            self._failures += 1
            reporter().say(f"start groups of producer '{self._producer}' failed: {error}")
            if self._failures >= FAILURES_IN_A_ROW:
                raise error
            return
        self._failures = 0
        self.published += count
        self.decisions += ended.result().decisions
        await self._write_status(0)

    async def _finish_tasks(self) -> None:
        """Wait for the tasks in flight; their rows are used."""
        while self._in_flight and not self._side.control.stop:
            await self._wait()

    async def _write_status(self, more: int) -> None:
        in_flight = sum(self._in_flight.values()) + more
        await self._desk.update(
            "playing" if in_flight else "waiting",
            published=self._before + self.published,
            in_flight=in_flight,
            next_group=self._next,
            version=self._side.version,
            sentence="" if in_flight else "it has played its share of this version",
        )


def _urls_here() -> tuple[str, ...]:
    return tuple(filter(None, (url.strip() for url in os.environ.get(URLS_VARIABLE, "").split(","))))


def _own_name() -> str:
    host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname()).strip("-")[:40] or "host"
    return f"{host}-{str(flow_run.id or os.getpid())[:8]}"
