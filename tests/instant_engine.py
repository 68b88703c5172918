"""Engines for tests of what happens around the draws: each draws every legal token with the same probability."""

import asyncio
import math
import random
from collections.abc import Callable, Collection

import numpy as np

from entente.decoding.legal_table import END
from entente.decoding.open_set import nth_id, set_size
from entente.inference.engine import Engine, EngineStats
from entente.records.generation import Generation, GenerationRequest
from entente.records.policy_version import BASE, PolicyVersion
from entente.telemetry.errors import EngineError


class InstantEngine:
    """An engine that takes no time: it draws every legal token with the same probability."""

    name = "instant"

    async def generate(self, request: GenerationRequest) -> Generation:
        dice, table, node, ids = random.Random(request.seed), request.table, 0, []
        offsets, token_ids, next_nodes = table.offsets, table.token_ids, table.next_nodes
        while node != END:
            edge = dice.randrange(offsets[node], offsets[node + 1])
            ids.append(token_ids[edge])
            node = next_nodes[edge]
        return Generation(
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -1.0, np.float32),
            policy=BASE,
            worker=self.name,
        )


class UniformEngine(Engine):
    """An `Engine` that draws every legal token with the same probability, so that each logprob is known exactly."""

    name = "uniform"

    def __init__(self, *, fails: Callable[[GenerationRequest], bool] = lambda request: False) -> None:
        self._fails = fails
        self.requests: list[GenerationRequest] = []
        self.policy = BASE

    async def start(self) -> None:
        return

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self._fails(request):
            raise EngineError(f"request {request.request_id} was made to fail")
        dice, state, ids, logprobs = random.Random(request.seed), request.table.start, [], []
        while state != END:
            allowed = request.table.allowed(state)
            ids.append(nth_id(allowed, dice.choice(range(set_size(allowed)))))
            logprobs.append(-math.log(set_size(allowed)))
            state = request.table.advance(state, ids[-1])
        return Generation(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            policy=self.policy,
            worker=self.name,
        )

    async def publish(self, policy: PolicyVersion) -> None:
        self.policy = policy

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        return

    async def stats(self) -> EngineStats:
        return EngineStats(requests=len(self.requests), policy_version=self.policy.version)

    async def close(self) -> None:
        return
