"""Rollout producers on a Dask cluster: one in each worker process, also in those that join later.

They publish under names of their own, as any producer does. If a worker dies, Dask starts nothing again; a worker that takes its
place gets a producer of another name. Prefect is not needed.
"""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pipeline.produce import FAILURES_IN_A_ROW, Produced, produce
from pipeline.producer_desk import own_name
from storage.runs import RunPaths
from tasks.dask_rollouts import ANSWERS_WITHIN_S, check_scheduler
from telemetry.errors import EngineLostError, InputError
from telemetry.progress import reporter

if TYPE_CHECKING:
    from distributed import Client, Future

_LOOK_S = 2.0
"""Seconds between two looks at the cluster's workers."""
_NO_WORKER_S = 60.0
"""Seconds without any worker after which the command ends."""
_ENDS_WITHIN_S = 20.0
"""Seconds for producers to publish what they have played, when the command ends."""
_lock = threading.Lock()
_here: dict[str, tuple[asyncio.AbstractEventLoop, "asyncio.Task[Any]"]] = {}
"""Event loop and task of each producer that this worker process runs, by call id."""


# -- in a worker process -----------------------------------------------------------------------------------------------------


def produce_here(root: str, prefix: str, urls: Sequence[str], threads: int, call: str) -> Produced:
    """Run a producer in this worker process; `end_here` ends it."""
    # Dask pickles this function by value. The import makes it use this process's own module, which holds the calls.
    from tasks.dask_producers import _run_here

    return asyncio.run(_run_here(root, prefix, urls, threads, call))


async def _run_here(root: str, prefix: str, urls: Sequence[str], threads: int, call: str) -> Produced:
    task = asyncio.current_task()
    assert task is not None, "asyncio.run starts a task"
    with _lock:
        _here[call] = asyncio.get_running_loop(), task
    try:
        name = "-".join(filter(None, (prefix, own_name(), call[:4])))
        return await produce(RunPaths(Path(root)), urls=urls, producer=name, threads=threads)
    finally:
        with _lock:
            del _here[call]


def end_here(calls: Sequence[str]) -> None:
    """End these producers if this process runs them; they publish what they have played."""
    from tasks.dask_producers import _here, _lock

    with _lock:
        found = [_here[call] for call in calls if call in _here]
    for loop, task in found:
        with suppress(RuntimeError):  # its event loop has just closed
            loop.call_soon_threadsafe(task.cancel)


# -- in the command's process ------------------------------------------------------------------------------------------------


async def produce_on_dask(
    address: str, paths: RunPaths, *, prefix: str = "", urls: Sequence[str] = (), threads: int = 0
) -> list[Produced]:
    """Have one producer in each worker process of the cluster until the run ends. A cancelled call ends them.

    Args:
        address: of the scheduler.
        prefix: of the producers' names; may be empty.
        urls, threads: see `produce`.

    Raises:
        InputError: Dask is not installed, the scheduler does not answer, or the producers cannot play for this run.
        EngineLostError: the cluster has no worker, or producers fail again and again.
    """
    check_scheduler(address)
    from distributed import Client

    client = await Client(address, asynchronous=True, timeout=ANSWERS_WITHIN_S)  # type: ignore[misc]
    running: dict[str, tuple[str, Future]] = {}  # worker -> call, future
    done: dict[str, Produced] = {}  # worker -> its producer's end
    given = str(paths.root.resolve()), prefix, tuple(urls), threads
    failures, workers_at = 0, time.monotonic()
    try:
        while True:
            workers = await _workers(client)
            workers_at = time.monotonic() if workers else workers_at
            if time.monotonic() - workers_at > _NO_WORKER_S:
                raise EngineLostError(f"the Dask cluster at '{address}' has no worker: start one with `dask worker {address}`")
            for worker in set(running) - set(workers):
                reporter().say(f"Dask's worker {worker} is gone, and with it what its producer had not published")
                await running.pop(worker)[1].cancel()  # type: ignore[misc]
            for worker in set(workers) - set(running) - set(done):
                call = uuid4().hex
                future = client.submit(produce_here, *given, call, key=f"produce-{call}", workers=[worker], pure=False, retries=0)
                running[worker] = call, future
                reporter().say(f"a producer begins on Dask's worker {worker}")
            for worker, (_, future) in list(running.items()):
                if future.status == "finished":
                    done[worker], failures = await future.result(), 0
                elif future.status == "error":
                    failures += 1
                    error = await future.exception()
                    reporter().say(f"the producer on Dask's worker {worker} failed: {error}")
                    if isinstance(error, InputError):
                        raise error
                    if failures >= FAILURES_IN_A_ROW:
                        raise EngineLostError(f"{failures} producers in a row failed on Dask: {error}")
                elif future.status == "pending":
                    continue
                del running[worker]  # a lost or cancelled one is begun again
            if done and not running:
                return list(done.values())
            await asyncio.sleep(_LOOK_S)
    finally:
        with suppress(OSError, TimeoutError):  # a lost cluster plays nothing
            await client.run(end_here, [call for call, _ in running.values()], on_error="ignore")
            until = time.monotonic() + _ENDS_WITHIN_S
            while any(future.status == "pending" for _, future in running.values()) and time.monotonic() < until:
                await asyncio.sleep(0.1)
        await client.close()  # pyright: ignore[reportGeneralTypeIssues]  # an asynchronous client's is awaitable


async def _workers(client: "Client") -> Mapping[str, Any]:
    """The cluster's workers by address; none while the scheduler does not answer."""
    try:
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            return (await client.scheduler.identity(n_workers=-1))["workers"]  # type: ignore[union-attr]
    except (OSError, TimeoutError):
        return {}
