"""Rollouts on a Dask cluster: a task for each stretch, by Prefect's runner, played by whichever worker process is free.

Each worker process opens a rollout side of its own, once, from the run's folder. Promise: what it publishes bears the training
flow's own name and numbers and begins at the same positions, so nobody who reads the shards can tell where they were played. A
worker that dies is somebody else's stretch; a cluster that has no worker left for long is an error with a sentence.
"""

import asyncio
import concurrent.futures
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

from prefect import task
from prefect.cache_policies import NO_CACHE

from pipeline.play import RolloutReport, play_stretch
from pipeline.rollout_side import RolloutSide
from pipeline.rollout_source import Stretch
from storage.control import read_control
from storage.runs import RunPaths
from telemetry.errors import EngineLostError, InputError
from telemetry.progress import reporter
from telemetry.timing import Spans

if TYPE_CHECKING:
    from prefect_dask.task_runners import DaskTaskRunner

ANSWERS_WITHIN_S = 10.0
"""Seconds until a scheduler must have answered."""
STRETCHES_PER_WORKER = 2
"""Threads of a worker process: while the last games of one stretch are played, the next fills the engine."""
SILENT_FOR_S = 300.0
"""Seconds for which a worker may say nothing: while it imports torch and opens an engine its loop stands still, on a busy machine
for longer than the 30 s after which Dask would let it go, and nobody would begin another."""
_LOOK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DaskPlan:
    """Where to play, and how patiently."""

    address: str
    """Of a scheduler; empty: a cluster on this machine, for as long as the run."""
    workers: int
    """Processes of that cluster."""
    threads: int
    """CPU threads of each of them."""
    start_timeout_s: float
    """Until a scheduler must have a worker."""
    no_worker_timeout_s: float
    """Without any worker, or without the scheduler, until rollouts fail."""
    timeout_s: float
    """Of a task."""
    retries: int
    """Of a task that failed, and of one whose workers died."""


# -- in a worker process -----------------------------------------------------------------------------------------------------


@task(
    name="rollout",
    task_run_name="rollout-s{step}-g{first_group}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def roll_out_elsewhere(
    root: str, step: int, first_group: int, count: int, call: str, after: Path | None = None
) -> RolloutReport:
    """Play a stretch in the process of the worker that runs this."""
    # This function travels by value, with copies of what it refers to; the sides of the process are those of the module.
    from tasks.dask_rollouts import play_here

    return await play_here(Path(root), step, first_group, count, call, after)


_lock = threading.Lock()
_sides: dict[tuple[Path, str], "concurrent.futures.Future[RolloutSide]"] = {}
"""Of this process, by run and what it plays."""
_calls: dict[str, tuple[asyncio.AbstractEventLoop, "asyncio.Task[Any]"]] = {}
"""Stretches that are played in this process."""


async def play_here(root: Path, step: int, first_group: int, count: int, call: str, after: Path | None = None) -> RolloutReport:
    """Play a stretch in this process, unless it is given up meanwhile."""
    with _may_be_given_up(call):
        side = await _side_of(root)
        await side.follow()
        return await play_stretch(side.playing, step, first_group, count, after)


async def cancel_call(call: str) -> None:
    """Have this process give up a stretch, if it plays it."""
    with _lock:
        found = _calls.get(call)
    if found is not None:
        with suppress(RuntimeError):  # it has just ended, and its loop with it
            found[0].call_soon_threadsafe(found[1].cancel)


async def close_sides(root: str) -> None:
    """Free what this process holds of a run."""
    with _lock:
        mine = [_sides.pop(key) for key in list(_sides) if key[0] == Path(root)]
    for each in mine:
        if each.done() and each.exception() is None:
            await each.result().close()


@contextmanager
def _may_be_given_up(call: str) -> Iterator[None]:
    current = asyncio.current_task()
    assert current is not None, "a task of Prefect's runs in one of asyncio's"
    with _lock:
        _calls[call] = asyncio.get_running_loop(), current
    try:
        yield
    finally:
        with _lock:
            del _calls[call]


async def _side_of(root: Path) -> RolloutSide:
    """This process's side of the run, opened by whoever comes first; one that plays otherwise than the run by now is closed."""
    key = root, (await asyncio.to_thread(read_control, RunPaths(root))).plays
    with _lock:
        known = _sides.get(key)
        opening = _sides.setdefault(key, concurrent.futures.Future())
        others = [] if known else [_sides.pop(other) for other in list(_sides) if other != key]
    for other in others:
        if other.done() and other.exception() is None:
            await other.result().close()
    if known is not None:
        return await asyncio.wrap_future(known)
    try:
        opening.set_result(await RolloutSide.open(root, worker=f"dask-{socket.gethostname()}-{os.getpid()}"))
    except BaseException as error:
        with _lock:
            _sides.pop(key, None)
        opening.set_exception(error if isinstance(error, Exception) else EngineLostError("opening the run was given up"))
        opening.exception()  # nobody else may wait for it
        raise
    return opening.result()


# -- in the flow's process -----------------------------------------------------------------------------------------------------


class DaskSource:
    """The `RolloutSource` of a cluster."""

    def __init__(self, root: Path, runner: "DaskTaskRunner", plan: DaskPlan, spans: Spans) -> None:
        self._root, self._runner, self._plan, self._spans = str(root.resolve()), runner, plan, spans
        self._task = roll_out_elsewhere.with_options(
            timeout_seconds=plan.timeout_s, retries=plan.retries, retry_delay_seconds=1, retry_jitter_factor=1
        )

    async def play(self, stretch: Stretch) -> RolloutReport:
        """See `RolloutSource.play`.

        Raises:
            EngineLostError: its workers died again and again, or there was none for too long.
        """
        with self._spans.span("rollout"):
            return await self._play(stretch)

    async def _play(self, stretch: Stretch) -> RolloutReport:
        for _ in range(1 + self._plan.retries):
            await self._connected()
            call = uuid4().hex
            where = {"step": stretch.step, "first_group": stretch.first_group, "count": stretch.count, "after": stretch.after}
            # In a thread: a cluster that is busy or gone takes its time, and the flow's loop has other things to do.
            submitted = await asyncio.to_thread(self._runner.submit, self._task, {"root": self._root, "call": call, **where})
            future = submitted.wrapped_future
            try:
                await self._settled(future)
            except BaseException:
                await asyncio.shield(asyncio.to_thread(self._take_back, future, call))
                raise
            if future.status == "finished":
                state = await asyncio.to_thread(future.result)
                return await state.aresult()
            reason = await asyncio.to_thread(_reason, future)
            reporter().say(f"start groups from {stretch.first_group} are submitted to Dask again: {reason}")
        raise EngineLostError(f"Dask's workers died {1 + self._plan.retries} times over start groups from {stretch.first_group}")

    async def _connected(self) -> None:
        """Wait for a scheduler that is gone for a while."""
        until = time.monotonic() + self._plan.no_worker_timeout_s
        while self._runner.client.status != "running":
            if time.monotonic() > until:
                raise EngineLostError(f"the Dask scheduler{_at(self._plan.address)} is lost: begin it again, and resume the run")
            await asyncio.sleep(_LOOK_S)

    async def _settled(self, future: Any) -> None:
        """Wait for the future, but not for ever where nobody is left to settle it."""
        loop, settled = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: Any) -> None:
            with suppress(RuntimeError):  # the flow has ended
                loop.call_soon_threadsafe(settled.set)

        future.add_done_callback(tell)
        alone_since: float | None = None
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):  # wait_for may swallow a cancellation that comes with the answer
                    await settled.wait()
                return
            if future.done():
                return
            alone_since = None if await asyncio.to_thread(self._has_workers) else alone_since or time.monotonic()
            if alone_since is not None and time.monotonic() - alone_since > self._plan.no_worker_timeout_s:
                raise EngineLostError(
                    f"the Dask cluster{_at(self._plan.address)} had no worker for {self._plan.no_worker_timeout_s:g} s: "
                    "begin one, and resume the run"
                )

    def _has_workers(self) -> bool:
        """Asked of the scheduler itself; one that does not answer has none."""
        client = self._runner.client
        try:
            return client.status == "running" and client.scheduler_info(n_workers=0).get("n_workers", 0) > 0
        except (OSError, TimeoutError):
            return False

    def _take_back(self, future: Any, call: str) -> None:
        """What Dask has not begun it forgets; what a worker plays it is told to give up."""
        with suppress(Exception):  # a cluster that is gone plays nothing
            future.cancel()
            self._runner.client.run(cancel_call, call, wait=False)


@asynccontextmanager
async def dask_source(root: Path, plan: DaskPlan, spans: Spans) -> AsyncIterator[DaskSource]:
    """A source on a cluster of this machine, or on one that is there already.

    Args:
        spans: the flow's; a stretch counts as rollouts from when it is submitted.

    Raises:
        InputError: Dask is not installed, the scheduler does not answer, or it has no worker.
    """
    check_scheduler(plan.address)
    runner = await asyncio.to_thread(_begin, plan)
    try:
        yield DaskSource(root, runner, plan, spans)
    finally:
        await asyncio.to_thread(_end, runner, root, plan)


def check_scheduler(address: str) -> None:
    """Refuse a scheduler at which nobody listens, and a machine without Dask, before anything else is begun.

    Raises:
        InputError: that is so.
    """
    import importlib.util

    if importlib.util.find_spec("prefect_dask") is None:
        raise InputError("pipeline.task_runner 'dask' needs Dask: install the extra `dask`, or set task_runner to 'threads'")
    if not address:
        return
    try:
        parts = urlsplit(address if "://" in address else f"tcp://{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise InputError(f"pipeline.dask_address '{address}' is no address of a Dask scheduler, such as 'tcp://10.0.0.5:8786'")
    try:
        socket.create_connection((host, port), timeout=ANSWERS_WITHIN_S).close()
    except OSError as error:
        raise InputError(
            f"no Dask scheduler answers at pipeline.dask_address '{address}' ({error}): begin one with `dask scheduler`, "
            "or leave the address out to have a cluster on this machine"
        ) from error


def _begin(plan: DaskPlan) -> "DaskTaskRunner":
    import dask.config
    from prefect_dask.task_runners import DaskTaskRunner

    logging.getLogger("prefect.task_runner.dask").setLevel(logging.WARNING)
    threads = {name: plan.threads for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    dask.config.set(
        {
            "distributed.worker.daemon": False,  # a daemon may have no children, and engines and indexes do
            "distributed.comm.timeouts.tcp": f"{SILENT_FOR_S:g}s",
            "distributed.nanny.pre-spawn-environ": {
                **threads,
                "OMP_WAIT_POLICY": "passive",
                "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": f"{SILENT_FOR_S:g}s",
                "DASK_LOGGING__DISTRIBUTED": "critical",  # at the end each complains that the others are gone
            },
        }
    )
    cluster = {
        "n_workers": plan.workers,
        "threads_per_worker": STRETCHES_PER_WORKER,
        "processes": True,
        "dashboard_address": None,
        "memory_limit": 0,  # an engine takes what its settings say, and is not to be killed for it
        "silence_logs": logging.ERROR,
    }
    client = {"timeout": ANSWERS_WITHIN_S}
    runner = (
        DaskTaskRunner(address=plan.address, client_kwargs=client) if plan.address else DaskTaskRunner(cluster_kwargs=cluster)
    )
    runner.__enter__()
    try:
        runner.client.wait_for_workers(1, timeout=plan.start_timeout_s)
    except (OSError, TimeoutError) as error:
        runner.__exit__(None, None, None)
        if plan.address and "worker" in str(error).lower():
            raise InputError(
                f"the Dask scheduler at '{plan.address}' has no worker: begin one with `dask worker {plan.address}`"
            ) from error
        raise InputError(f"no Dask cluster{_at(plan.address)}: {error}") from error
    return runner


def _end(runner: "DaskTaskRunner", root: Path, plan: DaskPlan) -> None:
    try:
        if plan.address:  # its workers outlive the run
            with suppress(Exception):
                runner.client.run(close_sides, str(root.resolve()), wait=True, on_error="ignore")
    finally:
        runner.__exit__(None, None, None)


def _at(address: str) -> str:
    return f" at '{address}'" if address else " on this machine"


def _reason(future: Any) -> str:
    try:
        future.result(timeout=1)
    except Exception as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return str(future.status)
