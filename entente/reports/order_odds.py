"""Probability of each order of a decision, from the log-probabilities of its tokens.

A completion is one line per order. An order's probability is the product of its tokens' behaviour probabilities, line end
included, given the thought and the earlier lines. A forced token counts as 1.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entente.decoding.codec import Codec
from entente.decoding.thinking import thought_length


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOdds:
    logprob: float
    """Sum of its tokens' behaviour log-probabilities, nats."""
    choices: int
    """Branching tokens; 0: forced by the earlier orders."""

    @property
    def probability(self) -> float:
        return math.exp(self.logprob)


def odds_of_orders(row: Mapping[str, Any], codec: Codec | None) -> list[OrderOdds | None]:
    """Of each order, given the thought; None if the completion cannot be split into orders, as without a tokenizer."""
    thought, orders = thought_length(row["legal_ids"], row["legal_offsets"]), len(row["orders"])
    ends = () if codec is None else (codec.separator_id, codec.eos_id)
    completion = row["input_ids"][row["prompt_len"] + thought :]
    lines = odds_by_line(completion, row["behaviour_logprobs"][thought:], row["legal_offsets"][thought:], ends)
    if thought:
        lines = lines[-orders:]  # forced text between a thought and the orders may have line breaks
    return list(lines) if len(lines) == orders else [None] * orders


def odds_by_line(
    completion: Sequence[int], logprobs: Sequence[float], legal_offsets: Sequence[int], ends: Collection[int]
) -> list[OrderOdds]:
    """`ends`: ids that end a line."""
    odds, logprob, choices = [], 0.0, 0
    for place, (token, sampled) in enumerate(zip(completion, logprobs, strict=True)):
        if legal_offsets[place + 1] - legal_offsets[place] > 1:
            logprob, choices = logprob + sampled, choices + 1
        if token in ends:
            odds.append(OrderOdds(logprob=logprob, choices=choices))
            logprob, choices = 0.0, 0
    return odds
