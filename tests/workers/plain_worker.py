"""A worker whole in every part but the model, which starts in a second: its engine draws any legal token as likely as another.

What it draws depends on seed and version alone, so an answer drawn under another version than it says is found out. Run as a
program it is a process to be killed, stopped and started again: `python -m tests.workers.plain_worker MODEL ROOT PORT`.
"""

import asyncio
import math
import os
import random
import sys
import threading
from collections.abc import Collection
from functools import partial
from pathlib import Path

import numpy as np

from decoding.codec import Codec
from decoding.legal_table import END
from inference.engine import EngineStats
from inference.host import EngineHost
from inference.supervisor import EngineSupervisor
from records.generation import Generation, GenerationCost, GenerationRequest
from records.policy_version import BASE, BASE_VERSION, PolicyVersion
from telemetry.errors import EngineError, EntenteError, VersionGoneError
from telemetry.log_tail import LogTail
from workers.worker import bind, serve, worker_app
from workers.worker_service import Worker


def expected_tokens(request: GenerationRequest, version: int) -> list[int]:
    """What any plain engine draws for `request` under `version`."""
    dice, node, ids = random.Random(f"{request.seed}/{version}"), 0, []
    while node != END:
        ids.append(dice.choice(request.table.allowed(node).tolist()))
        node = request.table.advance(node, ids[-1])
    return ids


class PlainEngine:
    """An `Engine` that serves versions side by side, or merged: then one at a time, swapped once requests in flight are done."""

    def __init__(self, name: str = "plain", *, delay_s: float = 0.0, slots: int = 10**6, merged: bool = False) -> None:
        self.name = name
        self.delay_s, self.merged = delay_s, merged
        self.served, self.newest = {BASE_VERSION: BASE}, BASE_VERSION
        self.requests: list[GenerationRequest] = []
        self.most_at_once = 0
        self.dies: EngineError | None = None
        self._room = asyncio.Semaphore(slots)
        self._running = self._tokens = 0

    async def start(self) -> None:
        await asyncio.sleep(0)

    async def generate(self, request: GenerationRequest) -> Generation:
        version = self.newest if request.version is None else request.version
        if version not in self.served:
            raise VersionGoneError(f"version {version} is not served")
        policy = self.served[version]
        self.requests.append(request)
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            async with self._room:
                await asyncio.sleep(self.delay_s)
            if self.dies is not None:
                raise self.dies
            if not self.merged and version not in self.served:
                raise VersionGoneError(f"version {version} was retired")
        finally:
            self._running -= 1
        ids = expected_tokens(request, version)
        self._tokens += len(ids)
        sizes = np.diff(request.table.legal_sets(ids)[1])
        return Generation(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array([-math.log(size) for size in sizes], np.float32),
            policy=policy,
            worker=self.name,
            cost=GenerationCost(decode_ms=1e3 * self.delay_s),
        )

    async def publish(self, policy: PolicyVersion) -> None:
        while self.merged and self._running:
            await asyncio.sleep(0.005)
        self.served = ({} if self.merged else self.served) | {policy.version: policy}
        self.newest = policy.version

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        lasting = [v for v in self.served if v >= oldest or v in keep or v == self.newest]
        self.served = {v: self.served[v] for v in lasting}

    async def stats(self) -> EngineStats:
        return EngineStats(
            requests=len(self.requests),
            prompt_tokens=sum(len(request.prompt_ids) for request in self.requests),
            completion_tokens=self._tokens,
            drawn_tokens=self._tokens,
            running=self._running,
            policy_version=self.newest,
        )

    async def close(self) -> None:
        self.dies = EngineError("this engine was closed")


class WorkerHere:
    """A worker on a thread of this process, over real HTTP; its engine can be reached into."""

    def __init__(self, engine: PlainEngine, model: Path, root: Path, *, key: str | None = None, port: int = 0) -> None:
        self.engine, self._model, self._root, self._key = engine, model, root, key
        self.built = [engine]
        self._listener = bind("127.0.0.1", port, key)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._host = EngineHost()
        self._given = False
        self.ended: EntenteError | None = None
        supervisor = EngineSupervisor(self._build, restarts=2)
        vocabulary = Codec(model).vocabulary_size
        self.log = LogTail()
        self.app = worker_app(supervisor, self._host, model, root, key, vocabulary, max_rank=64, log=self.log)
        self.worker: Worker = self.app.state.worker
        self._up = threading.Event()
        self._server: threading.Thread | None = None

    def _build(self) -> PlainEngine:
        if self._given:
            self.built.append(PlainEngine(self.engine.name, delay_s=self.engine.delay_s, merged=self.engine.merged))
        self._given = True
        return self.built[-1]

    def begin(self) -> "WorkerHere":
        """Listen, and start the engine; `ended` will be why it ended."""

        def run() -> None:
            try:
                serve(self.app, self._listener, drain_s=1, on_ready=self._up.set)
            except EntenteError as error:
                self.ended = error

        self._server = threading.Thread(target=run)
        self._server.start()
        return self

    def start(self) -> "WorkerHere":
        """Begin, and wait until it is ready."""
        self.begin()
        assert self._up.wait(timeout=20)
        return self

    def stop(self) -> None:
        self.worker.on_failure()  # ends the server
        assert self._server is not None
        self._server.join(timeout=20)
        assert not self._server.is_alive()
        self._host.close()
        self._listener.close()


def main() -> None:
    """Serve a plain engine in this process until SIGTERM."""
    model, root, port = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    delay_s = float(os.environ.get("PLAIN_DELAY_S", "0"))
    listener = bind("127.0.0.1", port, None)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    host, name = EngineHost(), f"plain:{listener.getsockname()[1]}"
    engine = EngineSupervisor(lambda: PlainEngine(name, delay_s=delay_s, merged="PLAIN_MERGED" in os.environ), restarts=2)
    app = worker_app(engine, host, model, root, None, Codec(model).vocabulary_size)
    try:
        serve(app, listener, on_ready=partial(print, address, flush=True))
    except EntenteError as error:
        sys.exit(str(error))
    finally:
        host.close()


if __name__ == "__main__":
    main()
