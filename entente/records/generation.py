"""Generation requests and generations: what rollouts, vLLM servers and engines exchange.

They hold token ids only, no text and no orders. `entente/inference/vllm_wire.py` defines their form on the network.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from entente.decoding.legal_table import LegalTable
from entente.records.policy_version import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for one decision: a prompt and the legal completions."""

    request_id: str
    """Unique within a run. The same id with the same seed gives the same completion."""
    prompt_ids: Sequence[int]
    """Token ids of the whole prompt."""
    table: LegalTable
    """Automaton of the legal completions."""
    seed: int
    """Seed of this completion's random draws, 63 bits."""
    temperature: float = 1.0
    """Softmax temperature of the draw."""
    snapshot_id: str = ""
    """Snapshot of the prompt. A client of several servers sends all its requests to one, whose cache has its prefix."""
    version: int | None = None
    """Policy version to draw with; the engine must serve it. None: the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One completion with its log-probabilities, its policy version, and what it cost in time and tokens."""

    token_ids: np.ndarray
    """int32 [completion tokens], with the end token."""
    logprobs: np.ndarray
    """float32 [completion tokens], nats, under the masked policy after temperature; 0 where forced."""
    policy: PolicyVersion
    """Version that drew all tokens."""
    worker: str
    """Name of the engine that drew it."""
    queue_ms: float = 0.0
    """Milliseconds from the request's arrival at the engine to its first scheduling; 0 of a vLLM server, which does not say."""
    prefill_ms: float = 0.0
    """Milliseconds from first scheduling to the first token; 0 of a vLLM server."""
    decode_ms: float = 0.0
    """Milliseconds from the first token to the last; of a vLLM server, from sending to the answer."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
