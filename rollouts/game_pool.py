"""The flow's side of game processes: deals start groups to them, has their requests drawn, and replaces one that dies.

A game process plays whole families of start groups. A *job* is what one process plays of one call. If the process dies, its
replacement plays the job from the beginning. Seeds are named, so it asks the same requests again, and gets the completions that
were drawn before: no row is lost, and none is drawn twice.

The pool runs on the engine's event loop. Requests of several processes meet in the engine by measured time, so which of them
share a forward pass is not repeatable.
"""

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from decoding.legal_table import LegalTable
from game.prompt_settings import PromptSettings
from records.generation import Generation
from rollouts.deciders import CompletionSource, PolicyDecider
from rollouts.game_messages import (
    Answer,
    Asked,
    Frames,
    GamesEnded,
    GamesReady,
    GamesToPlay,
    GroupEnded,
    Requests,
    StopGames,
    error_fields,
    error_of,
)
from rollouts.roll_out import RolledOut, StartGroup, check_failures, families
from rollouts.settings import RolloutSettings
from telemetry.errors import EngineLostError, EntenteError
from telemetry.progress import reporter

PROCESS_BYTES = 135 << 20
"""Resident memory of a game process, read from the metric `memory/games_mib` of runs of the laptop preset."""
STEPS_AT_ONCE = 2
"""Steps of start groups that a process plays at once; further jobs wait. On a machine with other load all jobs would slow each
other, the queue would take them for stragglers and add more, and none would end."""
DEATHS_IN_A_ROW = 3
"""A job fails after so many deaths of its process without a job that ended between."""
_ENDS_WITHIN_S = 5.0
"""Seconds that a process has to end before it is killed. It has no files."""


@dataclass(slots=True, kw_only=True)
class _Job:
    """What one process plays of one call."""

    message: GamesToPlay
    engines: Mapping[str, CompletionSource]
    """By seat; see `Asked.seat`."""
    on_group: Callable[[int], None]
    result: "asyncio.Future[RolledOut]"
    drawn: "dict[tuple[str, str], asyncio.Task[Generation]]" = field(default_factory=dict)
    """Requests in flight and answered, by seat and request id. A repeated request gets the first one's completion."""
    ended_groups: set[int] = field(default_factory=set)
    playing: bool = False
    """The process has it; False: it waits for its turn."""


class GamePool:
    """Some game processes. All methods run on one event loop."""

    def __init__(self, count: int, model: Path, prompts: PromptSettings, log: Path) -> None:
        """
        Args:
            count: number of processes, at least 1.
            model: folder of the model, for its tokenizer.
            log: file for what the processes write to their standard output and error.
        """
        command = (str(model), prompts.model_dump_json())
        self._places = [_Place(number, command, log) for number in range(1, count + 1)]
        self._job_numbers = itertools.count()

    async def start(self) -> None:
        """Start the processes, and return while they load; their first jobs wait for them."""
        for place in self._places:
            place.start()

    async def close(self) -> None:
        """End the processes. Calls in progress fail."""
        await asyncio.gather(*(place.close() for place in self._places))

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes that run."""
        return [place.process.pid for place in self._places if place.process is not None]

    async def roll_out(
        self,
        groups: Sequence[StartGroup],
        engine: CompletionSource,
        settings: RolloutSettings,
        *,
        producer: str,
        seed: int,
        on_group: Callable[[int], None] = lambda number: None,
        deciders: Mapping[str, PolicyDecider] | None = None,
    ) -> RolledOut:
        """Like `rollouts.roll_out.roll_out`, in game processes. Rows have the same order.

        Raises:
            EngineError: more than `settings.max_failed_share` of the forks failed.
            EngineLostError: a game process died `DEATHS_IN_A_ROW` times.
        """
        found, deciders = families(groups), deciders or {}
        places = sorted(self._places, key=lambda place: place.load)[: len(found)]
        loop = asyncio.get_running_loop()
        jobs = [
            _Job(
                message=GamesToPlay(
                    job=next(self._job_numbers),
                    groups=[group for family in found[first :: len(places)] for group in family],
                    settings=settings.model_copy(update={"max_failed_share": 1.0}),  # the share is that of all jobs
                    producer=producer,
                    seed=seed,
                    versions={seat: decider.version for seat, decider in deciders.items()},
                ),
                engines={"": engine, **{seat: decider.engine for seat, decider in deciders.items()}},
                on_group=on_group,
                result=loop.create_future(),
            )
            for first in range(len(places))
        ]
        for place, job in zip(places, jobs, strict=True):
            place.add(job)
        try:
            played = _merged(groups, await asyncio.gather(*(job.result for job in jobs)))
        finally:
            for place, job in zip(places, jobs, strict=True):
                place.remove(job)
        check_failures(played, settings)
        return played


class _Place:
    """One game process at a time, and the jobs that it plays."""

    def __init__(self, number: int, command: Sequence[str], log: Path) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._number, self._command, self._log = number, command, log
        self._jobs: dict[int, _Job] = {}
        self._frames: Frames | None = None
        self._tables: dict[int, LegalTable] = {}
        """Legal tables that the process has sent, by slot."""
        self._ready = False
        self._deaths = 0
        """Since a job ended."""
        self._has_jobs = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        """Start groups that it plays, or that wait for it."""
        return sum(len(job.message.groups) for job in self._jobs.values())

    def start(self) -> None:
        """Start a process, and replace it whenever it ends, until `close`."""
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        """End the process."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        for job in list(self._jobs.values()):
            _fail(job, EngineLostError("the game processes were closed"))

    def add(self, job: _Job) -> None:
        """Have the process play a job."""
        self._jobs[job.message.job] = job
        self._has_jobs.set()
        self._send_jobs()

    def remove(self, job: _Job) -> None:
        """Forget a job; stop it if it is not done."""
        if self._jobs.pop(job.message.job, None) is not None:
            self._send(StopGames(job=job.message.job))
        for drawing in job.drawn.values():
            drawing.cancel()
        job.result.cancel()
        if not self._jobs:
            self._has_jobs.clear()
        self._send_jobs()

    def _send_jobs(self) -> None:
        """Send the jobs whose turn it is, oldest first."""
        if self._frames is None:
            return
        playing = sum(len(job.message.groups) for job in self._jobs.values() if job.playing)
        for job in self._jobs.values():
            if not job.playing:
                size, most = len(job.message.groups), STEPS_AT_ONCE * job.message.settings.start_groups
                if playing and playing + size > most:
                    return
                job.playing, playing = True, playing + size
                self._send(job.message)

    def _send(self, message: Any) -> None:
        if self._frames is not None:
            self._frames.send(message)

    async def _keep(self) -> None:
        """Keep one process running."""
        while True:
            self._ready = False
            try:
                why = f"exit code {await self._run_once()}"
            except OSError as error:  # no memory, processes or open files left, or a full disk
                why = str(error)
            self._deaths += 1
            reporter().say(f"game process {self._number} ended ({why}) and is replaced; its log is {self._log}")
            if self._deaths >= DEATHS_IN_A_ROW:
                for job in self._jobs.values():
                    first = job.message.groups[0].number
                    _fail(
                        job,
                        EngineLostError(
                            f"game process {self._number} died {self._deaths} times in a row over start groups from {first} "
                            f"({why}); its last lines are in {self._log}"
                        ),
                    )
                self._deaths = 0
                self._jobs.clear()
                self._has_jobs.clear()
            if not self._ready:  # it could not start; try again when there is work
                await self._has_jobs.wait()

    async def _run_once(self) -> int:
        """Run one process until it ends; returns its exit code."""
        connection = self._launch()
        process = self.process
        assert process is not None
        try:
            self._tables = {}
            _, self._frames = await asyncio.get_running_loop().create_unix_connection(
                partial(Frames, self._receive), sock=connection
            )
            for job in self._jobs.values():
                job.playing = False
            self._send_jobs()
            await self._frames.ended
        finally:
            frames, self._frames = self._frames, None
            if frames is not None:
                frames.close()
            code = await asyncio.shield(asyncio.to_thread(_end, process))
            self.process = None
        return code

    def _launch(self) -> socket.socket:
        """Start a process; returns this end of its socket."""
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with self._log.open("ab") as log:
            own, other = socket.socketpair()
            with other:
                try:
                    self.process = subprocess.Popen(
                        [sys.executable, "-P", "-m", "rollouts.game_process", str(other.fileno()), *self._command],
                        pass_fds=[other.fileno()],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environment,
                        # Only the parent receives Ctrl-C; it then closes its end of the socket.
                        start_new_session=True,
                    )
                except OSError:
                    own.close()
                    raise
        return own

    def _receive(self, message: Any) -> None:
        """Handle a message of the process. Messages of removed jobs are ignored."""
        match message:
            case Requests():
                for asked in message.asked:
                    self._draw(asked)
            case GroupEnded():
                job = self._jobs.get(message.job)
                if job is not None and message.group not in job.ended_groups:
                    job.ended_groups.add(message.group)
                    job.on_group(message.group)
            case GamesEnded():
                job = self._jobs.pop(message.job, None)
                if job is None:
                    return
                self._deaths = 0
                self._send_jobs()
                if message.played is None:
                    _fail(job, error_of(message.error))
                elif not job.result.done():
                    job.result.set_result(message.played)
            case GamesReady():
                self._ready = True
            case _:
                raise TypeError(f"a flow cannot handle {type(message).__name__}")

    def _draw(self, asked: Asked) -> None:
        """Have a request drawn, unless it was asked before, and answer it."""
        if asked.table is not None:
            self._tables[asked.slot] = asked.table
        job, table = self._jobs.get(asked.job), self._tables.get(asked.slot)
        if job is None or table is None:
            return
        key = asked.seat, asked.request_id
        drawing = job.drawn.get(key)
        if drawing is None:
            completion = job.engines[asked.seat].generate(asked.request(table))
            drawing = job.drawn[key] = asyncio.get_running_loop().create_task(completion)
        drawing.add_done_callback(partial(self._answer, job, key))

    def _answer(self, job: _Job, key: tuple[str, str], drawing: "asyncio.Task[Generation]") -> None:
        """Send a completion, or why there is none. A failed request may be asked again."""
        if drawing.cancelled():
            return
        error = drawing.exception()
        seat, request_id = key
        if error is None:
            answer = Answer(job=job.message.job, seat=seat, request_id=request_id, generation=drawing.result())
        elif isinstance(error, EntenteError):
            if job.drawn.get(key) is drawing:
                del job.drawn[key]
            answer = Answer(job=job.message.job, seat=seat, request_id=request_id, generation=None, error=error_fields(error))
        else:
            _fail(job, error)
            return
        self._send(answer)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Wait until the process has ended; kill it if it does not. Returns its exit code."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=_ENDS_WITHIN_S)
    process.kill()
    return process.wait()


def _fail(job: _Job, error: BaseException) -> None:
    if not job.result.done():
        job.result.set_exception(error)


def _merged(groups: Sequence[StartGroup], parts: Sequence[RolledOut]) -> RolledOut:
    """All parts as one, in the order of `groups`."""
    place = {group.number: number for number, group in enumerate(groups)}
    return RolledOut(
        decisions=sorted((row for part in parts for row in part.decisions), key=lambda row: place[row.start_group]),
        plies=sorted((ply for part in parts for ply in part.plies), key=lambda ply: place[ply.start_group]),
        forks=sum(part.forks for part in parts),
        failed_forks=sum(part.failed_forks for part in parts),
        failure=next((part.failure for part in parts if part.failure), ""),
    )
