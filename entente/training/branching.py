"""The branching tokens of decisions, over which the loss is a sum; and padded rows, the oracle of the packed layout.

A token is branching if its legal set holds more than one id. A forced token has probability 1 under any weights, so it has no
loss and no gradient. The legal set of an order token is a list of ids, that of a thought token an open set
(entente/decoding/open_set.py). No list of the ids of an open set is ever made.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from entente.decoding.open_set import excluded_ids
from storage.gather import Batch

SHARE = 1 / 8
"""Share of the branching tokens whose legal mass is computed."""
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchingTokens:
    """B branching tokens: D order tokens, whose largest legal set has K ids, and E thought tokens.

    A token is listed once for each decision that drew it. Order tokens and thought tokens each keep the order of the B tokens.
    """

    batch_row: np.ndarray
    """int64 [B]: row in the whole batch. The tokens of a row are adjacent and in order."""
    completion_index: np.ndarray
    """int64 [B]: index into the completion positions of the whole batch."""
    in_thought: np.ndarray
    """bool [B]: True for thought tokens."""
    legal_ids: np.ndarray
    """int64 [D, K]: the legal set. Padding repeats its first id."""
    legal_mask: np.ndarray
    """bool [D, K]: False for padding."""
    chosen: np.ndarray
    """int64 [D]: column of the drawn token in `legal_ids`."""
    thought_ids: np.ndarray
    """int64 [E]: the drawn token of each thought token."""
    excluded: np.ndarray
    """int64 [E, X]: the ids that its open set leaves out. Padding repeats its first."""
    end: np.ndarray
    """int64 [E]: the end of its open set."""
    behaviour: np.ndarray
    """float32 [B]: behaviour logprob, nats."""
    temperature: np.ndarray
    """float32 [B]."""

    @property
    def has_thought(self) -> bool:
        """Whether any of the tokens is a thought token."""
        return len(self.thought_ids) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows(BranchingTokens):
    """Decisions of a batch, padded on the right. R: rows; L: tokens of the longest row; B as in `BranchingTokens`."""

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


def thought_tokens(batch: Batch, rows: Sequence[int] | np.ndarray) -> int:
    """Total thought tokens of the rows; they are branching tokens too."""
    return int(in_thought(batch, branching_indices(batch, np.asarray(rows, np.int64))[0]).sum())


def probed_tokens(batch: Batch, rows: Sequence[int] | np.ndarray) -> int:
    """Number of order tokens of the rows whose legal mass is probed."""
    index = branching_indices(batch, np.asarray(rows, np.int64))[0]
    return int(probed(index[~in_thought(batch, index)]).sum())


def in_thought(batch: Batch, completion_index: np.ndarray) -> np.ndarray:
    """Which of these branching tokens are thought tokens, bool [tokens]."""
    return batch.legal_ids[batch.legal_offsets[completion_index]] < 0


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
    thought = in_thought(batch, completion_index)
    first = batch.legal_offsets[completion_index]
    sizes = (batch.legal_offsets[completion_index + 1] - first)[~thought]
    column = np.arange(int(sizes.max()) if len(sizes) else 1)
    legal_mask = column[None, :] < sizes[:, None]
    legal_ids = batch.legal_ids[first[~thought, None] + np.where(legal_mask, column[None, :], 0)].astype(np.int64)
    drawn = batch.input_ids[batch.input_offsets[batch_row] + positions_of(batch, batch_row, completion_index)]
    open_sizes = (batch.legal_offsets[completion_index + 1] - first)[thought]
    excluded = excluded_ids(batch.legal_ids, first[thought], open_sizes)
    end = batch.legal_ids[first[thought] + 1].astype(np.int64)
    thought_ids = drawn[thought].astype(np.int64)
    if outside := int(((thought_ids[:, None] == excluded).any(1) | (thought_ids >= end)).sum()):
        raise ValueError(f"{outside} drawn tokens are not in their own open sets")
    return {
        "batch_row": batch_row,
        "completion_index": completion_index,
        "in_thought": thought,
        "legal_ids": legal_ids,
        "legal_mask": legal_mask,
        "chosen": _column_of(drawn[~thought], legal_ids, legal_mask),
        "thought_ids": thought_ids,
        "excluded": excluded,
        "end": end,
        "behaviour": batch.behaviour_logprobs[completion_index].astype(np.float32),
        "temperature": batch.temperatures[batch_row].astype(np.float32),
    }


def _column_of(drawn: np.ndarray, legal_ids: np.ndarray, legal_mask: np.ndarray) -> np.ndarray:
    """Column of each drawn token in `legal_ids`, int64 [B]."""
    hit = (legal_ids == drawn[:, None]) & legal_mask
    if not hit.any(axis=1).all():
        raise ValueError(f"{int((~hit.any(axis=1)).sum())} drawn tokens are not in their own legal sets")
    return hit.argmax(axis=1)


def probed(completion_index: np.ndarray) -> np.ndarray:
    """bool [positions]: which of these completion positions of a batch are probed for their legal mass, which needs the logits of
    the whole vocabulary: token c is if frac(c * golden ratio) < 1 / 8. Multiples of the golden ratio are spread evenly (Weyl), so
    every part of a batch is sampled. The choice depends only on the token's place in the batch, not on how an update is split.
    """
    return np.mod(np.asarray(completion_index, np.float64) * _GOLDEN, 1.0) < SHARE


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
