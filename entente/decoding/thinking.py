"""Thinking before ordering: optional free text at the start of a completion, and the tokens that end it.

    [thought: at most `budget` tokens][marker][closing][orders]

A thought token is any id except the model's end tokens. The model may sample the marker at any position of the thought; after
`budget` tokens it is forced. The closing is forced. In a row the thought tokens come first; they are the positions with an open
legal set.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from entente.decoding.codec import ORDER_SEPARATOR, Codec
from entente.decoding.legal_table import ThoughtRule
from entente.decoding.open_set import open_sets
from entente.game.prompts import ANSWER_CUE, THOUGHT_CUE
from entente.telemetry.errors import DataError, InputError

Ints = Sequence[int] | np.ndarray

_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True, kw_only=True)
class Thinking:
    cue: str
    marker: int
    """Token id that ends the thought."""
    closing: tuple[int, ...]
    """Token ids between the marker and the first order."""
    rule: ThoughtRule

    def enclose(self, thought: Sequence[int], orders: Sequence[int]) -> list[int]:
        return [*thought, self.marker, *self.closing, *orders]

    def split(self, completion: Sequence[int]) -> tuple[list[int], list[int]]:
        """Thought tokens without marker, and order tokens. Raises DataError without an end marker and the closing after it."""
        ids = [int(token) for token in completion]
        if self.marker not in ids[: self.rule.budget + 1]:
            raise DataError(f"completion of {len(ids)} tokens has no end of its thought")
        marker = ids.index(self.marker)
        orders = marker + 1 + len(self.closing)
        if tuple(ids[marker + 1 : orders]) != self.closing:
            raise DataError(f"completion of {len(ids)} tokens does not continue as it must after its thought")
        return ids[:marker], ids[orders:]


def thinking_of(codec: Codec, budget: int) -> Thinking | None:
    """How the model thinks: its tokenizer's thinking tokens, or else one line; None if `budget` is 0. Raises InputError if the
    end of a thought is not a separate token."""
    if not budget:
        return None
    for opening, marker in _TAGS:
        if codec.single_token(opening) is not None and codec.single_token(marker) is not None:
            return _thinking(codec, budget, opening + "\n", marker, "\n\n" + ANSWER_CUE)
    return _thinking(codec, budget, THOUGHT_CUE, ORDER_SEPARATOR, ANSWER_CUE)


def turn_head(after: str, cue: str) -> str:
    """The text between board and completion: the chat format's `after`, and the cue. If the template opens a thought, a cue that
    opens one is left out, and any other follows the closed thought."""
    for opening, marker in _TAGS:
        head = after.removesuffix("\n")
        if head.endswith(opening):
            return after if cue.startswith(opening) else f"{after}{after[len(head) :]}{marker}\n\n{cue}"
    return after + cue


def _thinking(codec: Codec, budget: int, cue: str, marker: str, closing: str) -> Thinking:
    marker_id = codec.separator_id if marker == ORDER_SEPARATOR else codec.single_token(marker)
    closing_ids = codec.encode_after(marker, closing)
    if marker_id is None or not closing_ids:
        raise InputError(
            f"the tokenizer merges the end of a thought, {marker!r}, with the text after it: set prompts.thinking_tokens to 0, "
            "or use another model"
        )
    return Thinking(
        cue=cue,
        marker=marker_id,
        closing=closing_ids,
        rule=ThoughtRule(
            budget=budget, end=codec.vocabulary_size, excluded=tuple(token for token in codec.end_ids if token != marker_id)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    tokens: int
    """Number of tokens, including the end marker if the model sampled it."""
    logprob: float
    """Of these tokens, nats."""
    text: str | None
    """Without the end marker; None without a tokenizer."""
    truncated: bool | None
    """True if the budget ended it, False if the model sampled the end marker, None without a tokenizer."""

    @property
    def sentence(self) -> str:
        ended = {None: "", True: ", ended by force", False: ", ended by itself"}[self.truncated]
        words = f"{self.tokens} token" if self.tokens == 1 else f"{self.tokens:,} tokens"
        return f"thought of {words}{ended}, log-probability {self.logprob:.2f}"


def thought_length(legal_ids: Ints, legal_offsets: Ints) -> int:
    """Number of thought tokens of a completion, from its legal sets; 0 if it has no thought."""
    return int(np.count_nonzero(open_sets(np.asarray(legal_ids), np.asarray(legal_offsets))))


def thought_of(
    completion: Sequence[int], logprobs: Sequence[float], legal_ids: Ints, legal_offsets: Ints, codec: Codec | None
) -> Thought | None:
    tokens = thought_length(legal_ids, legal_offsets)
    if tokens == 0:
        return None
    text, truncated = (None, None) if codec is None else read_thought(completion[:tokens], codec)
    return Thought(tokens=tokens, logprob=float(sum(logprobs[:tokens])), text=text, truncated=truncated)


def read_thought(ids: Sequence[int], codec: Codec) -> tuple[str, bool]:
    thinking = thinking_of(codec, 1)  # the marker does not depend on the budget
    assert thinking is not None
    truncated = ids[-1] != thinking.marker
    return codec.decode(ids if truncated else ids[:-1]), truncated
