"""A thought is read from the tokens and legal sets of a row."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from decoding.codec import Codec
from decoding.open_set import open_set
from decoding.thoughts import Thought, read_thought, thought_of
from storage.runs import RunPaths


@pytest.fixture
def codec(stored_run: RunPaths) -> Codec:
    """Of a tokenizer without tokens for thinking."""
    (folder,) = (stored_run.root.parent / "_models").glob("tiny-*")
    return Codec(folder)


@pytest.fixture(params=[("<think>", "</think>"), ("[THINK]", "[/THINK]")], ids=["tags", "brackets"])
def thinker(stored_run: RunPaths, request: pytest.FixtureRequest) -> Codec:
    """Of a tokenizer with tokens for thinking."""
    (folder,) = (stored_run.root.parent / "_models").glob("tiny-*")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(request.param))
    tokenizer.save(str(folder / "tokenizer.json"))
    return Codec(folder)


def ids(codec: Codec, text: str) -> list[int]:
    return list(codec.encode(text))


def test_without_tokens_for_thinking_the_line_break_ends_a_thought(codec: Codec):
    assert read_thought(ids(codec, "Take BER.\n"), codec) == ("Take BER.", False)
    assert read_thought(ids(codec, "Take BER."), codec) == ("Take BER.", True)
    assert read_thought(ids(codec, "</think>"), codec) == ("</think>", True), "letters are no token for thinking"


def test_a_token_for_thinking_ends_a_thought_that_may_have_line_breaks(thinker: Codec):
    marker = thinker.vocabulary_size - 1
    assert read_thought([*ids(thinker, "Take BER.\nHold.\n"), marker], thinker) == ("Take BER.\nHold.\n", False)
    assert read_thought(ids(thinker, "Take BER.\n"), thinker) == ("Take BER.\n", True)


def test_a_thought_is_the_positions_with_open_sets(codec: Codec):
    text, order = ids(codec, "BER?\n"), ids(codec, "A PAR H")
    completion = [*text, *order]
    sets = [open_set(codec.eos_id, codec.vocabulary_size)] * len(text) + [np.array([token, 500]) for token in order]
    offsets = np.cumsum([0, *map(len, sets)])
    logprobs = [-0.5] * len(text) + [-9.0] * len(order)
    found = thought_of(completion, logprobs, np.concatenate(sets), offsets, codec)
    assert found == Thought(tokens=len(text), logprob=-0.5 * len(text), text="BER?", by_force=False)
    found = thought_of(completion, logprobs, np.concatenate(sets).tolist(), offsets.tolist(), None)
    assert found == Thought(tokens=len(text), logprob=-0.5 * len(text), text=None, by_force=None)
    orders = sets[len(text) :]
    assert thought_of(order, [0.0] * len(order), np.concatenate(orders), np.cumsum([0, *map(len, orders)]), codec) is None
