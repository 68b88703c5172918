"""The arena draws from the masked policy, by the same numbers and with the same result as the draw of the torch engine."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from entente.decoding.legal_table import END, LegalTable, ThoughtRule
from entente.inference.legal_arena import LegalArena
from entente.inference.legal_rows import LegalRows
from entente.inference.sampling import seed_array, uniforms
from entente.inference.torch_batcher import sample_next
from tests.families import listed
from tests.inference.test_sampling import begin

VOCABULARY = 40


def choice(*ids: int, then: int = 9) -> LegalTable:
    """One of `ids`, then the end of sequence."""
    width = len(ids)
    return LegalTable(
        offsets=np.array([0, width, width + 1], np.int32),
        token_ids=np.array([*ids, then], np.int32),
        next_nodes=np.array([*[1] * width, END], np.int32),
        longest=2,
    )


def thought(budget: int, excluded: tuple[int, ...] = (9, 29)) -> LegalTable:
    """Up to `budget` of all ids below 30 but the excluded ones; the marker 8; then one of 3 and 4; then 9."""
    return LegalTable(
        offsets=np.array([0, 1, 3, 4], np.int32),
        token_ids=np.array([8, 3, 4, 9], np.int32),
        next_nodes=np.array([1, 2, 2, END], np.int32),
        longest=budget + 3,
        thought=ThoughtRule(budget=budget, end=30, excluded=excluded),
    )


def sampled(logits: Tensor, tables: Sequence[LegalTable | None], numbers: Tensor, temperature: float = 1.0) -> Tensor:
    """The logits after a draw for one row of each table."""
    arena = LegalArena(len(tables), "cpu")
    for slot, table in enumerate(tables):
        arena.assign(slot, table)
    arena.flush()
    thinking = [row for row, table in enumerate(tables) if table is not None and table.thought is not None]
    temperatures = torch.full((len(tables),), temperature, dtype=torch.float64)
    return arena.sample(logits.clone(), torch.arange(len(tables)), numbers, temperatures, thinking)


def tokens_of(left: Tensor) -> Tensor:
    """The one token that is left in each row."""
    finite = torch.isfinite(left)
    assert (finite.sum(1) == 1).all()
    return finite.long().argmax(1)


def numbers_of(seeds: Sequence[int], place: int = 0) -> Tensor:
    return torch.from_numpy(uniforms(seed_array(seeds), np.full(len(seeds), place)))


def test_with_equal_logits_it_draws_what_the_torch_engine_draws():
    rng = np.random.default_rng(0)
    tables = [
        thought(3, (9, 11, 20)[: 1 + row // 4 % 3])
        if row % 4 == 0
        else choice(*sorted(rng.choice(VOCABULARY, size=2 + row % 9, replace=False).tolist()))
        for row in range(2000)
    ]
    logits = rng.normal(scale=3, size=(len(tables), VOCABULARY)).astype(np.float32)
    partials = [begin(table, seed, 0.8) for seed, table in enumerate(tables)]
    legal = [partial.allowed() for partial in partials]
    ids = [listed(own) for own in legal]
    assert not sample_next(partials, legal, np.concatenate([row[own] for row, own in zip(logits, ids, strict=True)]))
    left = sampled(torch.from_numpy(logits), tables, numbers_of(range(len(tables))), 0.8)
    tokens = tokens_of(left)
    assert tokens.tolist() == [partial.token_ids[0] for partial in partials]
    logprobs = left.gather(1, tokens.unsqueeze(1)).squeeze(1).numpy()
    assert np.abs(logprobs - [partial.logprobs[0] for partial in partials]).max() < 1e-6


@pytest.mark.parametrize("table", [choice(2, 5, 6), thought(2)], ids=["listed", "thought"])
def test_logits_that_are_no_numbers_raise_nothing_and_leave_the_other_rows_alone(table: LegalTable):
    logits = torch.randn(3, VOCABULARY)
    good = sampled(logits, [table] * 3, numbers_of(range(3)))
    logits[1, 5] = torch.nan
    left = sampled(logits, [table] * 3, numbers_of(range(3)))
    assert torch.equal(left[0], good[0]) and torch.equal(left[2], good[2])
    assert not torch.isfinite(left[1]).any(), "the engine finds no log-probability, and refuses the request"


def test_the_number_is_that_of_the_place_in_the_completion():
    """Forced tokens in the prompt count, and so does each token of the output, known to the host or not yet."""
    table = LegalTable(
        offsets=np.array([0, 1, 1 + 30, 1 + 60, 62], np.int32),
        token_ids=np.array([7, *range(30), *range(30), 9], np.int32),
        next_nodes=np.array([1, *[2] * 30, *[3] * 30, END], np.int32),
        longest=4,
    )
    flat = torch.zeros(1, VOCABULARY)
    for start, head in (0, 0), (1, 1):
        rows, output = LegalRows(1, "cpu"), [] if start else [7]
        rows.add(0, table, output, start, (99, 1.0))
        for place in (1, 2):
            (number,) = uniforms(seed_array([99]), np.array([place]))
            assert head + len(output) == place
            token = int(tokens_of(rows.apply(flat.clone())))
            assert token == int(30 * number)
            output.append(token)


def test_a_completion_with_a_thought_is_that_of_the_torch_engine():
    """Through the thought, its marker, drawn or forced, and the orders after it; preempted in between, it goes on."""
    rng = np.random.default_rng(5)
    for seed in range(30):
        table = thought(3)
        logits = rng.normal(scale=2, size=(8, VOCABULARY)).astype(np.float32)
        logits[:, 8] += 2  # the marker
        partial = begin(table, seed, 1.0)
        while not partial.done:
            legal, row = partial.allowed(), logits[len(partial.token_ids)]
            sample_next([partial], [legal], row[listed(legal)])
        rows, output = LegalRows(1, "cpu"), []
        rows.add(0, table, output, sampling=(seed, 1.0))
        while not output or output[-1] != 9:
            if len(output) == 2:
                rows.remove(0)
                rows.add(0, table, output, sampling=(seed, 1.0))
            output.append(int(tokens_of(rows.apply(torch.from_numpy(logits[len(output)][None].copy())))))
        assert output == partial.token_ids


@pytest.mark.parametrize("number", [None, 1 - 2**-53], ids=["any", "highest"])
def test_a_thought_over_several_blocks_is_drawn_as_from_one_list(number: float | None):
    """The float64 draw of the torch engine is the oracle."""
    size, rows = 1500, 400
    rng = np.random.default_rng(size)
    table = replace(thought(2), thought=ThoughtRule(budget=2, end=size, excluded=(9,)))
    logits = rng.normal(scale=8, size=(rows, size)).astype(np.float32)
    logits[:, [0, 700, size - 1]] = -np.inf
    partials = [begin(table, seed, 0.9) for seed in range(rows)]
    numbers = numbers_of(range(rows)) if number is None else torch.full((rows,), number, dtype=torch.float64)
    left = sampled(torch.from_numpy(logits), [table] * rows, numbers, 0.9)
    tokens = tokens_of(left)
    if number is not None:
        assert torch.isfinite(torch.from_numpy(logits).gather(1, tokens.unsqueeze(1))).all()
        return
    assert not sample_next(partials, [p.allowed() for p in partials], np.delete(logits, 9, axis=1).ravel())
    assert tokens.tolist() == [partial.token_ids[0] for partial in partials]
    assert len(set((tokens // 512).tolist())) == -(-size // 512)
    logprobs = left.gather(1, tokens.unsqueeze(1)).squeeze(1).numpy()
    assert np.abs(logprobs - [partial.logprobs[0] for partial in partials]).max() < 1e-5
