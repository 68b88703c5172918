"""Rollouts on a Dask cluster: Prefect's runner submits a task for each stretch, and any free worker process plays it.

Each worker process opens a rollout side of its own once, from the run's folder. Its shards have the training flow's name, numbers
and start positions, as if they were played in the flow's process. If a worker dies, its stretch is submitted again. A cluster
without any worker for too long is an error.
"""

import asyncio
import concurrent.futures
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

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
"""Time limit of a connection to the scheduler, in seconds."""
STRETCHES_PER_WORKER = 2
"""Threads of a worker process: while one stretch plays its last games, the next keeps the engine busy."""
SILENT_FOR_S = 300.0
"""Seconds for which a worker may be silent. Its event loop is blocked while it imports torch and opens an engine. On a busy
machine this takes longer than Dask's default of 30 s, after which Dask would drop the worker for good."""
_LOOK_S = 5.0
NO_WORKER_S = 120.0
"""Seconds without a worker after which the run ends; a cluster that scales takes a while to bring one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaskPlan:
    """The cluster to play on, with its time limits."""

    address: str
    """Address of a scheduler; empty: a cluster on this machine for the length of the run."""
    workers: int
    """Worker processes of a cluster on this machine."""
    threads: int
    """CPU threads of each of these processes."""
    start_timeout_s: float
    """Seconds until the scheduler must have a worker."""
    timeout_s: float
    """Time limit of a task, in seconds."""
    retries: int
    """Retries of a task that failed, or whose worker died."""


# -- in a worker process -----------------------------------------------------------------------------------------------------


@task(
    name="rollout",
    task_run_name="rollout-s{step}-g{first_group}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def roll_out_elsewhere(root: str, step: int, first_group: int, count: int, after: Path | None = None) -> RolloutReport:
    """Play a stretch in the worker process that runs this task."""
    # Dask pickles this function by value. The import makes it use this process's own module, which holds the open sides.
    from tasks.dask_rollouts import play_here

    return await play_here(Path(root), step, first_group, count, after)


_lock = threading.Lock()
_sides: dict[tuple[Path, str], "concurrent.futures.Future[RolloutSide]"] = {}
"""Rollout sides that this process has open, by run folder and the hash of what they play."""


async def play_here(root: Path, step: int, first_group: int, count: int, after: Path | None = None) -> RolloutReport:
    """Play a stretch in this process."""
    side = await _side_of(root)
    await side.follow()
    return await play_stretch(side.resources, step, first_group, count, after)


async def close_sides(root: str) -> None:
    """Close the rollout sides of a run in this process."""
    with _lock:
        mine = [_sides.pop(key) for key in list(_sides) if key[0] == Path(root)]
    for each in mine:
        if each.done() and each.exception() is None:
            await each.result().close()


async def _side_of(root: Path) -> RolloutSide:
    """This process's rollout side of the run. The first call opens it; a side with outdated settings is closed."""
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
        opening.set_exception(error if isinstance(error, Exception) else EngineLostError("opening the run was cancelled"))
        opening.exception()  # mark the exception as retrieved: there may be no other waiter
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

    groups_per_task = 1

    async def play(self, stretch: Stretch) -> RolloutReport:
        """See `RolloutSource.play`.

        Raises:
            EngineLostError: its workers died again and again, or there was none for too long.
        """
        with self._spans.span("rollout"):
            return await self._play(stretch)

    async def _play(self, stretch: Stretch) -> RolloutReport:
        for _ in range(1 + self._plan.retries):
            await self._wait_for_scheduler()
            where = {"step": stretch.step, "first_group": stretch.first_group, "count": stretch.count, "after": stretch.after}
            # In a thread, because a busy or lost cluster would block the flow's event loop.
            submitted = await asyncio.to_thread(self._runner.submit, self._task, {"root": self._root, **where})
            future = submitted.wrapped_future
            try:
                await self._wait_for(future)
            except BaseException:
                with suppress(Exception):  # a lost cluster plays nothing
                    await asyncio.shield(asyncio.to_thread(future.cancel))
                raise
            if future.status == "finished":
                state = await asyncio.to_thread(future.result)
                return await state.aresult()
            reason = await asyncio.to_thread(_reason, future)
            reporter().say(f"start groups from {stretch.first_group} are submitted to Dask again: {reason}")
        raise EngineLostError(f"Dask's workers died {1 + self._plan.retries} times over start groups from {stretch.first_group}")

    async def _wait_for_scheduler(self) -> None:
        """Wait until the scheduler is connected.

        Raises:
            EngineLostError: it is not for `NO_WORKER_S`.
        """
        until = time.monotonic() + NO_WORKER_S
        while self._runner.client.status != "running":
            if time.monotonic() > until:
                raise EngineLostError(f"the Dask scheduler{_at(self._plan.address)} is lost: start it again, and resume the run")
            await asyncio.sleep(_LOOK_S)

    async def _wait_for(self, future: Any) -> None:
        """Wait for the future.

        Raises:
            EngineLostError: the cluster has no worker for `NO_WORKER_S`.
        """
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: Any) -> None:
            with suppress(RuntimeError):  # the flow's event loop is closed
                loop.call_soon_threadsafe(done.set)

        future.add_done_callback(wake)
        no_worker_since: float | None = None
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):  # wait_for may swallow a cancellation that arrives with the result
                    await done.wait()
                return
            if future.done():
                return
            no_worker_since = None if await asyncio.to_thread(self._has_workers) else no_worker_since or time.monotonic()
            if no_worker_since is not None and time.monotonic() - no_worker_since > NO_WORKER_S:
                raise EngineLostError(
                    f"the Dask cluster{_at(self._plan.address)} had no worker for {NO_WORKER_S:g} s: "
                    "start one, and resume the run"
                )

    def _has_workers(self) -> bool:
        """Whether the scheduler has workers; False if it does not answer."""
        client = self._runner.client
        try:
            return client.status == "running" and client.scheduler_info(n_workers=0).get("n_workers", 0) > 0
        except (OSError, TimeoutError):
            return False


@asynccontextmanager
async def dask_source(root: Path, plan: DaskPlan, spans: Spans) -> AsyncIterator[DaskSource]:
    """A source on a new cluster on this machine, or on an existing one.

    Args:
        spans: the flow's timings; a stretch counts as rollout time from its submission.

    Raises:
        InputError: Dask is not installed, the scheduler does not answer, or it has no worker.
    """
    check_scheduler(plan.address)
    runner = await asyncio.to_thread(_start, plan)
    try:
        yield DaskSource(root, runner, plan, spans)
    finally:
        await asyncio.to_thread(_stop, runner, root, plan)


def check_scheduler(address: str) -> None:
    """Check that Dask is installed and that the scheduler accepts connections.

    Raises:
        InputError: one of these is not so.
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
            f"no Dask scheduler answers at pipeline.dask_address '{address}' ({error}): start one with `dask scheduler`, "
            "or leave the address out to have a cluster on this machine"
        ) from error


def _start(plan: DaskPlan) -> "DaskTaskRunner":
    import dask.config
    from prefect_dask.task_runners import DaskTaskRunner

    logging.getLogger("prefect.task_runner.dask").setLevel(logging.WARNING)
    threads = {name: plan.threads for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    dask.config.set(
        {
            "distributed.worker.daemon": False,  # a daemon may have no child processes, and engines and indexes do
            "distributed.comm.timeouts.tcp": f"{SILENT_FOR_S:g}s",
            "distributed.nanny.pre-spawn-environ": {
                **threads,
                "OMP_WAIT_POLICY": "passive",
                "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": f"{SILENT_FOR_S:g}s",
                "DASK_LOGGING__DISTRIBUTED": "critical",  # at shutdown each worker logs that the others are gone
            },
        }
    )
    cluster = {
        "n_workers": plan.workers,
        "threads_per_worker": STRETCHES_PER_WORKER,
        "processes": True,
        "dashboard_address": None,
        "memory_limit": 0,  # Dask must not kill a worker for its engine's memory
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
                f"the Dask scheduler at '{plan.address}' has no worker: start one with `dask worker {plan.address}`"
            ) from error
        raise InputError(f"no Dask cluster{_at(plan.address)}: {error}") from error
    return runner


def _stop(runner: "DaskTaskRunner", root: Path, plan: DaskPlan) -> None:
    try:
        if plan.address:  # the workers of an existing cluster outlive the run
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
