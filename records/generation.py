"""A request for one completion, and the completion: what rollouts, workers and engines hand to one another.

Token ids only: no text and no orders. How requests and completions travel between machines is in `workers/wire.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decoding.legal_table import LegalTable
from records.policy_version import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One decision to be drawn: a prompt and what may follow it."""

    request_id: str
    """Unique within a run; the same id asked again with the same seed gives the same completion."""
    prompt_ids: Sequence[int]
    """Token ids of the whole prompt."""
    table: LegalTable
    """Automaton of the legal completions."""
    seed: int
    """Seed of this completion's random draws, 63 bits."""
    temperature: float = 1.0
    """Softmax temperature of the draw; the logprobs returned are those after mask and temperature."""
    snapshot_id: str = ""
    """Position the prompt belongs to; a pool keeps one position on one worker, where its prefix is warm."""
    version: int | None = None
    """Policy version to draw under, which must be served; None: the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCost:
    """What one completion took. A decision row has columns of the same names."""

    queue_ms: float = 0.0
    """Milliseconds from the request's arrival at the engine to its first scheduling."""
    prefill_ms: float = 0.0
    """Milliseconds from first scheduling to the first token."""
    decode_ms: float = 0.0
    """Milliseconds from the first token to the last."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One completion and how it was drawn."""

    token_ids: np.ndarray
    """int32 [completion tokens], end mark included."""
    logprobs: np.ndarray
    """float32 [completion tokens], nats, of the tokens under the masked policy that drew them; 0 where forced."""
    policy: PolicyVersion
    """Version that drew every token."""
    worker: str
    """Name of the engine that drew it."""
    cost: GenerationCost = GenerationCost()
