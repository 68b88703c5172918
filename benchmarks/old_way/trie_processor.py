"""`TrieRows` as vLLM's logits processor; only `engine` imports it, once vLLM is needed."""

from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer

from benchmarks.old_way.trie import MOVES, WANTED, OrderTrie, TrieRows
from inference.legal_processor import LegalOrderProcessor, MoveDirectionality


class TrieProcessor(LegalOrderProcessor):
    """The processor in vLLM: masks all tokens that do not continue the trie of their request."""

    tokenizer: ClassVar[Tokenizer]
    eos: ClassVar[int]
    separator: ClassVar[int]

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Accept all parameters, as the old system did."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows = TrieRows()  # type: ignore[assignment]

    def update_state(self, batch_update: Any) -> None:
        """Apply the engine's changes of rows."""
        if batch_update is None:
            return
        rows: Any = self._rows
        for row in batch_update.removed:
            rows.remove(row)
        for row, params, _prompt, output in batch_update.added:
            rows.remove(row)
            extra = params.extra_args or {}
            if MOVES in extra:
                rows.add(row, OrderTrie(self.tokenizer, extra[MOVES], extra[WANTED], self.eos, self.separator), output)
        for source, target, direction in batch_update.moved:
            rows.move(source, target, direction == MoveDirectionality.SWAP)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask logits [rows, vocabulary] in place."""
        return self._rows.mask(logits)
