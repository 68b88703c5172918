"""The training step of the system that Entente replaced: the baseline of `bench trainer`.

It was written from measurements and a list of features; no code was copied. Rows are padded, four at a time. The reference (the
model without its adapter, without gradient) and the policy each have a forward. Both have a log-softmax over the whole vocabulary
at every position, including prompt and padding. The loss is a clipped ratio with a sampled KL term over the completion; without
the divergence, reference and term are left out. The old system requested gradient checkpointing but left the model in evaluation
mode, where transformers ignores it. The loss is that of the unmasked policy, so its gradient differs from ours.
Cheaper than the original: no top-100 entropy of every position, ratios by token instead of sequence, no dropout.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from storage.gather import Batch

ROWS_EACH = 4
"""Rows in a forward."""
KL_WEIGHT, CLIP = 0.01, 0.2


class OldTrainer:
    """Old training steps of a peft model; gradients accumulate in its adapter."""

    def __init__(self, model: Any, *, divergence: bool) -> None:
        """`divergence`: compute the reference and add the divergence from it to the loss."""
        self._model, self._divergence = model, divergence
        self._device = next(model.parameters()).device
        self._half = any(weight.dtype == torch.bfloat16 for weight in model.parameters())

    def accumulate(self, batch: Batch, advantages: np.ndarray) -> float:
        """Forward and backward over all rows of `batch`; returns the loss, a mean over completion tokens.

        Args:
            advantages: float32 [rows].
        """
        denominator, total = int(batch.completion_offsets[-1]), 0.0
        # With a bfloat16 base the adapter's products are bfloat16 too, as in our step.
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._half):
            for first in range(0, len(batch.prompt_lens), ROWS_EACH):
                rows = range(first, min(first + ROWS_EACH, len(batch.prompt_lens)))
                loss = self._loss(_pad(batch, rows, advantages, self._device)) / denominator
                loss.backward()
                total += float(loss.detach())
        return total

    def _loss(self, rows: dict[str, Tensor]) -> Tensor:
        reference = None
        if self._divergence:
            with torch.no_grad(), self._model.disable_adapter():
                reference = self._logprobs(rows)
        logprobs = self._logprobs(rows)
        ratio = torch.exp(logprobs - rows["behaviour"])
        loss = -torch.minimum(ratio * rows["advantage"], torch.clamp(ratio, 1 - CLIP, 1 + CLIP) * rows["advantage"])
        if reference is not None:
            off = reference - logprobs
            loss = loss + KL_WEIGHT * (torch.exp(off) - off - 1)
        return (loss * rows["completion"]).sum()

    def _logprobs(self, rows: dict[str, Tensor]) -> Tensor:
        """[R, L - 1] log-probability of each next token over the whole vocabulary."""
        logits = self._model(input_ids=rows["ids"], attention_mask=rows["mask"], use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        return torch.gather(logprobs, 2, rows["ids"][:, 1:, None])[:, :, 0]


def _pad(batch: Batch, rows: Sequence[int], advantages: np.ndarray, device: torch.device) -> dict[str, Tensor]:
    """Rows padded on the right; columns of next tokens are one shorter."""
    lengths = np.diff(batch.input_offsets)[list(rows)]
    shape = (len(rows), int(lengths.max()))
    ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    behaviour, completion = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for here, row in enumerate(rows):
        length, prompt = int(lengths[here]), int(batch.prompt_lens[row])
        ids[here, :length] = batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]]
        mask[here, :length] = 1
        first, last = batch.completion_offsets[row], batch.completion_offsets[row + 1]
        behaviour[here, prompt:length] = batch.behaviour_logprobs[first:last]
        completion[here, prompt:length] = 1
    columns = {"ids": ids, "mask": mask, "behaviour": behaviour[:, 1:], "completion": completion[:, 1:]}
    columns["advantage"] = advantages[list(rows)].astype(np.float32)[:, None]
    return {name: torch.from_numpy(np.ascontiguousarray(column)).to(device) for name, column in columns.items()}
