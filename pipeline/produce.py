"""A rollout producer: a process that plays start groups for a run that trains in another one, until the run needs no more.

It needs only the run's folder. The run's control file says which version to play, how much, and when to end. A producer publishes
under its own name and numbers. It knows neither Prefect nor Dask: whoever starts it may wrap `play` into a task of theirs.
"""

import asyncio
import heapq
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from game.players import check_player
from pipeline.gathering import Gathered, PlayedGroups
from pipeline.play import publish_groups, roll_out_groups
from pipeline.producer_desk import ProducerDesk, own_name
from pipeline.resources import PROBE, PRODUCER
from pipeline.rollout_side import FOLLOW_S, RolloutSide, SideSettings, check_wanted, side_settings
from pipeline.run_settings import ROLLOUT_TIMEOUT_S
from pipeline.start_positions import producer_positions
from pipeline.threads import apply_threads, usable_cores
from storage.control import Control, read_control
from storage.files import FILES
from storage.runs import RunPaths, check_name
from telemetry.errors import InputError, StoreAwayError
from telemetry.memory import freeze_old_objects
from telemetry.progress import reporter

URLS_VARIABLE = "ENTENTE_PRODUCER_URLS"
"""Environment variable with the addresses of the inference workers for producers on this machine, separated by commas."""
STRETCHES = 2
"""Stretches in flight: while one plays its last games, the next keeps the engine busy."""
FAILURES_IN_A_ROW = 3
"""Failures in a row after which the producer ends with the last error. What failed is played again before anything else."""
IDLE_S = 1800.0
"""Seconds without a change of the control file after which a producer ends: the training process is gone."""
TELL_EVERY_S = 10.0
"""Seconds between two lines about what was published."""

_DISMISSED = "the run needs fewer producers"

Play = Callable[[RolloutSide, str, int, int], Awaitable[PlayedGroups]]
"""Plays a stretch of a producer; see `play_stretch_of`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced:
    """What a producer did."""

    run: str
    producer: str
    start_groups: int
    """Start groups that it published in this life."""
    decisions: int
    why: str
    """Why it ended."""


async def play_stretch_of(side: RolloutSide, producer: str, first_group: int, count: int) -> PlayedGroups:
    """Play the producer's start groups from `first_group` on under the newest version. Publishes nothing."""
    await side.follow()
    version = side.version
    positions = await asyncio.to_thread(producer_positions, side.resources, producer, first_group, count, version)
    settings = side.resources.rollouts.at(version + 1)  # the step that trains on them, at the earliest
    async with asyncio.timeout(ROLLOUT_TIMEOUT_S):
        played = await roll_out_groups(side.resources, f"rollout {first_group}", producer, positions, first_group, settings)
    return PlayedGroups(first=first_group, count=count, version=version, decisions=played.decisions, plies=played.plies)


async def produce(
    paths: RunPaths,
    *,
    urls: Sequence[str] = (),
    producer: str = "",
    threads: int = 0,
    flow_run: str = "",
    play: Play = play_stretch_of,
) -> Produced:
    """Play start groups for the run until it ends or dismisses this producer. A cancelled call publishes what it has played.

    Args:
        urls: inference workers for this producer alone; empty: those in ENTENTE_PRODUCER_URLS, else those of the run's settings,
            else an engine in this process.
        producer: name of the producer; empty: of this machine and process.
        threads: CPU threads of an engine in this process; 0: as in the run's settings, else all cores.
        flow_run: id of its flow run in Prefect; empty without one.
        play: plays a stretch.

    Raises:
        InputError: there is no such run, it is not being trained, another program trains it, its steps take no other rollouts,
            the name is taken, or this machine lacks its model, players or engine.
    """
    name = producer or own_name(flow_run)
    settings, _ = check_produce(paths, name)
    apply_threads(threads or settings.inference.threads or usable_cores())
    async with ProducerDesk(paths, name, flow_run) as desk:
        reporter().say("starting the engine")
        side = await RolloutSide.open(paths.root, urls=urls or urls_here(), worker=name)
        try:
            production = Production(side, desk, name, play)
            reporter().say(f"producer '{name}' plays for run '{settings.run}'")
            with freeze_old_objects():
                reason = await production.run()
            await desk.update("ended", sentence=reason)
        finally:
            await side.close()
    reporter().say(f"producer '{name}' ends: {reason}")
    return Produced(
        run=settings.run, producer=name, start_groups=production.published, decisions=production.decisions, why=reason
    )


def check_produce(paths: RunPaths, producer: str) -> tuple[SideSettings, Control]:
    """Check that a producer of this name may play for the run. Returns the run's settings and its control file.

    Raises:
        InputError: as `produce`, except for model and engine.
    """
    if check_name(producer, "The producer") in (PRODUCER, PROBE):
        raise InputError(f"'{producer}' is the training flow's own name: give the producer another")
    FILES.check(paths.root.parent)
    settings = side_settings(paths)
    if settings.pipeline.deterministic or settings.pipeline.lockstep:
        way = "deterministic" if settings.pipeline.deterministic else "lockstep"
        raise InputError(
            f"the steps of run '{settings.run}' train on its own start groups alone (pipeline.{way}): resume it with "
            f"--pipeline.no-{way} to have others play for it"
        )
    control = read_control(paths)
    check_wanted(paths, settings, control)
    for player in settings.rollouts.scripted_opponents:
        check_player(player)
    return settings, control


class Production:
    """The loop of a producer: up to STRETCHES stretches in flight, within the run's quota; see `gathering` for its shards."""

    def __init__(self, side: RolloutSide, desk: ProducerDesk, producer: str, play: Play) -> None:
        self.published = self.decisions = 0
        self._side, self._desk, self._producer, self._play = side, desk, producer, play
        rollouts, pipeline = side.settings.rollouts, side.settings.pipeline
        self._each = pipeline.groups_per_task or -(-rollouts.start_groups // STRETCHES)
        self._next = desk.status.next_group
        self._again: list[tuple[int, int]] = []  # (first, count) of stretches that failed
        self._before = desk.status.published
        self._in_flight: dict[asyncio.Task[PlayedGroups], tuple[int, int]] = {}
        self._gathered = Gathered()
        self._changed = True  # the status file does not say it yet
        self._failures, self._not_before = 0, 0.0  # in a row; when the next stretch may begin after one
        self._version, self._started = -1, 0  # start groups begun with that version
        self._counter, self._changed_at = -1, time.monotonic()  # of the control file
        self._trouble = ""
        self._told, self._decisions_told = time.monotonic(), 0

    async def run(self) -> str:
        """Play until the run needs no more. Returns the reason.

        Raises:
            Exception: the error of the last of FAILURES_IN_A_ROW failures.
        """
        try:
            while not (reason := await self._go_on()):
                # Not in `_go_on`: a TimeoutError of a stretch is an OSError, too.
                await self._wait()
            if reason == _DISMISSED:
                await self._finish()
            return reason
        finally:
            for each in self._in_flight:
                each.cancel()
            await asyncio.gather(*self._in_flight, return_exceptions=True)
            await self._publish(newest=self._version, gather=False)

    async def _go_on(self) -> str:
        """Read the control file, begin and publish what is due. Returns why to end, or an empty text.

        While the folder is away, or the disk is full, rows and numbers are kept.
        """
        try:
            control = await self._side.follow()
            self._desk.check_name()
            if control.stop:
                return control.reason or "its training has ended"
            if not control.wants(self._producer):
                return _DISMISSED
            if control.counter != self._counter:
                self._changed_at, self._counter = time.monotonic(), control.counter
            if control.version != self._version:
                self._version, self._started = control.version, 0
            await self._start(control.quota)
            await self._publish(newest=control.version, gather=control.gather)
            self._trouble = ""
        except (OSError, StoreAwayError) as error:
            self._report_trouble(f"the folder of run '{self._side.settings.run}' cannot be used ({error}); trying again")
            await asyncio.sleep(FOLLOW_S)
        if not self._in_flight and time.monotonic() - self._changed_at > IDLE_S:
            return f"the run's control file has not changed for {IDLE_S / 60:.0f} minutes"
        return ""

    async def _start(self, quota: int) -> None:
        """Begin stretches: first what failed, then new start groups up to the quota of this version."""
        while len(self._in_flight) < STRETCHES and time.monotonic() >= self._not_before:
            if self._again:
                first, count = heapq.heappop(self._again)
            elif self._started < quota:
                first, count = self._next, min(self._each, quota - self._started)
                self._next, self._started = first + count, self._started + count
            else:
                return
            try:
                # Written before playing: a later process of this name starts after these numbers.
                await self._write_status(count)
            except BaseException:
                heapq.heappush(self._again, (first, count))
                raise
            task = asyncio.ensure_future(self._play(self._side, self._producer, first, count))
            self._in_flight[task] = first, count

    async def _wait(self) -> None:
        """Wait until a stretch ends, or until the control file is read again."""
        if not self._in_flight:
            await asyncio.sleep(FOLLOW_S)
            return
        done, _ = await asyncio.wait(self._in_flight, timeout=FOLLOW_S, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            self._take(each)

    def _take(self, ended: "asyncio.Task[PlayedGroups]") -> None:
        first, count = self._in_flight.pop(ended)
        if (error := ended.exception()) is not None:
            self._failures += 1
            words = f"it took more than {ROLLOUT_TIMEOUT_S:g} s"
            reporter().say(
                f"start groups from {first} of producer '{self._producer}' failed and are played again: {str(error) or words}"
            )
            heapq.heappush(self._again, (first, count))
            self._not_before = time.monotonic() + self._failures
            if self._failures >= FAILURES_IN_A_ROW:
                raise error
            return
        self._failures = 0
        self._gathered.add(ended.result())
        self._changed = True

    async def _publish(self, *, newest: int, gather: bool) -> None:
        """Publish the shards that are due."""
        for due in self._gathered.due(newest=newest, gather=gather):
            shard = await publish_groups(self._side.resources, self._producer, due.first, due.count, due.decisions, due.plies)
            self._gathered.remove(due)
            self._changed = True
            if shard.already:
                reporter().say(f"{shard.path} was published by another producer of this name: these start groups are dropped")
                continue
            self.published += due.count
            self.decisions += len(due.decisions)
            self._tell()
        if self._changed:
            await self._write_status(0)
            self._changed = False

    async def _finish(self) -> None:
        """Wait for what is in flight; its rows are used."""
        while self._in_flight and not self._side.control.stop:
            await self._wait()

    def _report_trouble(self, sentence: str) -> None:
        if sentence != self._trouble:
            self._trouble = sentence
            reporter().say(sentence)

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told >= TELL_EVERY_S:
            rate = (self.decisions - self._decisions_told) / (now - self._told)
            self._told, self._decisions_told = now, self.decisions
            reporter().say(
                f"producer '{self._producer}': {self.published} start groups, {self.decisions} decisions, {rate:.1f} a second; "
                f"version {self._side.version}"
            )

    async def _write_status(self, more: int) -> None:
        playing = sum(count for _, count in self._in_flight.values()) + more
        in_flight = playing + self._gathered.start_groups
        await self._desk.update(
            "playing" if playing else "waiting",
            published=self._before + self.published,
            in_flight=in_flight,
            next_group=self._next,
            version=self._side.version,
            sentence="" if in_flight else "it has played its share of this version",
        )


def urls_here() -> tuple[str, ...]:
    """The inference workers for producers on this machine."""
    return tuple(filter(None, (url.strip() for url in os.environ.get(URLS_VARIABLE, "").split(","))))
