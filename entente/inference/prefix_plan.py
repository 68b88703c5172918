"""Plans the prefill of new prompts so that every shared prefix is computed once.

A prompt may copy its prefix from a row that has keys and values, of a request in flight or ended, or from another new prompt that
is computed in an earlier stage. Equal prompts are computed once. This module works on integers and does not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_SHARED = 8
"""Fewest shared tokens for which a copy, or a later stage, is worth its cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """One distinct prompt to compute."""

    request: int
    """Index of the first new prompt that is equal to it."""
    stage: int
    """Stages are computed one after another; the fills of one stage together."""
    start: int
    """First column that is computed; the columns before it are copied."""
    source: int
    """Where they are copied from: an existing row if stage is 0, else an index into `PrefixPlan.fills`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPlan:
    """The fills for the first `len(fill_of)` new prompts."""

    fills: tuple[Fill, ...]
    """Sorted by stage, then by number of new tokens, so that neighbours have similar lengths."""
    fill_of: tuple[int, ...]
    """For each planned prompt, the index of its fill in `fills`."""


def plan_prefixes(prompts: Sequence[np.ndarray], row_prompts: Sequence[np.ndarray], budget: int) -> PrefixPlan:
    """Plan as many `prompts`, in order, as `budget` new tokens allow, and at least one.

    Args:
        prompts: int32 token ids of each new prompt.
        row_prompts: int32 token ids whose keys and values each row holds.
    """
    width = max(len(prompt) for prompt in prompts)
    tokens = np.full((len(row_prompts) + len(prompts), width), -1, np.int32)
    for row, prompt in enumerate(row_prompts):
        tokens[row, : min(len(prompt), width)] = prompt[:width]
    stages = np.full(len(tokens), -1)
    drafts: list[Fill] = []
    draft_of: list[int] = []
    by_content: dict[bytes, int] = {}
    for number, prompt in enumerate(prompts):
        content = prompt.tobytes()
        if content not in by_content:
            filled = len(row_prompts) + len(drafts)
            shared, row = _best_source(prompt, tokens[:filled], stages[:filled])
            budget -= len(prompt) - shared
            if budget < 0 and number:
                break
            tokens[filled, : len(prompt)] = prompt
            stages[filled] = stages[row] + 1 if shared else 0
            source = row - len(row_prompts) if row >= len(row_prompts) else row
            by_content[content] = len(drafts)
            drafts.append(Fill(request=number, stage=int(stages[filled]), start=shared, source=source))
        draft_of.append(by_content[content])
    return _sort_fills(drafts, draft_of, [len(prompt) for prompt in prompts])


def _best_source(prompt: np.ndarray, tokens: np.ndarray, stages: np.ndarray) -> tuple[int, int]:
    """Number of tokens that `prompt` can copy, and the row to copy from: the earliest stage among about equally long matches."""
    if not len(tokens):
        return 0, 0
    differs = tokens[:, : len(prompt) - 1] != prompt[:-1]  # the last token is always computed: its state gives the logits
    shared = np.where(differs.any(1), differs.argmax(1), len(prompt) - 1) if len(prompt) > 1 else np.zeros(len(tokens), np.int64)
    best = int(shared.max())
    if best < LEAST_SHARED:
        return 0, 0
    near = np.flatnonzero(shared > best - LEAST_SHARED)
    earliest = near[stages[near] == stages[near].min()]
    row = int(earliest[shared[earliest].argmax()])
    return int(shared[row]), row


def _sort_fills(drafts: list[Fill], draft_of: list[int], lengths: list[int]) -> PrefixPlan:
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
