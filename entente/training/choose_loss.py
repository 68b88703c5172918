"""Maps the setting `training.loss` to a loss function and to the denominator of its sum."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from entente.telemetry.extensions import Misfit, check_arguments, check_named, load_part
from entente.training.losses import (
    DrawnTokens,
    TokenLoss,
    cispo_loss,
    clipped_loss,
    dppo_loss,
    gspo_loss,
    sequence_mean_loss,
)
from entente.training.settings import TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A loss function and how its sum is normalised."""

    of: Callable[[DrawnTokens, TrainingSettings], TokenLoss]
    """Loss of each branching token of a micro-batch, before the division."""
    per_decision: bool
    """True: divide the sum by the decisions that have a branching token. False: by the branching tokens."""

    def denominator(self, branching_tokens: int, decisions: int) -> int:
        """Denominator of the sum over the whole update."""
        return decisions if self.per_decision else branching_tokens


LOSSES: Mapping[str, PolicyLoss] = {
    "cispo": PolicyLoss(of=cispo_loss, per_decision=False),
    "clipped": PolicyLoss(of=clipped_loss, per_decision=False),
    "dppo": PolicyLoss(of=dppo_loss, per_decision=False),
    "gspo": PolicyLoss(of=gspo_loss, per_decision=True),
    "sequence_mean": PolicyLoss(of=sequence_mean_loss, per_decision=True),
}
"""Built-in losses. `training.loss` may also name one of a user's own as `module:attribute`."""


@cache
def policy_loss(name: str) -> PolicyLoss:
    """The loss of that name, built-in or a user's own (docs/extending.md).

    Raises:
        InputError: there is no such loss, or it cannot be used.
    """
    check_named("loss", name, LOSSES)
    return LOSSES[name] if name in LOSSES else load_part("loss", name, _accept)


def _accept(found: PolicyLoss, _: str) -> PolicyLoss:
    """Check a user's loss on four tokens."""
    if not isinstance(found, PolicyLoss):
        raise Misfit("it is no entente.losses.PolicyLoss")
    check_arguments(found.of, "tokens", "settings")
    logprobs = torch.tensor([-0.1, -0.5, -1.0, -2.0], requires_grad=True)
    tokens = DrawnTokens(
        logprobs=logprobs,
        behaviour=torch.tensor([-0.2, -0.4, -1.5, -1.5]),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        decisions=torch.tensor([0, 0, 1, 1]),
    )
    tried = found.of(tokens, TrainingSettings())
    if not isinstance(tried, TokenLoss):
        raise Misfit(f"it gives a {type(tried).__name__}, not an entente.losses.TokenLoss")
    for field, kind in (
        ("loss", torch.float32),
        ("clipped_low", torch.bool),
        ("clipped_high", torch.bool),
        ("left_out", torch.bool),
    ):
        value = getattr(tried, field)
        if not isinstance(value, torch.Tensor) or value.shape != logprobs.shape or value.dtype != kind:
            raise Misfit(f"it gives a `{field}` that is no {kind} of one value for each token")
    if not tried.loss.requires_grad or not bool(torch.isfinite(tried.loss).all()):
        raise Misfit("it gives a loss without a gradient, or one that is not finite")
    return found
