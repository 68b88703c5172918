"""Rows that a model cannot compute are found, and no others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entente.decoding.open_set import open_set
from entente.training.policy import find_faults
from storage.gather import Batch
from tests.training.batches import VOCABULARY, three_levels, with_thoughts

MODEL = VOCABULARY, 128
"""Token ids, and tokens of the longest sequence."""
BAD = 4
"""The row that each fault is put into."""


def changed(batch: Batch, name: str, at: int, value: Any) -> Batch:
    """With one entry of one column altered."""
    column = getattr(batch, name).copy()
    column[at] = value
    return replace(batch, **{name: column})


def too_long(batch: Batch) -> Batch:
    """Its prompt grows, and with it all that lies behind it moves."""
    more, first = 200, int(batch.input_offsets[BAD])
    offsets = batch.input_offsets.copy()
    offsets[BAD + 1 :] += more
    longer = changed(batch, "prompt_lens", BAD, int(batch.prompt_lens[BAD]) + more)
    return replace(longer, input_ids=np.insert(batch.input_ids, first, [1] * more).astype(np.int32), input_offsets=offsets)


def thinking(*legal: int) -> Callable[[Batch], Batch]:
    """The legal set of the first completion token is `legal`; all other rows begin with a thought too."""

    def spoil(batch: Batch) -> Batch:
        batch = with_thoughts(batch, 1, open_set([7], 60))
        at = int(batch.completion_offsets[BAD])
        first, end, offsets = batch.legal_offsets[at], batch.legal_offsets[at + 1], batch.legal_offsets.copy()
        offsets[at + 1 :] += len(legal) - 2
        ids = np.concatenate([batch.legal_ids[:first], np.array(legal, np.int32), batch.legal_ids[end:]])
        return replace(batch, legal_ids=ids, legal_offsets=offsets)

    return spoil


FAULTS: dict[str, tuple[Callable[[Batch], Batch], str]] = {
    "too long": (too_long, "longer than the 128 tokens that the model reads"),
    "token": (lambda b: changed(b, "input_ids", int(b.input_offsets[BAD]), VOCABULARY), "beyond the model's vocabulary"),
    "legal token": (
        lambda b: changed(b, "legal_ids", int(b.legal_offsets[b.completion_offsets[BAD]]), VOCABULARY),
        "beyond the model's vocabulary",
    ),
    "excluded token": (thinking(-VOCABULARY - 1, VOCABULARY), "beyond the model's vocabulary"),
    "open set": (thinking(-8, VOCABULARY + 1), "beyond the model's vocabulary"),
    "log-probability": (lambda b: changed(b, "behaviour_logprobs", int(b.completion_offsets[BAD]), np.nan), "log-probability"),
    "return": (lambda b: changed(b, "returns", BAD, np.inf), "return is not a finite number"),
}


@pytest.mark.parametrize(("spoil", "why"), FAULTS.values(), ids=FAULTS)
def test_a_faulty_row_is_found_with_the_reason(spoil: Callable[[Batch], Batch], why: str):
    ((row, found),) = find_faults(spoil(three_levels()), *MODEL).items()
    assert row == BAD and why in found


@pytest.mark.parametrize("spoil", [lambda batch: batch, thinking(-8, 60), thinking(-VOCABULARY, VOCABULARY)])
def test_sound_rows_have_no_fault(spoil: Callable[[Batch], Batch]):
    assert find_faults(spoil(three_levels()), *MODEL) == {}
