"""The masked policy as transformers computes it, position by position: the oracle of every engine's log-probabilities."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from entente.records.rows import Generation, GenerationRequest


def expected_logprobs(model: Any, request: GenerationRequest, generation: Generation) -> np.ndarray:
    """Masked log-probabilities by a plain forward of transformers over the whole text, and a loop over positions."""
    import torch

    ids = [*request.prompt_ids, *generation.token_ids.tolist()]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double() / request.temperature
    legal_ids, offsets = request.table.legal_sets(generation.token_ids.tolist())
    found = []
    for position, token in enumerate(generation.token_ids.tolist()):
        row = logits[len(request.prompt_ids) + position - 1]
        legal = legal_ids[offsets[position] : offsets[position + 1]].tolist()
        if legal[0] < 0:
            legal = [id_ for id_ in range(legal[1]) if id_ != -1 - legal[0]]
        found.append(float(row[token] - torch.logsumexp(row[legal], 0)))
    return np.array(found)


def gap(model: Any, requests: Sequence[GenerationRequest], generations: Sequence[Generation]) -> float:
    """Largest difference of a log-probability from the one expected."""
    return max(
        float(np.abs(expected_logprobs(model, request, generation) - generation.logprobs).max())
        for request, generation in zip(requests, generations, strict=True)
    )


def same(some: Sequence[Generation], others: Sequence[Generation]) -> bool:
    """The same completions with the same log-probabilities."""
    return all(
        one.token_ids.tolist() == other.token_ids.tolist() and np.abs(one.logprobs - other.logprobs).max() < 1e-4
        for one, other in zip(some, others, strict=True)
    )
