"""The logits processor for vLLM's V1 model runner, on the CPU and on CUDA. It passes vLLM's batch updates to `LegalRows`.

No method may raise while the engine steps; see `legal_admission`. The processor samples the tokens of seeded requests using
only vLLM's public interface: it leaves one logit finite, whose token vLLM's greedy sampler picks, and which it returns as
log-probability (`logprobs_mode` "processed_logits"). vLLM's own sampler would generate random numbers for the whole
vocabulary, in one kernel launch per request. On a CPU it also works around a vLLM bug in requests to the base model.
"""

# vLLM is in an environment of its own.
# pyright: reportMissingImports=false

from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from entente.inference.legal_admission import TABLE_KEY, admit, admitted_table, sampling_of, start_node
from entente.inference.legal_rows import LegalRows

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["TABLE_KEY", "LegalOrderProcessor"]


class LegalOrderProcessor(LogitsProcessor):
    """For a seeded request, samples a token that continues a legal order set; for others, only masks the illegal tokens."""

    _vocabulary_size: ClassVar[int | None] = None
    """None in a process that validates requests but does not run the engine."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        admit(sampling_params, cls._vocabulary_size)

    def __init__(self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool) -> None:
        self._size = LegalOrderProcessor._vocabulary_size = vllm_config.model_config.get_vocab_size()
        self._rows = LegalRows(vllm_config.scheduler_config.max_num_seqs, device)
        if device.type == "cpu":
            _run_base_rows_without_adapter()

    @property
    def illegal_tokens(self) -> int:
        return self._rows.illegal_tokens

    def is_argmax_invariant(self) -> bool:
        """False: the mask can change the most likely token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply a batch update in the order that vLLM requires: removed, added, moved."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.remove(row)
        for row, params, _prompt, output in batch_update.added:
            self._rows.add(row, admitted_table(params, self._size), output, start_node(params), sampling_of(params))
        for source, target, direction in batch_update.moved:
            self._rows.move(source, target, direction == MoveDirectionality.SWAP)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return self._rows.apply(logits)


@cache
def _run_base_rows_without_adapter() -> None:
    """Patch vLLM 0.32 on a CPU, which applies the adapter in the last slot to requests of the base model: it marks such rows with
    slot -1, and its PyTorch kernels use it as an index. Keeping a slot empty does not help: the
    server's endpoint for unloading an adapter removes only the name, not the weights."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    shrink = PunicaWrapperCPU._apply_shrink

    def shrink_rows_with_adapter(
        self: PunicaWrapperCPU, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float
    ) -> None:
        shrink(self, y, x, w_t_all, scale)
        y.view(-1, y.shape[-1])[self.token_lora_indices < 0] = 0

    PunicaWrapperCPU._apply_shrink = shrink_rows_with_adapter
