"""Turns token log-probabilities into the probability of each order of a decision.

A completion is one line per order, which ends with the line break, the last with the end mark. An order's probability is the
product of its tokens' behaviour probabilities, end mark included, given the earlier lines. The product over all orders is the
decision's probability. A forced token counts as 1. These are pure functions.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOdds:
    """One drawn order."""

    logprob: float
    """Sum of its tokens' behaviour logprobs, nats, given the earlier orders."""
    choices: int
    """Number of branching tokens; 0: the earlier orders forced this one."""

    @property
    def probability(self) -> float:
        """Probability, 0 to 1."""
        return math.exp(self.logprob)


def odds_by_line(
    completion: Sequence[int], logprobs: Sequence[float], legal_offsets: Sequence[int], ends: Collection[int]
) -> list[OrderOdds]:
    """The odds of each line of a completion, in order; `ends` are the tokens that end a line."""
    found, logprob, choices = [], 0.0, 0
    for place, (token, drawn) in enumerate(zip(completion, logprobs, strict=True)):
        if legal_offsets[place + 1] - legal_offsets[place] > 1:
            logprob, choices = logprob + drawn, choices + 1
        if token in ends:
            found.append(OrderOdds(logprob=logprob, choices=choices))
            logprob, choices = 0.0, 0
    return found
