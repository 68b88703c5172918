"""Rollouts on a Dask cluster: any free worker process plays a range of start groups.

Each worker opens the run's folder once and plays all its ranges with one engine; its shards have the producer, numbers and
start positions of local play. Other workers retry a dead worker's groups. A lost scheduler, or no worker for too long, is an
error after which the run can be resumed. Dask runs a plain function, for which Prefect's task waits in the flow's process: a
Prefect task in a worker costs a third of a CPU second, as much as a start group of a small model.
"""

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from entente.inference.server_arguments import start_limit_s
from entente.rollouts.figures import Figures
from entente.rollouts.groups import GroupRange, play_groups
from entente.settings.run_settings import ROLLOUT_TIMEOUT_S, RunSettings
from entente.telemetry.errors import EngineLostError, InputError
from entente.telemetry.machine import usable_cores
from storage.control import read_control
from storage.files import file_marks
from storage.runs import RunPaths
from tasks.rollout_queue import RANGES_AT_ONCE
from tasks.rollout_worker import RolloutWorker

if TYPE_CHECKING:
    from distributed import Client

ANSWERS_WITHIN_S = 10.0
"""Time limit of the first connection to the scheduler, seconds."""
SCHEDULER_BACK_S = 30.0
"""Seconds to wait for a lost scheduler."""
NO_WORKER_S = 120.0
"""Seconds without a worker until the run fails; an autoscaling cluster takes a while to start one."""
SILENT_FOR_S = 300.0
"""Seconds for which a worker may be silent. Importing torch and opening an engine blocks its event loop, on a busy machine
beyond Dask's default of 30 s, after which Dask would drop the worker for good."""
_LOOK_S = 5.0


# -- in a worker process -----------------------------------------------------------------------------------------------------


def play_in_worker(root: Path, group_range: GroupRange) -> Figures:
    """Play a range of groups in a thread of this worker process, within the time limit of a rollout task."""
    return asyncio.run(asyncio.wait_for(play_here(root, group_range), ROLLOUT_TIMEOUT_S))


async def play_here(root: Path, group_range: GroupRange) -> Figures:
    side = await asyncio.to_thread(_side_of, root)
    await side.follow()
    return {**await play_groups(side.resources, group_range), **side.take_troubles()}


async def close_worker(root: Path) -> None:
    await asyncio.to_thread(_close, root)


_lock = threading.Lock()
_open: dict[Path, RolloutWorker] = {}
"""The open run of this process, by folder; at most one, because each has an engine."""


def _side_of(root: Path) -> RolloutWorker:
    """The open run; replaces one of another run, or of an earlier start of this one: a run that was made again has other versions
    under the same numbers, and a resumed one may have another engine. Each start writes the settings."""
    with _lock:
        side, now, written = _open.get(root), read_control(RunPaths(root)), file_marks(RunPaths(root).settings)
        if side is None or (side.resources.started, side.settings.plays, side.resources.provenance["base_model"]) != (
            written,
            now.plays,
            now.base_model,
        ):
            while _open:
                asyncio.run(_open.popitem()[1].close())
            side = asyncio.run(RolloutWorker.open(root, worker=f"dask-{socket.gethostname()}-{os.getpid()}"))
            _open[root] = side
        return side


def _close(root: Path) -> None:
    with _lock:
        if (side := _open.pop(root, None)) is not None:
            asyncio.run(side.close())


# -- in the flow's process -----------------------------------------------------------------------------------------------------


class DaskCluster:
    """A cluster that plays for one run; use it on the flow's event loop."""

    def __init__(self, root: Path, client: "Client", address: str) -> None:
        self._root, self._client, self._at = root, client, _at(address)

    async def play(self, group_range: GroupRange) -> Figures:
        """See `play_groups`. Raises EngineLostError if the scheduler is lost, no worker came in time, or workers died
        repeatedly."""
        from distributed.client import FutureCancelledError
        from distributed.scheduler import KilledWorker

        await self._wait_for_scheduler()
        future: Any = self._client.submit(play_in_worker, self._root, group_range, pure=False)
        answer: asyncio.Future[Figures] = asyncio.ensure_future(future.result())
        try:
            await self._wait_for(answer)
            return await answer
        except FutureCancelledError as error:
            raise self._scheduler_lost() from error
        except KilledWorker as error:
            raise EngineLostError(f"Dask's workers died repeatedly on start groups from {group_range.first_group}") from error
        finally:
            answer.cancel()  # Dask drops a future without waiters

    async def _wait_for_scheduler(self) -> None:
        """Wait while the client reconnects; it gives up after SCHEDULER_BACK_S."""
        while self._client.status == "connecting":
            await asyncio.sleep(0.1)
        if self._client.status != "running":
            raise self._scheduler_lost()

    async def _wait_for(self, answer: asyncio.Future[Figures]) -> None:
        last_worker = time.monotonic()
        while not (await asyncio.wait({answer}, timeout=_LOOK_S))[0]:
            if self._client.scheduler_info().get("n_workers", 0):
                last_worker = time.monotonic()
            elif time.monotonic() - last_worker > NO_WORKER_S:
                raise EngineLostError(
                    f"the Dask cluster{self._at} had no worker for {NO_WORKER_S:g} s: start one, and resume the run"
                )

    def _scheduler_lost(self) -> EngineLostError:
        return EngineLostError(f"the Dask scheduler{self._at} is lost: restart it, and resume the run")


@asynccontextmanager
async def dask_cluster(settings: RunSettings) -> AsyncIterator[DaskCluster]:
    """Connect to a cluster, or start a local one, and wait for a worker. Raises InputError if Dask is missing, the scheduler
    does not answer, or it has no worker."""
    configured, workers = settings.pipeline.dask_address, settings.pipeline.dask_workers
    check_scheduler(configured)
    import dask.config
    from distributed import Client, LocalCluster

    threads = settings.inference.threads or max(1, (usable_cores() - settings.threads[1]) // workers)
    root, address, security = settings.paths.root.resolve(), configured, None
    async with AsyncExitStack() as stack:
        stack.enter_context(dask.config.set(_dask_settings(threads)))
        try:
            if not address:
                cluster: Any = LocalCluster(
                    n_workers=workers,
                    threads_per_worker=RANGES_AT_ONCE,
                    dashboard_address=None,  # type: ignore[arg-type]  # documented so
                    memory_limit=0,  # Dask must not kill a worker for its engine's memory
                    silence_logs=logging.CRITICAL,
                    asynchronous=True,
                    security=True,  # a fresh key and TLS: without, other users of this machine could run programs as this one
                )
                address, security = (await stack.enter_async_context(cluster)).scheduler_address, cluster.security
            connected = Client(address, asynchronous=True, timeout=SCHEDULER_BACK_S, security=security)
            client: Any = await stack.enter_async_context(connected)
            await client.wait_for_workers(1, timeout=start_limit_s(settings.inference))
        except (OSError, TimeoutError) as error:
            if configured and "worker" in str(error).lower():
                raise InputError(
                    f"the Dask scheduler at '{configured}' has no worker: start one with `dask worker {configured}`"
                ) from error
            raise InputError(f"no Dask cluster{_at(configured)}: {error}") from error
        try:
            yield DaskCluster(root, client, configured)
        finally:
            if configured and client.status == "running":  # the workers of an existing cluster outlive the run
                with suppress(Exception):
                    await client.run(close_worker, root, on_error="ignore")


def _dask_settings(threads: int) -> dict[str, object]:
    return {
        "distributed.worker.daemon": False,  # a daemon may have no child processes, and engines and indexes do
        "distributed.comm.timeouts.tcp": f"{SILENT_FOR_S:g}s",
        "distributed.nanny.pre-spawn-environ": {
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads),
            "OMP_WAIT_POLICY": "passive",
            "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": f"{SILENT_FOR_S:g}s",
            "DASK_LOGGING__DISTRIBUTED": "critical",  # at shutdown each worker logs the loss of the others
        },
    }


def check_scheduler(address: str) -> None:
    """Raise InputError if Dask is not installed or the scheduler does not accept connections."""
    import importlib.util

    if importlib.util.find_spec("distributed") is None:
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
            "or leave the address out to start a cluster on this machine"
        ) from error


def _at(address: str) -> str:
    return f" at '{address}'" if address else " on this machine"
