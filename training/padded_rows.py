"""Padded micro-batches: the plain layout, kept as the oracle for every faster one.

Rows are padded on the right. Only branching positions (more than one legal token) are listed: forced tokens carry no loss.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from storage.gather import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows:
    """Some decisions of a batch, padded, with their branching tokens flattened. R rows, L longest row, B branching
    tokens, K largest legal set.
    """

    input_ids: np.ndarray
    """int64 [R, L]; padding is 0 and masked."""
    attention_mask: np.ndarray
    """int64 [R, L]; 1 where a token is real."""
    token_row: np.ndarray
    """int64 [B]: row of each branching token."""
    token_position: np.ndarray
    """int64 [B]: position whose hidden state predicts it, i.e. its own position minus 1."""
    legal_ids: np.ndarray
    """int64 [B, K]: the legal set; padding repeats its first id and is masked."""
    legal_mask: np.ndarray
    """bool [B, K]."""
    chosen: np.ndarray
    """int64 [B]: column of the drawn token in legal_ids."""
    behaviour: np.ndarray
    """float32 [B]: behaviour logprob, nats."""
    temperature: np.ndarray
    """float32 [B]."""
    batch_row: np.ndarray
    """int64 [B]: row within the whole batch, for advantages."""
    completion_index: np.ndarray
    """int64 [B]: place among the completion positions of the whole batch."""


def branching_tokens(batch: Batch, rows: Sequence[int]) -> int:
    """Branching tokens of some rows: the constant denominator of an update on them."""
    branching = np.diff(batch.legal_offsets) > 1
    return sum(int(branching[batch.completion_offsets[row] : batch.completion_offsets[row + 1]].sum()) for row in rows)


def branching_decisions(batch: Batch, rows: Sequence[int]) -> int:
    """Those of some rows that have a branching token."""
    return sum(branching_tokens(batch, [row]) > 0 for row in rows)


def padded_micro_batches(batch: Batch, rows: Sequence[int], rows_each: int) -> Iterator[PaddedRows]:
    """Cut some rows of `batch` into micro-batches of at most `rows_each` decisions, in their order."""
    for first in range(0, len(rows), rows_each):
        yield pad(batch, rows[first : first + rows_each])


def pad(batch: Batch, rows: Sequence[int]) -> PaddedRows:
    """Pad the decisions `rows` of `batch`."""
    lengths = np.diff(batch.input_offsets)
    longest = int(lengths[list(rows)].max())
    input_ids = np.zeros((len(rows), longest), np.int64)
    mask = np.zeros((len(rows), longest), np.int64)
    places: list[tuple[int, int, int, int]] = []  # row here, position, completion index in the batch, row in the batch
    sizes = np.diff(batch.legal_offsets)
    for here, row in enumerate(rows):
        low, high = batch.input_offsets[row], batch.input_offsets[row + 1]
        input_ids[here, : high - low] = batch.input_ids[low:high]
        mask[here, : high - low] = 1
        for index in range(batch.completion_offsets[row], batch.completion_offsets[row + 1]):
            if sizes[index] > 1:
                places.append((here, batch.prompt_lens[row] + index - batch.completion_offsets[row], index, row))
    token_row, position, index, batch_row = (
        (np.array(column, np.int64) for column in zip(*places, strict=True)) if places else [np.empty(0, np.int64)] * 4
    )
    widest = int(sizes[index].max()) if len(index) else 1
    column = np.arange(widest)
    legal_mask = column[None, :] < sizes[index][:, None]
    legal_at = batch.legal_offsets[index][:, None] + np.where(legal_mask, column[None, :], 0)
    legal_ids = batch.legal_ids[legal_at].astype(np.int64)
    drawn = input_ids[token_row, position]
    return PaddedRows(
        input_ids=input_ids,
        attention_mask=mask,
        token_row=token_row,
        token_position=position - 1,
        legal_ids=legal_ids,
        legal_mask=legal_mask,
        chosen=_column_of(drawn, legal_ids, legal_mask),
        behaviour=batch.behaviour_logprobs[index].astype(np.float32),
        temperature=batch.temperatures[batch_row].astype(np.float32),
        batch_row=batch_row,
        completion_index=index,
    )


def _column_of(drawn: np.ndarray, legal_ids: np.ndarray, legal_mask: np.ndarray) -> np.ndarray:
    """Column of each drawn token in its legal set.

    Raises:
        ValueError: a drawn token is not in its own legal set.
    """
    hit = (legal_ids == drawn[:, None]) & legal_mask
    if not hit.any(axis=1).all():
        raise ValueError(f"{int((~hit.any(axis=1)).sum())} drawn tokens are not in their own legal sets")
    return hit.argmax(axis=1)
