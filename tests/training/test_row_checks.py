"""Rows at fault are named, and go with their whole advantage group; all others stay as they are."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from entente.decoding.open_set import open_set
from entente.training.row_checks import find_trainable_rows, select_rows
from storage.gather import Batch
from tests.training.batches import VOCABULARY, three_levels, with_thoughts

MODEL = VOCABULARY, 128
"""Token ids, and tokens of the longest sequence."""
BAD = 4
"""The row that each fault is put into; of group 1, rows 3 to 5."""


def changed(batch: Batch, name: str, at: int, value: Any) -> Batch:
    """With one entry of one column altered."""
    column = getattr(batch, name).copy()
    column[at] = value
    return replace(batch, **{name: column})


def lacking_its_token(batch: Batch) -> Batch:
    at = int(batch.completion_offsets[BAD])
    drawn = batch.input_ids[batch.input_offsets[BAD] + batch.prompt_lens[BAD]]
    first, end = batch.legal_offsets[at], batch.legal_offsets[at + 1]
    place = int(first) + int(np.flatnonzero(batch.legal_ids[first:end] == drawn)[0])
    return changed(batch, "legal_ids", place, (drawn + 1) % VOCABULARY)


def too_long(batch: Batch) -> Batch:
    """Its prompt grows, and with it all that lies behind it moves."""
    more, first = 200, int(batch.input_offsets[BAD])
    offsets = batch.input_offsets.copy()
    offsets[BAD + 1 :] += more
    longer = changed(batch, "prompt_lens", BAD, int(batch.prompt_lens[BAD]) + more)
    return replace(longer, input_ids=np.insert(batch.input_ids, first, [1] * more).astype(np.int32), input_offsets=offsets)


def thinking(drawn: int, *legal: int) -> Callable[[Batch], Batch]:
    """The first completion token is `drawn`, over the legal set `legal`; all other rows begin with a thought too."""

    def spoil(batch: Batch) -> Batch:
        batch = with_thoughts(batch, 1, open_set([7], 60))
        batch = changed(batch, "input_ids", int(batch.input_offsets[BAD] + batch.prompt_lens[BAD]), drawn)
        at = int(batch.completion_offsets[BAD])
        first, end, offsets = batch.legal_offsets[at], batch.legal_offsets[at + 1], batch.legal_offsets.copy()
        offsets[at + 1 :] += len(legal) - 2
        ids = np.concatenate([batch.legal_ids[:first], np.array(legal, np.int32), batch.legal_ids[end:]])
        return replace(batch, legal_ids=ids, legal_offsets=offsets)

    return spoil


FAULTS: dict[str, tuple[Callable[[Batch], Batch], str]] = {
    "its own token": (lacking_its_token, "lacks the token that was drawn"),
    "lengths": (lambda b: changed(b, "prompt_lens", BAD, b.prompt_lens[BAD] - 1), "legal sets disagree"),
    "NaN": (lambda b: changed(b, "behaviour_logprobs", int(b.completion_offsets[BAD]), float("nan")), "not a finite number"),
    "above 0": (lambda b: changed(b, "behaviour_logprobs", int(b.completion_offsets[BAD]), 0.5), "above 0"),
    "too long": (too_long, "longer than the 128 tokens that the model reads"),
    "foreign token": (lambda b: changed(b, "input_ids", int(b.input_offsets[BAD]), VOCABULARY), "beyond the model's vocabulary"),
    "the id that ends a completion in a thought": (thinking(7, -8, 60), "a token that no thought may hold"),
    "another id that ends a turn in a thought": (thinking(9, -8, 60, 9), "a token that no thought may hold"),
    "an open set that excludes an id beyond its end": (thinking(3, -8, 60, 60), "beyond the model's vocabulary"),
    "an open set beyond the vocabulary": (thinking(3, -8, VOCABULARY + 1), "beyond the model's vocabulary"),
    "an open set of one number": (thinking(3, -8), "beyond the model's vocabulary"),
    "temperature": (lambda b: changed(b, "temperatures", BAD, 0.0), "temperature is not a positive number"),
    "return": (lambda b: changed(b, "returns", BAD, float("inf")), "return is not a finite number"),
}


@pytest.mark.parametrize(("spoil", "why"), FAULTS.values(), ids=FAULTS)
def test_a_row_at_fault_is_named_and_its_group_left_out(spoil, why):
    kept, refused = find_trainable_rows(spoil(three_levels()), *MODEL)
    assert [decision for decision, _ in refused] == [1000 + BAD] and why in refused[0][1]
    assert kept.tolist() == [row for row in range(12) if row not in (3, 4, 5)]


def test_sound_rows_all_stay():
    for batch in (three_levels(), thinking(59, -8, 60)(three_levels()), thinking(0, -VOCABULARY, VOCABULARY)(three_levels())):
        kept, refused = find_trainable_rows(batch, *MODEL)
        assert kept.tolist() == list(range(12)) and refused == []


def test_rows_outside_any_group_go_alone():
    batch = replace(three_levels(), advantage_groups=np.full(12, -1, np.int32))
    kept, refused = find_trainable_rows(changed(batch, "temperatures", BAD, float("nan")), *MODEL)
    assert kept.tolist() == [row for row in range(12) if row != BAD] and len(refused) == 1


def test_some_rows_of_a_batch_are_those_rows_and_nothing_else():
    batch, chosen = three_levels(), [7, 2, 11]
    few = select_rows(batch, chosen)

    def content(of: Batch, row: int) -> list[Any]:
        """Tokens, behaviour log-probabilities and legal sets of a row."""
        places = range(of.completion_offsets[row], of.completion_offsets[row + 1])
        ids = of.input_ids[of.input_offsets[row] : of.input_offsets[row + 1]].tolist()
        legal = [of.legal_ids[of.legal_offsets[place] : of.legal_offsets[place + 1]].tolist() for place in places]
        return [ids, of.behaviour_logprobs[places].tolist(), legal]

    assert [content(few, here) for here in range(3)] == [content(batch, row) for row in chosen]
    flat = {"decision_ids", "prompt_lens", "temperatures", "returns", "advantage_groups", "policy_versions"}
    assert flat <= {field.name for field in fields(Batch)}
    assert all(getattr(few, name).tolist() == getattr(batch, name)[chosen].tolist() for name in flat)
    whole = select_rows(batch, range(12))
    assert len(fields(Batch)) > 10 and all(
        np.array_equal(getattr(whole, field.name), getattr(batch, field.name)) for field in fields(Batch)
    )
