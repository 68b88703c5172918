"""From a batch to changed weights: advantages, micro-batches, loss and gradient, and one guarded optimiser step per update.

Promise: the loss of an update is one sum over its branching tokens, divided by one constant, so that cutting it into
micro-batches never changes it; and weights stay as they are where loss or gradient is not finite.
Never: choose rows, or write a file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from storage.gather import Batch
from storage.outcome import UpdateOutcome
from telemetry.errors import TrainingError
from training.advantages import leave_one_out
from training.losses.choose import LOSSES
from training.losses.token_loss import BranchingTokens
from training.padded_rows import branching_decisions, branching_tokens, padded_micro_batches
from training.policy import Policy
from training.settings import TrainingSettings
from training.step_metrics import Update

_SKIPS_ALLOWED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """What forward and backward of one update came to; the gradient itself lies in the parameters."""

    losses: list[float]
    """Per micro-batch, already divided by the update's constant: their sum is the update's loss."""
    gauges: np.ndarray
    """float32 [6, branching tokens], as in `Update`."""


class Updater:
    """Owns the optimiser of a policy, and makes the updates of a step.

    Attributes:
        optimiser: its state goes into checkpoints.
        skipped_in_a_row: updates since the last finite one; goes into checkpoints.
    """

    def __init__(self, policy: Policy, settings: TrainingSettings) -> None:
        self._policy = policy
        self._settings = settings
        self.optimiser = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, betas=(0.9, 0.999), weight_decay=0.0)
        self.skipped_in_a_row = 0

    def updates(self, batch: Batch) -> Iterator[Update]:
        """The step's updates, one by one, each on its own share of the advantage groups."""
        advantages = leave_one_out(batch.returns, batch.advantage_groups).astype(np.float32)
        shares = self._settings.updates_per_step
        for share in range(shares):
            rows = np.flatnonzero(batch.advantage_groups % shares == share).tolist()
            if branching_tokens(batch, rows):
                yield self.update(batch, rows, advantages)

    def update(self, batch: Batch, rows: Sequence[int], advantages: np.ndarray) -> Update:
        """Forward, backward and one optimiser step on `rows`.

        Args:
            advantages: float32 [rows of the batch], of every row of the batch.
        """
        self.optimiser.zero_grad(set_to_none=True)
        return self.apply(self.accumulate(batch, rows, advantages))

    def accumulate(self, batch: Batch, rows: Sequence[int], advantages: np.ndarray) -> Accumulated:
        """Forward and backward over all micro-batches of `rows`; gradients add up in the parameters."""
        kind = LOSSES[self._settings.loss]
        denominator = kind.denominator(branching_tokens(batch, rows), branching_decisions(batch, rows))
        losses, gauges = [], []
        for micro in padded_micro_batches(batch, rows, self._settings.micro_batch_rows):
            if len(micro.token_row) == 0:
                losses.append(0.0)
                continue
            probabilities = self._policy.masked_logprobs(micro)
            tokens = BranchingTokens(
                logprobs=probabilities.chosen,
                behaviour=torch.from_numpy(micro.behaviour).to(self._policy.device),
                advantages=torch.from_numpy(advantages[micro.batch_row]).to(self._policy.device),
                decisions=torch.from_numpy(micro.batch_row).to(self._policy.device),
            )
            found = kind.of(tokens, self._settings)
            loss = found.loss.sum() / denominator
            loss.backward()
            losses.append(float(loss.detach()))
            ratio = torch.exp(probabilities.chosen.detach() - tokens.behaviour)
            measured = [ratio, found.clipped_low, found.clipped_high, found.left_out]
            measured += [probabilities.entropy, probabilities.legal_mass]
            gauges.append(torch.stack([gauge.float() for gauge in measured]).cpu().numpy())
        return Accumulated(losses=losses, gauges=np.concatenate(gauges, axis=1))

    def apply(self, accumulated: Accumulated) -> Update:
        """Clip the gradient and take the optimiser step, unless something is not finite.

        Raises:
            TrainingError: three updates in a row were not finite.
        """
        loss = sum(accumulated.losses)
        norm = float(torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._settings.max_gradient_norm))
        finite = bool(np.isfinite(loss) and np.isfinite(norm))
        if finite:
            self.optimiser.step()
            self.skipped_in_a_row = 0
        else:
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row >= _SKIPS_ALLOWED:
                raise TrainingError(
                    f"loss or gradient was not finite in {_SKIPS_ALLOWED} updates in a row: lower training.learning_rate"
                )
        outcome = UpdateOutcome(loss=loss, gradient_norm=norm, micro_batches=accumulated.losses)
        return Update(outcome=outcome, skipped=not finite, gauges=accumulated.gauges)
