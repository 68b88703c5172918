"""Both arms of the trainer benchmarks on one policy: our training step, and that of the system that Entente replaced.

The old step is a reimplementation from measurements and a list of features, without copied code. It pads four rows at a time, and
computes a log-softmax over the whole vocabulary at every position, including prompt and padding, and a clipped ratio over the
completion. The old system requested gradient checkpointing but left the model in evaluation mode, where transformers ignores it.
The loss is that of the unmasked policy, so its gradient differs from ours. It is cheaper than the original: no reference model,
no top-100 entropy of every position, ratios by token instead of sequence, no dropout.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from benchmarks.padded_rows import pad
from benchmarks.trainer_cases import model_of, stir_adapter
from entente.training.policy import Policy
from entente.training.settings import TrainingSettings
from entente.training.update import Updater, share_rows
from storage.gather import Batch

Step = Callable[[Batch], float]
"""Zeroes the gradient, runs forward and backward over a batch, and returns the loss. Does not step the optimiser."""
OLD_ROWS_EACH = 4
OLD_CLIP = 0.2


class Steps:
    def __init__(self, policy: Policy, settings: TrainingSettings) -> None:
        self.policy, self.settings = policy, settings
        stir_adapter(policy.parameters())

    def ours(self, **settings: Any) -> Step:
        chosen = self.settings.model_copy(update=settings)
        updater = Updater(self.policy, chosen)

        def step(batch: Batch) -> float:
            self.policy.recompute(chosen.gradient_checkpointing)
            self.policy.model.zero_grad(set_to_none=True)
            budget, updates = updater.tokens, update_rows(batch, chosen)
            loss = sum(sum(updater.accumulate(batch, rows, advantages_of(batch)).losses) for rows in updates)
            if updater.tokens < budget:  # a run goes on with halves; a measurement of this budget does not
                raise torch.OutOfMemoryError(f"{budget} unique tokens do not fit")
            return loss

        return step

    def old(self) -> Step:
        """The old step; its loss is a mean over completion tokens."""
        model = self.policy.model

        def step(batch: Batch) -> float:
            self.policy.recompute(False)
            model.zero_grad(set_to_none=True)
            denominator, total = int(batch.completion_offsets[-1]), 0.0
            # With a bfloat16 base the adapter's products are bfloat16 too, as in our step.
            with torch.autocast(self.policy.device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16"):
                for first in range(0, len(batch.prompt_lens), OLD_ROWS_EACH):
                    rows = range(first, min(first + OLD_ROWS_EACH, len(batch.prompt_lens)))
                    loss = _old_loss(model, _padded(batch, rows, self.policy.device)) / denominator
                    loss.backward()
                    total += float(loss.detach())
            return total

        return step


def random_steps(config: PretrainedConfig) -> Steps:
    settings = TrainingSettings(device="cpu")
    return Steps(Policy(model_of(config), settings), settings)


def update_rows(batch: Batch, settings: TrainingSettings) -> list[list[int]]:
    """The rows of each update of a step, as in `Updater.updates`; rows share prefixes only within an update."""
    return share_rows(batch, settings.updates_per_step)


def advantages_of(batch: Batch) -> np.ndarray:
    """float32 [rows]: the returns, which are nonzero, so that every row has a gradient."""
    return batch.returns.astype(np.float32)


def _old_loss(model: Any, rows: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=rows["ids"], attention_mask=rows["mask"], use_cache=False).logits
    logprobs = torch.gather(torch.log_softmax(logits[:, :-1].float(), dim=-1), 2, rows["ids"][:, 1:, None])[:, :, 0]
    ratio = torch.exp(logprobs - rows["behaviour"])
    clipped = torch.clamp(ratio, 1 - OLD_CLIP, 1 + OLD_CLIP)
    return -(torch.minimum(ratio * rows["advantage"], clipped * rows["advantage"]) * rows["completion"]).sum()


def _padded(batch: Batch, rows: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Right-padded rows; columns of next tokens are one shorter."""
    ids, mask = pad(batch, rows)
    behaviour, completion = np.zeros(ids.shape, np.float32), np.zeros(ids.shape, np.float32)
    for here, row in enumerate(rows):
        length, prompt = int(mask[here].sum()), int(batch.prompt_lens[row])
        first, last = batch.completion_offsets[row], batch.completion_offsets[row + 1]
        behaviour[here, prompt:length] = batch.behaviour_logprobs[first:last]
        completion[here, prompt:length] = 1
    columns = {"ids": ids, "mask": mask, "behaviour": behaviour[:, 1:], "completion": completion[:, 1:]}
    columns["advantage"] = advantages_of(batch)[list(rows), None]
    return {name: torch.from_numpy(np.ascontiguousarray(column)).to(device) for name, column in columns.items()}
