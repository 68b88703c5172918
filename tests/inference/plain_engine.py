"""An engine without a model, whose requests are answered in milliseconds.

What it draws depends on seed and version alone, so an answer drawn under another version than it says is found out.
"""

import asyncio
import math
import random
from collections.abc import Collection

import numpy as np

from entente.decoding.legal_table import END
from entente.inference.engine import Engine, EngineStats
from entente.records.policy_version import BASE, BASE_VERSION, PolicyVersion
from entente.records.rows import Generation, GenerationRequest
from entente.telemetry.errors import EngineError, VersionGoneError


def expected_tokens(request: GenerationRequest, version: int) -> list[int]:
    """What any plain engine draws for `request` under `version`."""
    rng, node, ids = random.Random(f"{request.seed}/{version}"), 0, []
    while node != END:
        ids.append(rng.choice(request.table.allowed(node).tolist()))
        node = request.table.advance(node, ids[-1])
    return ids


class PlainEngine(Engine):
    """An `Engine` without a model that serves versions side by side."""

    def __init__(self, *, delay_s: float = 0.0) -> None:
        self.name, self.delay_s = "plain", delay_s
        self.served, self.newest = {BASE_VERSION: BASE}, BASE_VERSION
        self.requests: list[GenerationRequest] = []
        self.dies: EngineError | None = None
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
        try:
            await asyncio.sleep(self.delay_s)
            if self.dies is not None:
                raise self.dies
            if version not in self.served:
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
            decode_ms=1e3 * self.delay_s,
        )

    async def publish(self, policy: PolicyVersion) -> None:
        self.served, self.newest = self.served | {policy.version: policy}, policy.version

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        lasting = [v for v in self.served if v >= oldest or v in keep or v == self.newest]
        self.served = {v: self.served[v] for v in lasting}

    async def stats(self) -> EngineStats:
        return EngineStats(
            requests=len(self.requests),
            prompt_tokens=sum(len(request.prompt_ids) for request in self.requests),
            completion_tokens=self._tokens,
            sampled_tokens=self._tokens,
            running=self._running,
            policy_version=self.newest,
        )

    async def close(self) -> None:
        self.dies = EngineError("this engine was closed")
