"""The plan holds every decision's tokens once, in depth-first order, within the budget."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entente.training.micro_batches import MicroBatch, plan
from tests.training.batches import batch_of, three_levels

ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 1), max_size=6)),
    min_size=1,
    max_size=14,
)


def paths(micro: MicroBatch) -> list[tuple[int, ...]]:
    """Tokens from the root to each token, by the rule of the layout alone."""
    place = np.arange(len(micro.input_ids))
    sees = (place[None, :] <= place[:, None]) & (place[:, None] < micro.leaves[None, :])
    return [tuple(micro.input_ids[row].tolist()) for row in sees]


def needed(batch, row: int, index: int) -> tuple[int, ...]:
    """What stands before a completion token of a row, read from the batch."""
    first = batch.input_offsets[row]
    before = batch.prompt_lens[row] + index - batch.completion_offsets[row]
    return tuple(batch.input_ids[first : first + before].tolist())


def branching_of(batch) -> list[tuple[int, int]]:
    """Row and completion index of every branching token."""
    return [
        (row, index)
        for row in range(len(batch.prompt_lens))
        for index in range(batch.completion_offsets[row], batch.completion_offsets[row + 1])
        if batch.legal_offsets[index + 1] - batch.legal_offsets[index] > 1
    ]


@settings(max_examples=150)
@given(rows=ROWS, budget=st.integers(1, 40))
def test_any_rows_are_laid_out_once_and_can_be_read_back(rows, budget):
    batch = batch_of(rows)
    made = plan(batch, range(len(rows)), budget)
    seen = []
    for micro in made:
        trail = paths(micro)
        assert len(set(trail)) == len(trail), "a token path stands twice"
        assert [len(path) - 1 for path in trail] == micro.positions.tolist()
        for token in range(len(micro.batch_row)):
            row, index = int(micro.batch_row[token]), int(micro.completion_index[token])
            assert trail[micro.hidden_at[micro.token_hidden[token]]] == needed(batch, row, index)
            seen.append((row, index))
        whole = {needed(batch, row, index) for row, index in zip(micro.batch_row, micro.completion_index, strict=True)}
        assert {path for end in whole for path in (end[:stop] for stop in range(1, len(end) + 1))} == set(trail), "an idle token"
        alone = len(set(micro.batch_row.tolist())) == 1
        assert len(trail) <= budget or alone
        assert micro.segment_starts[0] == 0 and micro.segment_starts[-1] == len(trail)
        assert (np.diff(micro.segment_starts) > 0).all()
        assert (micro.segment_leaves[1:] != micro.segment_leaves[:-1]).all(), "a segment is cut where nothing branches"
    assert sorted(seen) == branching_of(batch)


@settings(max_examples=60)
@given(rows=ROWS, budget=st.integers(1, 40))
def test_a_row_lies_whole_in_one_micro_batch_and_keeps_what_is_its_own(rows, budget):
    batch = batch_of(rows)
    made = plan(batch, range(len(rows)), budget)
    homes = [set(micro.batch_row.tolist()) for micro in made]
    assert sum(len(home) for home in homes) == len(set().union(*homes))
    for micro in made:
        for token, (row, index) in enumerate(zip(micro.batch_row, micro.completion_index, strict=True)):
            legal = batch.legal_ids[batch.legal_offsets[index] : batch.legal_offsets[index + 1]].tolist()
            assert micro.legal_ids[token][micro.legal_mask[token]].tolist() == legal
            assert micro.head_ids[micro.legal_columns[token]].tolist() == micro.legal_ids[token].tolist()
            sampled = batch.input_ids[batch.input_offsets[row] + batch.prompt_lens[row] + index - batch.completion_offsets[row]]
            assert micro.legal_ids[token][micro.chosen[token]] == sampled
            assert micro.behaviour[token] == batch.behaviour_logprobs[index]
            assert micro.temperature[token] == batch.temperatures[row]


def test_rows_without_a_choice_are_in_no_micro_batch_and_all_of_them_make_none():
    batch = batch_of([([1, 2, 3], [4, 5])] * 2, widest=1)
    made = plan(batch, range(2), 100)
    assert made == ()


def test_a_subtree_that_fits_is_not_cut():
    batch = three_levels(positions=4, powers=2, forks=4)
    of_boards = (plan(batch, [row for row in range(32) if row // 8 == board], 10_000) for board in range(4))
    board_tokens = max(micro.tokens for (micro,) in of_boards)
    made = plan(batch, range(32), board_tokens)
    boards = [set((micro.batch_row // 8).tolist()) for micro in made]
    assert sum(len(found) for found in boards) == 4, "a board is in two micro-batches"


def test_a_drawn_token_outside_its_legal_set_is_no_plan():
    batch = batch_of([([1, 2], [3, 4])], widest=9)
    batch.legal_ids[:] = 60
    with pytest.raises(ValueError, match="not in their own legal sets"):
        plan(batch, [0], 100)
