"""Completions being drawn from logits over their legal sets: numbers in, tokens and log-probabilities out.

log pi(a) = z_a / T - log sum_{b legal} exp(z_b / T)        (the masked policy; z: logits, T: temperature of the request)

A token that is the only legal one is taken at once, with log-probability 0 and no draw: whole runs of them are known before the
model has seen any. Each completion has dice of its own, one throw for each branching token, so that nothing else in a batch can
change it. It knows nothing of torch, prompts or versions.
"""

import random
from collections.abc import Sequence

import numpy as np

from decoding.legal_table import END, LegalTable
from telemetry.errors import EngineLostError


class Course:
    """One completion on its way through its table."""

    def __init__(self, table: LegalTable, seed: int, temperature: float) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.forced = 0
        """How many of its tokens were the only legal ones."""
        self.temperature = temperature
        self._table = table
        self._node = 0
        self._dice = random.Random(seed)
        self._take_forced()

    @property
    def done(self) -> bool:
        """The completion is whole."""
        return self._node == END

    def allowed(self) -> np.ndarray:
        """The legal tokens of the next position, two or more."""
        return self._table.allowed(self._node)

    def throw(self) -> float:
        """The next of its random numbers, in [0, 1)."""
        return self._dice.random()

    def take(self, token: int, logprob: float) -> None:
        """Go on with `token`, which was drawn, and with whatever must follow it."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self._node = self._table.advance(self._node, token)
        self._take_forced()

    def _take_forced(self) -> None:
        tokens, self._node = self._table.forced(self._node)
        self.token_ids += tokens
        self.logprobs += [0.0] * len(tokens)
        self.forced += len(tokens)


def draw(courses: Sequence[Course], allowed: Sequence[np.ndarray], logits: np.ndarray) -> None:
    """Take one drawn token on each course; `logits` float32 [sum of legal tokens] belong to `allowed`, one after another.

    Raises:
        EngineLostError: a logit is no number, so that nothing can be drawn.
    """
    counts = np.fromiter((len(tokens) for tokens in allowed), np.int64, len(allowed))
    ends = np.cumsum(counts)
    starts = ends - counts
    scaled = logits.astype(np.float64) / np.repeat([course.temperature for course in courses], counts)
    scaled -= np.repeat(np.maximum.reduceat(scaled, starts), counts)
    weights = np.exp(scaled)
    totals = np.add.reduceat(weights, starts)
    if not np.isfinite(totals).all():
        raise EngineLostError("the model's logits are not finite, so nothing can be drawn: its weights or its adapter are broken")
    reached = np.cumsum(weights)
    throws = np.fromiter((course.throw() for course in courses), np.float64, len(courses))
    chosen = np.searchsorted(reached, reached[ends - 1] - totals * (1.0 - throws), side="right")
    chosen = np.clip(chosen, starts, ends - 1)
    logprobs = (scaled[chosen] - np.log(totals)).tolist()
    tokens = np.concatenate(allowed)[chosen].tolist()
    for course, token, logprob in zip(courses, tokens, logprobs, strict=True):
        course.take(token, logprob)
