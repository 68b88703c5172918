"""Draws completions from logits over legal sets: numbers in, tokens and log-probabilities out.

log pi(a) = z_a / T - log sum_{b legal} exp(z_b / T)        (the masked policy; z: logits, T: temperature of the request)

A forced token is appended at once, with log-probability 0 and without a draw. A thought token is drawn from an open set, which no
array lists.

The random number of a draw is a function of the request's seed and of the token's place in the completion. Nothing is stored
between draws, so a draw does not depend on the batch, on a jump over forced tokens, on a repetition after a failure, or on the
engine: vLLM's processor draws by the same numbers (`LegalArena.draw`). They are made on the host in integers. The n-th number of
a seed is the n-th output of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014):

    z = seed + (n + 1) * 0x9E3779B97F4A7C15;  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;  z = (z ^ z >> 27) * 0x94D049BB133111EB;
    z ^ z >> 31        (all modulo 2**64)

Its upper 53 bits are the number. Seeds are hashes (`entente/players/seeds.py`), so the sequences of two requests do not overlap.
"""

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from entente.decoding.legal_table import END
from entente.decoding.open_set import nth_id, set_size
from entente.records.generation import Generation, GenerationRequest
from entente.telemetry.errors import EngineError

_STEP, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BITS = 2**64 - 1


class PartialCompletion:
    """A request that is being drawn: its tokens so far, its state in the table, and its row in the engine."""

    def __init__(self, request: GenerationRequest, answer: asyncio.Future[Generation] | None = None) -> None:
        """Begin with the forced tokens. `answer` gets the whole generation, or the error that ends it."""
        self.request, self.answer = request, answer
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.forced = 0
        """Number of its forced tokens."""
        self._state = request.table.start
        self._take_forced()
        self.prefill_ids = np.asarray([*request.prompt_ids, *self.token_ids], np.int32)
        """int32 token ids of the prompt and the forced tokens after it; prefill computes these."""
        self.computed, self.cached = 0, 0
        """Columns of its row that hold keys and values; prompt tokens that were copied from other rows."""
        self.arrived, self.scheduled, self.first = time.monotonic(), 0.0, 0.0
        """Times of its arrival, its first scheduling and its first token; 0: not yet."""

    @property
    def done(self) -> bool:
        """Whether the completion is complete."""
        return self._state == END

    @property
    def finished(self) -> bool:
        """Whether the completion is complete, or the request failed or was cancelled."""
        return self.done or (self.answer is not None and self.answer.done())

    def fail(self, error: EngineError) -> None:
        """End the request with `error`, unless it has ended."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error)

    def allowed(self) -> np.ndarray:
        """The legal set of the next position: two or more tokens, or in a thought an open set."""
        return self.request.table.allowed(self._state)

    def take(self, token: int, logprob: float) -> None:
        """Append the drawn `token`, and the forced tokens after it."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self._state = self.request.table.advance(self._state, token)
        self._take_forced()

    def _take_forced(self) -> None:
        tokens, self._state = self.request.table.forced(self._state)
        self.token_ids += tokens
        self.logprobs += [0.0] * len(tokens)
        self.forced += len(tokens)


def draw(partials: Sequence[PartialCompletion], allowed: Sequence[np.ndarray], logits: np.ndarray) -> list[int]:
    """Draw one token for each completion.

    Args:
        allowed: legal set of each completion, int32: n_i tokens, or an open set of n_i tokens.
        logits: float32 [sum of n_i], in the order of `allowed`; those of an open set in the order of its ids.

    Returns:
        indices of completions with a logit that is NaN or plus infinity; they are unchanged.
    """
    counts = np.fromiter((set_size(legal) for legal in allowed), np.int64, len(allowed))
    ends = np.cumsum(counts)
    starts = ends - counts
    values = logits.astype(np.float64)
    largest = np.maximum.reduceat(values, starts)
    finite = np.isfinite(largest)
    values[~np.repeat(finite, counts)] = largest[~finite] = 0.0  # these rows are not drawn from
    # The largest is subtracted first: a large logit divided by a small temperature could overflow.
    scaled = values - np.repeat(largest, counts)
    with np.errstate(over="ignore"):
        scaled /= np.repeat([partial.request.temperature for partial in partials], counts)
    weights = np.exp(scaled)
    totals = np.add.reduceat(weights, starts)
    reached = np.cumsum(weights)
    places = np.fromiter((len(partial.token_ids) for partial in partials), np.int64, len(partials))
    thrown = uniforms(seed_array([partial.request.seed for partial in partials]), places)
    chosen = np.searchsorted(reached, reached[ends - 1] - totals * (1.0 - thrown), side="right")
    chosen = np.clip(chosen, starts, ends - 1)
    logprobs = (scaled[chosen] - np.log(totals)).tolist()
    for partial, legal, place, logprob, can in zip(partials, allowed, (chosen - starts).tolist(), logprobs, finite, strict=True):
        if can:
            partial.take(nth_id(legal, place), logprob)
    return np.flatnonzero(~finite).tolist()


def seed_array(seeds: Sequence[int]) -> np.ndarray:
    """The seeds modulo 2**64, uint64 [n]."""
    return np.fromiter((seed & _BITS for seed in seeds), np.uint64, len(seeds))


def uniforms(seeds: np.ndarray, places: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each seed.

    Args:
        seeds: uint64 [n].
        places: int64 [n] number of the completion's tokens before the one that is drawn.

    Returns:
        float64 [n], multiples of 2**-53.
    """
    mixed = seeds + (places.astype(np.uint64) + np.uint64(1)) * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
