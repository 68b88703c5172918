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


def draw(courses: Sequence[Course], allowed: Sequence[np.ndarray], logits: np.ndarray) -> list[int]:
    """Take one drawn token on each course; `logits` float32 [sum of legal tokens] belong to `allowed`, one after another.

    Returns:
        the places of courses from which nothing can be drawn, because a logit is not a number or plus infinity; they are left as
        they were.
    """
    counts = np.fromiter((len(tokens) for tokens in allowed), np.int64, len(allowed))
    ends = np.cumsum(counts)
    starts = ends - counts
    wide = logits.astype(np.float64)
    largest = np.maximum.reduceat(wide, starts)
    finite = np.isfinite(largest)
    wide[~np.repeat(finite, counts)] = largest[~finite] = 0.0  # these rows are left out
    # Taken off first: divided by a small temperature it could overflow, while the others only become minus infinity.
    scaled = wide - np.repeat(largest, counts)
    with np.errstate(over="ignore"):
        scaled /= np.repeat([course.temperature for course in courses], counts)
    weights = np.exp(scaled)
    totals = np.add.reduceat(weights, starts)
    reached = np.cumsum(weights)
    throws = np.fromiter(
        (course.throw() if can else 0.0 for course, can in zip(courses, finite, strict=True)), np.float64, len(courses)
    )
    chosen = np.searchsorted(reached, reached[ends - 1] - totals * (1.0 - throws), side="right")
    chosen = np.clip(chosen, starts, ends - 1)
    logprobs = (scaled[chosen] - np.log(totals)).tolist()
    tokens = np.concatenate(allowed)[chosen].tolist()
    for course, token, logprob, can in zip(courses, tokens, logprobs, finite, strict=True):
        if can:
            course.take(token, logprob)
    return np.flatnonzero(~finite).tolist()
