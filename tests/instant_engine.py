"""An engine for tests of what happens around the draws."""

import random

import numpy as np

from entente.decoding.legal_table import END
from entente.records.generation import Generation, GenerationRequest
from entente.records.policy_version import BASE


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
