"""The branching tokens of decisions. The loss is a sum over them, in the packed and in the padded layout.

A token is branching if its legal set holds more than one id. A forced token has probability 1 under any weights, so it has no
loss and no gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from storage.gather import Batch
from training.mass_probe import probed


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchingTokens:
    """B branching tokens; K is the size of their largest legal set. A token is listed once for each decision that drew it."""

    batch_row: np.ndarray
    """int64 [B]: row in the whole batch. The tokens of a row are adjacent and in order."""
    completion_index: np.ndarray
    """int64 [B]: index into the completion positions of the whole batch."""
    legal_ids: np.ndarray
    """int64 [B, K]: the legal set. Padding repeats its first id."""
    legal_mask: np.ndarray
    """bool [B, K]: False for padding."""
    chosen: np.ndarray
    """int64 [B]: column of the drawn token in `legal_ids`."""
    behaviour: np.ndarray
    """float32 [B]: behaviour logprob, nats."""
    temperature: np.ndarray
    """float32 [B]."""


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The integers of the ranges [start, start + length), concatenated."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def branching_counts(batch: Batch, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Branching tokens of each row, int64 [rows]."""
    before = np.concatenate([[0], np.cumsum(np.diff(batch.legal_offsets) > 1)])
    rows = np.asarray(rows, np.int64)
    return before[batch.completion_offsets[rows + 1]] - before[batch.completion_offsets[rows]]


def branching_tokens(batch: Batch, rows: Sequence[int] | np.ndarray) -> int:
    """Total branching tokens of the rows."""
    return int(branching_counts(batch, rows).sum())


def branching_decisions(batch: Batch, rows: Sequence[int] | np.ndarray) -> int:
    """Number of the rows that have a branching token."""
    return int((branching_counts(batch, rows) > 0).sum())


def probed_tokens(batch: Batch, rows: Sequence[int] | np.ndarray) -> int:
    """Number of branching tokens of the rows whose legal mass is probed."""
    return int(probed(branching_indices(batch, np.asarray(rows, np.int64))[0]).sum())


def branching_indices(batch: Batch, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The branching tokens of `rows`, in the order of the rows.

    Returns:
        completion_index: int64 [B].
        place: int64 [B]: index into `rows` of the token's row.
    """
    starts = batch.completion_offsets[rows]
    lengths = batch.completion_offsets[rows + 1] - starts
    index = ranges(starts, lengths)
    place = np.repeat(np.arange(len(rows)), lengths)
    branching = batch.legal_offsets[index + 1] - batch.legal_offsets[index] > 1
    return index[branching], place[branching]


def positions_of(batch: Batch, batch_row: np.ndarray, completion_index: np.ndarray) -> np.ndarray:
    """Position of each completion token in its row, counted from the start of the prompt; int64 [B]."""
    return batch.prompt_lens[batch_row] + completion_index - batch.completion_offsets[batch_row]


def branching_fields(batch: Batch, batch_row: np.ndarray, completion_index: np.ndarray) -> dict[str, np.ndarray]:
    """The fields of `BranchingTokens` for these tokens of the batch.

    Raises:
        ValueError: a drawn token is not in its own legal set.
    """
    first = batch.legal_offsets[completion_index]
    sizes = batch.legal_offsets[completion_index + 1] - first
    column = np.arange(int(sizes.max()) if len(sizes) else 1)
    legal_mask = column[None, :] < sizes[:, None]
    legal_ids = batch.legal_ids[first[:, None] + np.where(legal_mask, column[None, :], 0)].astype(np.int64)
    drawn = batch.input_ids[batch.input_offsets[batch_row] + positions_of(batch, batch_row, completion_index)]
    return {
        "batch_row": batch_row,
        "completion_index": completion_index,
        "legal_ids": legal_ids,
        "legal_mask": legal_mask,
        "chosen": _column_of(drawn, legal_ids, legal_mask),
        "behaviour": batch.behaviour_logprobs[completion_index].astype(np.float32),
        "temperature": batch.temperatures[batch_row].astype(np.float32),
    }


def _column_of(drawn: np.ndarray, legal_ids: np.ndarray, legal_mask: np.ndarray) -> np.ndarray:
    """Column of each drawn token in `legal_ids`, int64 [B]."""
    hit = (legal_ids == drawn[:, None]) & legal_mask
    if not hit.any(axis=1).all():
        raise ValueError(f"{int((~hit.any(axis=1)).sum())} drawn tokens are not in their own legal sets")
    return hit.argmax(axis=1)
