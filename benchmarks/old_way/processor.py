"""The trie as vLLM's V1 model runner takes it: an adapter and nothing more; found by its name, as the old system's was."""

from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer

from benchmarks.old_way.trie import OrderTrie, TrieRows
from inference.legal_processor import LegalOrderProcessor, MoveDirectionality

MOVES, WANTED, RECORD = "valid_moves", "orders_wanted", "record"
"""Where legal orders, their number, and the key of a record travel, in `SamplingParams.extra_args`."""


class TrieProcessor(LegalOrderProcessor):
    """Leaves finite only the logits of tokens that go on along a request's trie."""

    tokenizer: ClassVar[Tokenizer]
    eos: ClassVar[int]
    separator: ClassVar[int]
    records: ClassVar[dict[str, list[list[int]]]] = {}
    """Allowed ids by position, of the requests that asked for them."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Anything goes, as it did."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows = TrieRows()  # type: ignore[assignment]

    @property
    def strays(self) -> int:
        """Not counted then."""
        return 0

    def update_state(self, batch_update: Any) -> None:
        """Follow the engine's repacking."""
        if batch_update is None:
            return
        rows: Any = self._rows
        for row in batch_update.removed:
            rows.remove(row)
        for row, params, _prompt, output in batch_update.added:
            rows.remove(row)
            extra = params.extra_args or {}
            if MOVES in extra:
                trie = OrderTrie(self.tokenizer, extra[MOVES], extra[WANTED], self.eos, self.separator)
                record = self.records.setdefault(extra[RECORD], []) if RECORD in extra else None
                rows.add(row, trie, output, record)
        for source, target, direction in batch_update.moved:
            rows.move(source, target, direction == MoveDirectionality.SWAP)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [rows, vocabulary], changed in place."""
        return self._rows.mask(logits)
