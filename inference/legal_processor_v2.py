"""The logits processor for vLLM's V2 model runner: passes its request slots to `LegalArena`.

V2 needs Triton and was never run on a real card, so V1 is the default on CUDA too. The tests compare both with the same oracle,
V2 on hand-made contexts. New tokens are read on the device; nothing is copied to the host. Slots are reused, so `add_request`
resets one. A preempted request that returns is advanced through its tokens again. Nothing here may raise while the engine
steps; see `legal_admission`.
"""

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from inference.legal_admission import admit, admitted_table, start_node
from inference.legal_arena import LegalArena

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class LegalOrderProcessorV2(LogitsProcessor):
    """Leaves finite only the logits of tokens that continue a legal order set."""

    _vocabulary_size: ClassVar[int | None] = None
    """Known to admission if it runs in the engine's process."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request with an invalid table; raises ValueError."""
        admit(sampling_params, cls._vocabulary_size)

    def __init__(self, vllm_config: "VllmConfig", req_states: LogitsProcRequestState) -> None:
        """Create a slot for every request slot of the engine.

        Raises:
            ValueError: speculative decoding is on; a table is walked one drawn token at a time.
        """
        if vllm_config.speculative_config is not None:
            raise ValueError("legal orders cannot be decoded with speculation: leave speculative_config unset")
        self._requests = req_states
        self._size = LegalOrderProcessorV2._vocabulary_size = req_states.vocab_size
        self._arena = LegalArena(req_states.max_num_reqs, req_states.device)
        self._constrained = np.zeros(req_states.max_num_reqs, bool)
        # Number of drawn tokens that each slot's node reflects, on the host and on the device.
        self._walked_np = np.zeros(req_states.max_num_reqs, np.int64)
        self._walked = torch.zeros(req_states.max_num_reqs, dtype=torch.int64, device=req_states.device)
        self._anew: set[int] = set()

    @property
    def illegal_tokens(self) -> int:
        """Requests that sampled a token outside their table; must stay 0. Waits for the device."""
        return self._arena.illegal_tokens

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Assign slot `req_idx` to a new request; returns False if the request has no table."""
        table = admitted_table(sampling_params, self._size)
        self._arena.assign(req_idx, table, start_node(sampling_params))
        self._constrained[req_idx] = table is not None
        self._walked_np[req_idx] = 0
        self._anew.add(req_idx)
        return table is not None

    def apply_staged_writes(self) -> None:
        """Copy new slots to the device."""
        self._arena.flush()
        if self._anew:
            self._walked[torch.tensor(list(self._anew)).to(self._walked.device, non_blocking=True)] = 0
            self._anew.clear()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Set logits [rows, vocabulary] to -inf in place outside each constrained row's legal set."""
        batch = ctx.idx_mapping_np
        constrained = self._constrained[batch]
        if not constrained.any():
            return logits
        slots = ctx.expanded_idx_mapping.long()
        self._walk(slots, batch, constrained, ctx)
        return self._arena.mask(logits, slots)

    def _walk(self, slots: torch.Tensor, batch: np.ndarray, constrained: np.ndarray, ctx: LogitsContext) -> None:
        """Advance each slot by the tokens drawn since the last step: one for most requests, and one round for each token."""
        prompt, tokens = self._requests.prompt_len.gpu[slots].long(), self._requests.all_token_ids.gpu
        # Negative while a prompt is prefilled in parts.
        drawn = (ctx.seq_lens_upper_bound_np - self._requests.prompt_len.np[batch]) * constrained
        rounds = int((drawn - self._walked_np[batch]).max())
        for _ in range(rounds):
            at = self._walked[slots]
            behind = prompt + at <= ctx.pos
            newest = tokens[slots, (prompt + at).clamp_(max=tokens.shape[1] - 1)].long()
            self._arena.advance(slots, newest, behind)
            self._walked[slots] = at + behind
        self._walked_np[batch] = np.maximum(self._walked_np[batch], drawn)
