"""How new prompts are computed with every shared prefix once: which row each takes over, from where on it is new, in what order.

A prompt may go on from a row that stands (its keys and values are there, of a request in flight or of one that ended) or from
another new prompt that is computed a stage earlier. Equal prompts are computed once. Pure integers; knows nothing of torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_SHARED = 8
"""Tokens below which a shared beginning is not worth a copy, or a stage of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """One distinct prompt to be computed."""

    request: int
    """Which of the new prompts stands for it: the first that is equal."""
    stage: int
    """Stages are computed one after another; all of one stage together."""
    start: int
    """First column that is computed; those before it are copied."""
    source: int
    """Where they are copied from: a standing row if stage is 0, else a fill by its place in `PrefixPlan.fills`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPlan:
    """What to compute for the first `len(fill_of)` of the new prompts."""

    fills: tuple[Fill, ...]
    """Sorted by stage, and within one by how much is new, so that neighbours are about as long."""
    fill_of: tuple[int, ...]
    """For each new prompt taken, the fill that computes it, by its place in `fills`."""


def plan_prefixes(prompts: Sequence[np.ndarray], standing: Sequence[np.ndarray], budget: int) -> PrefixPlan:
    """Plan as many `prompts` (int32, in order) as `budget` new tokens allow, at least one; `standing` are the rows' prompts."""
    width = max(len(prompt) for prompt in prompts)
    known = np.full((len(standing) + len(prompts), width), -1, np.int32)
    for row, prompt in enumerate(standing):
        known[row, : min(len(prompt), width)] = prompt[:width]
    stages = np.full(len(known), -1)
    drafts: list[Fill] = []
    draft_of: list[int] = []
    by_content: dict[bytes, int] = {}
    for number, prompt in enumerate(prompts):
        content = prompt.tobytes()
        if content not in by_content:
            filled = len(standing) + len(drafts)
            shared, row = _best_source(prompt, known[:filled], stages[:filled])
            budget -= len(prompt) - shared
            if budget < 0 and number:
                break
            known[filled, : len(prompt)] = prompt
            stages[filled] = stages[row] + 1 if shared else 0
            source = row - len(standing) if row >= len(standing) else row
            by_content[content] = len(drafts)
            drafts.append(Fill(request=number, stage=int(stages[filled]), start=shared, source=source))
        draft_of.append(by_content[content])
    return _in_order(drafts, draft_of, [len(prompt) for prompt in prompts])


def _best_source(prompt: np.ndarray, known: np.ndarray, stages: np.ndarray) -> tuple[int, int]:
    """Tokens that `prompt` may take over, and the row to take them from: of those that share about as much, the earliest."""
    if not len(known):
        return 0, 0
    differs = known[:, : len(prompt) - 1] != prompt[:-1]  # the last token is computed, since what follows it is asked for
    shared = np.where(differs.any(1), differs.argmax(1), len(prompt) - 1) if len(prompt) > 1 else np.zeros(len(known), np.int64)
    best = int(shared.max())
    if best < LEAST_SHARED:
        return 0, 0
    near = np.flatnonzero(shared > best - LEAST_SHARED)
    earliest = near[stages[near] == stages[near].min()]
    row = int(earliest[shared[earliest].argmax()])
    return int(shared[row]), row


def _in_order(drafts: list[Fill], draft_of: list[int], lengths: list[int]) -> PrefixPlan:
    def rank(place: int) -> tuple[int, int]:
        return drafts[place].stage, lengths[drafts[place].request] - drafts[place].start

    order = sorted(range(len(drafts)), key=rank)
    place_of = {draft: place for place, draft in enumerate(order)}
    fills = tuple(
        Fill(
            request=drafts[draft].request,
            stage=drafts[draft].stage,
            start=drafts[draft].start,
            source=place_of[drafts[draft].source] if drafts[draft].stage else drafts[draft].source,
        )
        for draft in order
    )
    return PrefixPlan(fills=fills, fill_of=tuple(place_of[draft] for draft in draft_of))
