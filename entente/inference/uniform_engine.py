"""An engine without a model, which samples legal tokens uniformly: for dry runs and tests, and as an example.

A run does not start with it, because its log-probabilities are not the trainer's.
"""

import math
import random
from collections.abc import Collection

import numpy as np

from entente.decoding.legal_table import END
from entente.decoding.open_set import nth_id, set_size
from entente.inference.engine import Engine, EngineStats
from entente.records.policy_version import BASE, PolicyVersion
from entente.records.rows import Generation, GenerationRequest


class UniformEngine(Engine):
    name = "uniform"

    def __init__(self) -> None:
        self.policy, self._requests = BASE, 0

    async def start(self) -> None: ...

    async def generate(self, request: GenerationRequest) -> Generation:
        rng, node, sampled, logprobs = random.Random(request.seed), request.table.start, [], []
        while node != END:
            legal = request.table.allowed(node)
            sampled.append(nth_id(legal, rng.randrange(set_size(legal))))
            logprobs.append(-math.log(set_size(legal)))
            node = request.table.advance(node, sampled[-1])
        self._requests += 1
        return Generation(
            token_ids=np.array(sampled, np.int32),
            logprobs=np.array(logprobs, np.float32),
            policy=self.policy,
            worker=self.name,
        )

    async def publish(self, policy: PolicyVersion) -> None:
        """Later completions carry this version; sampling does not change."""
        self.policy = policy

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats(requests=self._requests, policy_version=self.policy.version)

    async def close(self) -> None: ...
