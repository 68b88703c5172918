"""Rows that an engine drew, as the batch that the trainer takes, kept in a file between two stages."""

from dataclasses import fields
from pathlib import Path

import numpy as np

from benchmarks.trainer_cases import offsets_of
from smoke.oracle import Drawn
from storage.gather import Batch


def batch_of(drawn: Drawn) -> Batch:
    """The rows of `drawn`. Requests with one prompt are one advantage group; returns are made up, and never zero."""
    groups: dict[tuple[int, ...], int] = {}
    legal = [request.table.legal_sets(generation.token_ids.tolist()) for request, generation in drawn]
    dice = np.random.default_rng(0)
    return Batch(
        decision_ids=np.arange(len(drawn), dtype=np.int64),
        input_ids=np.concatenate([[*each.prompt_ids, *found.token_ids] for each, found in drawn]).astype(np.int32),
        input_offsets=offsets_of([len(request.prompt_ids) + len(generation.token_ids) for request, generation in drawn]),
        prompt_lens=np.array([len(request.prompt_ids) for request, _ in drawn], np.int32),
        behaviour_logprobs=np.concatenate([generation.logprobs for _, generation in drawn]).astype(np.float32),
        completion_offsets=offsets_of([len(generation.token_ids) for _, generation in drawn]),
        legal_ids=np.concatenate([ids for ids, _ in legal]).astype(np.int32),
        legal_offsets=offsets_of(np.concatenate([np.diff(offsets) for _, offsets in legal]).tolist()),
        temperatures=np.array([request.temperature for request, _ in drawn], np.float32),
        returns=dice.uniform(0.5, 1.5, len(drawn)) * dice.choice([-1, 1], len(drawn)),
        advantage_groups=np.array([groups.setdefault(tuple(request.prompt_ids), len(groups)) for request, _ in drawn], np.int32),
        policy_versions=np.zeros(len(drawn), np.int32),
    )


def first_rows(batch: Batch, count: int) -> Batch:
    """The first `count` rows of a batch."""
    tokens, completions = int(batch.input_offsets[count]), int(batch.completion_offsets[count])
    return Batch(
        decision_ids=batch.decision_ids[:count],
        input_ids=batch.input_ids[:tokens],
        input_offsets=batch.input_offsets[: count + 1],
        prompt_lens=batch.prompt_lens[:count],
        behaviour_logprobs=batch.behaviour_logprobs[:completions],
        completion_offsets=batch.completion_offsets[: count + 1],
        legal_ids=batch.legal_ids[: int(batch.legal_offsets[completions])],
        legal_offsets=batch.legal_offsets[: completions + 1],
        temperatures=batch.temperatures[:count],
        returns=batch.returns[:count],
        advantage_groups=batch.advantage_groups[:count],
        policy_versions=batch.policy_versions[:count],
    )


def write_rows(file: Path, drawn: Drawn) -> None:
    """Store the batch of `drawn`."""
    batch = batch_of(drawn)
    np.savez(file, **{each.name: value for each in fields(Batch) if (value := getattr(batch, each.name)) is not None})


def read_rows(file: Path) -> Batch:
    """The batch that `write_rows` stored."""
    with np.load(file) as stored:
        return Batch(**dict(stored))
