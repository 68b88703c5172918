"""The hook: from the setting `training.loss` to the function that computes it, and to what its sum is divided by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from training.losses.clipped import clipped_loss
from training.losses.dppo import dppo_loss
from training.losses.gspo import gspo_loss
from training.losses.sequence_mean import sequence_mean_loss
from training.losses.token_loss import DrawnTokens, TokenLoss
from training.settings import TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A loss by name."""

    of: Callable[[DrawnTokens, TrainingSettings], TokenLoss]
    """Loss of each branching token of a micro-batch, before the division."""
    per_decision: bool
    """Divide the sum by the update's decisions that have a branching token, not by its branching tokens."""

    def denominator(self, branching_tokens: int, decisions: int) -> int:
        """What the sum over the whole update is divided by, once."""
        return decisions if self.per_decision else branching_tokens


LOSSES: Mapping[str, PolicyLoss] = {
    "clipped": PolicyLoss(of=clipped_loss, per_decision=False),
    "dppo": PolicyLoss(of=dppo_loss, per_decision=False),
    "gspo": PolicyLoss(of=gspo_loss, per_decision=True),
    "sequence_mean": PolicyLoss(of=sequence_mean_loss, per_decision=True),
}
"""All that `training.loss` may name."""
