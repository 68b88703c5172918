"""From tokens to orders: how likely the policy was to give each order of a decision.

A completion is one line per order, ended by the line break, the last by the end mark. An order's probability is the product of
its tokens' behaviour probabilities, its end mark included, given the lines before it: so the orders' together are the decision's.
A forced token, which had no legal rival, counts as 1. Pure: stored figures in, probabilities out.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOdds:
    """One order as it was drawn."""

    logprob: float
    """Of its tokens together, nats, under the policy that drew them, given the orders before it."""
    choices: int
    """Its tokens that had a legal rival; 0: the order was forced by those before it."""

    @property
    def probability(self) -> float:
        """From 0 to 1."""
        return math.exp(self.logprob)


def odds_by_line(
    completion: Sequence[int], logprobs: Sequence[float], legal_offsets: Sequence[int], ends: Collection[int]
) -> list[OrderOdds]:
    """The odds of each line of a completion, in its order; `ends` are the tokens that end one."""
    found, logprob, choices = [], 0.0, 0
    for place, (token, drawn) in enumerate(zip(completion, logprobs, strict=True)):
        if legal_offsets[place + 1] - legal_offsets[place] > 1:
            logprob, choices = logprob + drawn, choices + 1
        if token in ends:
            found.append(OrderOdds(logprob=logprob, choices=choices))
            logprob, choices = 0.0, 0
    return found
