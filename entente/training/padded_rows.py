"""Padded micro-batches: the simple layout, and the oracle for the packed one. Rows are padded on the right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from entente.training.branching import BranchingTokens, branching_fields, branching_indices, positions_of
from storage.gather import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows(BranchingTokens):
    """Decisions of a batch, padded. R: rows; L: tokens of the longest row; B as in `BranchingTokens`."""

    input_ids: np.ndarray
    """int64 [R, L]; padding is 0."""
    attention_mask: np.ndarray
    """int64 [R, L]: 0 for padding, else 1."""
    token_row: np.ndarray
    """int64 [B]: row of each branching token."""
    token_position: np.ndarray
    """int64 [B]: position whose hidden state predicts the token: its own position minus 1."""

    @property
    def tokens(self) -> int:
        """Tokens of the rows, without padding."""
        return int(self.attention_mask.sum())


def padded_micro_batches(batch: Batch, rows: Sequence[int], rows_each: int) -> Iterator[PaddedRows]:
    """Micro-batches of at most `rows_each` of the rows, in order."""
    for first in range(0, len(rows), rows_each):
        yield pad(batch, rows[first : first + rows_each])


def pad(batch: Batch, rows: Sequence[int] | np.ndarray) -> PaddedRows:
    """Pad the decisions `rows` of `batch`.

    Raises:
        ValueError: a drawn token is not in its own legal set.
    """
    chosen = np.asarray(rows, np.int64)
    lengths = np.diff(batch.input_offsets)[chosen]
    input_ids = np.zeros((len(chosen), int(lengths.max())), np.int64)
    mask = np.zeros_like(input_ids)
    for here, (row, length) in enumerate(zip(chosen, lengths, strict=True)):
        input_ids[here, :length] = batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]]
        mask[here, :length] = 1
    index, place = branching_indices(batch, chosen)
    fields = branching_fields(batch, chosen[place], index)
    return PaddedRows(
        **fields,
        input_ids=input_ids,
        attention_mask=mask,
        token_row=place,
        token_position=positions_of(batch, chosen[place], index) - 1,
    )
