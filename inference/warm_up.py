"""Throw-away requests for warming up an engine: they use mask, seeded draw, log-probabilities and a forced token."""

import numpy as np

from decoding.legal_table import END, LegalTable
from records.generation import GenerationRequest


def throwaway_request(request_id: str, eos_id: int, *, prompt: int = 8, tokens: int = 2, first: int = 0) -> GenerationRequest:
    """A request with `prompt` prompt ids, of which the first is `first`, and `tokens` completion tokens.

    Each token but the last has three legal ids; the last is forced.
    """
    others = [token for token in range(4) if token != eos_id][:3]
    nodes = tokens - 1
    table = LegalTable(
        offsets=np.append(3 * np.arange(nodes + 1), 3 * nodes + 1).astype(np.int32),
        token_ids=np.array([*(others * nodes), eos_id], np.int32),
        next_nodes=np.append(np.repeat(np.arange(1, nodes + 1), 3), END).astype(np.int32),
        longest=tokens,
    )
    return GenerationRequest(request_id=request_id, prompt_ids=[first, *[eos_id] * (prompt - 1)], table=table, seed=first)
