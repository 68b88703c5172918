"""vLLM's (V1) logits processor for legal orders: an adapter from its batch updates to `LegalRows`, and one scatter.

Refuses malformed tables when a request is admitted (`validate_params`), because an exception inside the engine's loop would
leave its request unfinished for ever. Nothing below may therefore raise while the engine steps.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from decoding.legal_table import LegalTable
from inference.legal_rows import LegalRows, TableMemo
from telemetry.errors import DataError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TABLE_KEY = "legal_table"
"""Where a request's table travels, as bytes, in `SamplingParams.extra_args`."""


_admitted = lru_cache(maxsize=1024)(LegalTable.from_bytes)
"""Tables that passed admission: the forks of a position send the same bytes."""


class LegalOrderProcessor(LogitsProcessor):
    """Leaves finite only the logits of tokens that continue a legal order set."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request whose table is not one (ValueError, as vLLM asks)."""
        data = (sampling_params.extra_args or {}).get(TABLE_KEY)
        if data is None:
            return
        if not isinstance(data, bytes):
            raise ValueError(f"{TABLE_KEY} must be bytes, not {type(data).__name__}")
        try:
            table = _admitted(data)
        except DataError as error:
            raise ValueError(str(error)) from error
        if sampling_params.max_tokens is not None and sampling_params.max_tokens < table.longest:
            raise ValueError(f"max_tokens {sampling_params.max_tokens} would cut a completion of {table.longest} tokens")

    def __init__(self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._memo = TableMemo(vllm_config.model_config.get_vocab_size())
        self._rows = LegalRows()

    def is_argmax_invariant(self) -> bool:
        """A mask changes which token is likeliest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the engine's repacking, in the order that it demands: removed, added, moved."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.remove(row)
        for row, params, _prompt, output in batch_update.added:
            data = (params.extra_args or {}).get(TABLE_KEY)
            self._rows.add(row, None if data is None else self._memo.get(data), output)
        for source, target, direction in batch_update.moved:
            self._rows.move(source, target, direction == MoveDirectionality.SWAP)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [rows, vocabulary], changed in place: -inf outside each constrained row's legal set."""
        constrained, rows, tokens = self._rows.gather()
        if len(constrained) == 0:
            return logits
        row_index = torch.from_numpy(rows).to(self._device, non_blocking=True)
        token_index = torch.from_numpy(tokens).to(self._device, non_blocking=True)
        kept = logits[row_index, token_index]
        if len(constrained) == logits.shape[0]:
            logits.fill_(float("-inf"))
        else:
            logits[torch.from_numpy(constrained).to(self._device)] = float("-inf")
        logits[row_index, token_index] = kept
        return logits
