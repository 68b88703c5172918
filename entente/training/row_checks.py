"""Finds faulty rows before the forward. A faulty row and its whole advantage group, or its whole lesson, are not trained on.

Without one of its members, a group would compare the others with a wrong mean, and a teacher's probabilities would not add up.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from entente.decoding.open_set import excluded_ids
from entente.training.micro_batches import ranges
from storage.gather import Batch

_ABOVE_ZERO = 1e-3
"""Nats by which a rounded log-probability may exceed 0."""


def find_trainable_rows(batch: Batch, vocabulary: int, longest: int) -> tuple[np.ndarray, list[tuple[int, str]]]:
    """Check all rows.

    Args:
        vocabulary: number of the model's token ids.
        longest: tokens of the longest sequence that it reads.

    Returns:
        int64, ascending: rows whose advantage group has no faulty row; and the decision ids of the faulty rows, with the reasons.
    """
    faults: dict[int, str] = {}
    for bad, why in _faults(batch, vocabulary, longest):
        for row in np.flatnonzero(bad).tolist():
            faults.setdefault(row, why)
    out = np.zeros(len(batch.decision_ids), bool)
    out[list(faults)] = True
    grouped = batch.advantage_groups >= 0
    out |= grouped & np.isin(batch.advantage_groups, batch.advantage_groups[out & grouped])
    return np.flatnonzero(~out), [(int(batch.decision_ids[row]), faults[row]) for row in sorted(faults)]


def _faults(batch: Batch, vocabulary: int, longest: int) -> list[tuple[np.ndarray, str]]:
    """The checks: a bool mask [rows] of faulty rows, and the reason. A row is reported with the first reason that applies."""
    n = len(batch.decision_ids)
    prompts, lengths = batch.prompt_lens.astype(np.int64), np.diff(batch.input_offsets)
    positions = np.diff(batch.completion_offsets)
    disagree = (prompts < 1) | (lengths - prompts != positions) | (positions < 0)
    covered = min(len(batch.legal_offsets) - 1, len(batch.behaviour_logprobs))
    disagree |= batch.completion_offsets[1:] > covered
    # The checks below look tokens up by these lengths, so they leave out rows whose lengths disagree.
    row = np.repeat(np.arange(n), np.where(disagree, 0, positions))
    agreeing = ~disagree
    at = ranges(batch.completion_offsets[:-1][agreeing], positions[agreeing])
    token = ranges((batch.input_offsets[:-1] + prompts)[agreeing], positions[agreeing])
    drawn, logprobs = batch.input_ids[token], batch.behaviour_logprobs[at]
    sizes = batch.legal_offsets[at + 1] - batch.legal_offsets[at]
    is_open, outside, unknown = _open_sets(batch, at, drawn, vocabulary)
    without, foreign = ~is_open, np.zeros(n, bool)
    listed = np.where(is_open, 0, np.maximum(sizes, 0))
    legal = batch.legal_ids[ranges(batch.legal_offsets[at], listed)]
    owner = np.repeat(np.arange(len(at)), listed)
    without[owner[legal == drawn[owner]]] = False
    foreign[row[owner[(legal < 0) | (legal >= vocabulary)]]] = True
    foreign[row[unknown]] = True
    row_of_token = np.repeat(np.arange(n), lengths)
    beyond = (batch.input_ids < 0) | (batch.input_ids >= vocabulary)
    if len(row_of_token) == len(beyond):
        foreign[row_of_token[beyond]] = True

    def rows_of(bad: np.ndarray) -> np.ndarray:
        found = np.zeros(n, bool)
        found[row[bad]] = True
        return found

    return [
        (disagree, "the lengths of its tokens, log-probabilities and legal sets disagree"),
        (lengths > longest, f"it is longer than the {longest} tokens that the model reads"),
        (foreign, f"it holds token ids beyond the model's vocabulary of {vocabulary}"),
        (rows_of(without), "a legal set lacks the token that was drawn from it"),
        (rows_of(outside), "a thought holds a token that no thought may hold"),
        (rows_of(~np.isfinite(logprobs)), "a behaviour log-probability is not a finite number"),
        (rows_of(logprobs > _ABOVE_ZERO), "a behaviour log-probability is above 0"),
        (~(np.isfinite(batch.temperatures) & (batch.temperatures > 0)), "its temperature is not a positive number"),
        (~np.isfinite(batch.returns), "its return is not a finite number"),
    ]


def _open_sets(batch: Batch, at: np.ndarray, drawn: np.ndarray, vocabulary: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Check the open sets of the completion positions `at`, where the tokens `drawn` were drawn.

    Returns:
        Three bool masks [positions]: the set is open; it is open and lacks the drawn token; it is open and names ids that the
        model does not have.
    """
    first = batch.legal_offsets[at]
    sizes = batch.legal_offsets[at + 1] - first
    is_open = sizes >= 2
    is_open[is_open] = batch.legal_ids[first[is_open]] < 0
    outside, unknown = np.zeros_like(is_open), np.zeros_like(is_open)
    excluded = excluded_ids(batch.legal_ids, first[is_open], sizes[is_open])
    end, thought = batch.legal_ids[first[is_open] + 1], drawn[is_open]
    outside[is_open] = (thought[:, None] == excluded).any(1) | (thought >= end)
    unknown[is_open] = (excluded >= end[:, None]).any(1) | (end > vocabulary)
    return is_open, outside, unknown


def select_rows(batch: Batch, rows: Sequence[int] | np.ndarray) -> Batch:
    """A batch of these rows, in the order given. The lengths of the rows must agree with their offsets."""
    chosen = np.asarray(rows, np.int64)

    def parts(offsets: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lengths = offsets[which + 1] - offsets[which]
        return ranges(offsets[which], lengths), np.concatenate([[0], np.cumsum(lengths)])

    tokens, input_offsets = parts(batch.input_offsets, chosen)
    positions, completion_offsets = parts(batch.completion_offsets, chosen)
    legal, legal_offsets = parts(batch.legal_offsets, positions)
    taken: dict[str, Any] = {
        "input_ids": batch.input_ids[tokens],
        "input_offsets": input_offsets,
        "behaviour_logprobs": batch.behaviour_logprobs[positions],
        "completion_offsets": completion_offsets,
        "legal_ids": batch.legal_ids[legal],
        "legal_offsets": legal_offsets,
    }
    others = [field.name for field in fields(Batch) if field.name not in taken]
    return Batch(**taken, **{name: getattr(batch, name)[chosen] for name in others})
