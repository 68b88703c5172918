"""The thought of a decision: free text that the model wrote before its orders. This module reads it from a row.

A completion with a thought is: thought tokens, the end marker, a fixed text that asks for the orders, the orders. Thought tokens
are the positions with an open legal set, and come first. The model draws the end marker as its last thought token. If it does not
within its budget, the marker follows as a forced token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from entente.decoding.codec import Codec
from entente.decoding.open_set import open_sets
from entente.decoding.thinking import thinking_of

Ints = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """The thought of one decision."""

    tokens: int
    """Its tokens, with the end marker if the model drew it."""
    logprob: float
    """Log-probability of these tokens, nats."""
    text: str | None
    """Without the end marker; None without a tokenizer."""
    by_force: bool | None
    """Whether the budget ended it; False if the model drew the end marker; None without a tokenizer."""

    @property
    def sentence(self) -> str:
        """Length, end and log-probability in words."""
        ended = {None: "", True: ", ended by force", False: ", ended by itself"}[self.by_force]
        words = f"{self.tokens} token" if self.tokens == 1 else f"{self.tokens:,} tokens"
        return f"thought of {words}{ended}, log-probability {self.logprob:.2f}"


def thought_length(legal_ids: Ints, legal_offsets: Ints) -> int:
    """Number of thought tokens of a completion, from its legal sets; 0 if it has no thought."""
    return int(np.count_nonzero(open_sets(np.asarray(legal_ids), np.asarray(legal_offsets))))


def thought_of(
    completion: Sequence[int], logprobs: Sequence[float], legal_ids: Ints, legal_offsets: Ints, codec: Codec | None
) -> Thought | None:
    """The thought of a completion; None if it has none.

    Args:
        completion, logprobs: ids and behaviour logprobs of its tokens.
        legal_ids, legal_offsets: its legal sets, as in a row.
    """
    tokens = thought_length(legal_ids, legal_offsets)
    if tokens == 0:
        return None
    text, by_force = (None, None) if codec is None else read_thought(completion[:tokens], codec)
    return Thought(tokens=tokens, logprob=float(sum(logprobs[:tokens])), text=text, by_force=by_force)


def read_thought(ids: Sequence[int], codec: Codec) -> tuple[str, bool]:
    """The text of thought tokens without the end marker, and whether the thought was ended by force."""
    by_force = ids[-1] != _marker(codec)
    return codec.decode(ids if by_force else ids[:-1]), by_force


def _marker(codec: Codec) -> int:
    """The id that ends a thought, which does not depend on the budget."""
    thinking = thinking_of(codec, 1)
    assert thinking is not None
    return thinking.marker
