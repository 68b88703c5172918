"""Input and output of every policy loss, and the parts that losses share.

A loss returns one value per branching token and averages nothing. The caller adds the values and divides once by a constant of
the whole update (`choose.py`), so the loss does not depend on how an update is split into micro-batches. All tokens of a decision
are in one micro-batch; losses over whole decisions need this.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from training.settings import DUAL_CLIP, OUTLIER_HIGH, OUTLIER_LOW, TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTokens:
    """The branching tokens of a micro-batch. All fields have shape [tokens]; log-probabilities are in nats."""

    logprobs: Tensor
    """float32: log-probabilities of the current masked policy, with gradient."""
    behaviour: Tensor
    """float32: log-probabilities of the masked policy that drew the tokens."""
    advantages: Tensor
    """float32: advantage of the token's decision."""
    decisions: Tensor
    """int64: number of the token's decision, in any numbering."""
    anchor: Tensor | None = None
    """float32, detached: log-probabilities of the policy in the ratio's denominator. None: the policy that drew the tokens.
    Otherwise importance weights correct for the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Loss per branching token, and which tokens were clipped or left out. All fields have shape [tokens]."""

    loss: Tensor
    """float32; 0 for tokens that are left out."""
    clipped_low: Tensor
    """bool: no gradient, because the advantage is negative and the token is already rarer than the bound allows."""
    clipped_high: Tensor
    """bool: no gradient, because the advantage is positive and the token is already likelier than the bound allows."""
    left_out: Tensor
    """bool: the token's ratio to the policy that drew it is outside the outlier bounds, or NaN."""


def log_ratio(tokens: DrawnTokens, left_out: Tensor) -> Tensor:
    """log(pi / anchor) with gradient, [tokens]; 0 for tokens that are left out, because a NaN passes through `torch.where` as a
    NaN gradient."""
    anchor = tokens.behaviour if tokens.anchor is None else tokens.anchor
    return torch.where(left_out, torch.zeros_like(anchor), tokens.logprobs - anchor)


def outliers(tokens: DrawnTokens, settings: TrainingSettings) -> Tensor:
    """bool [tokens]: pi / b is outside [OUTLIER_LOW, OUTLIER_HIGH], or NaN."""
    ratio = torch.exp((tokens.logprobs - tokens.behaviour).detach())
    return (ratio < OUTLIER_LOW) | (ratio > OUTLIER_HIGH) | ~torch.isfinite(ratio)


def log_importance(tokens: DrawnTokens) -> Tensor:
    """log(anchor / b), detached, [tokens]; 0 without an anchor."""
    return torch.zeros_like(tokens.behaviour) if tokens.anchor is None else tokens.anchor - tokens.behaviour


def truncated(log_weights: Tensor, settings: TrainingSettings) -> Tensor:
    """min(weight, importance_cap): truncated importance sampling, as in IMPALA (Espeholt et al. 2018, arXiv 1802.01561)."""
    return torch.exp(log_weights).clamp(max=settings.importance_cap) if settings.importance_cap else torch.exp(log_weights)


def clipped(ratio: Tensor, advantages: Tensor, settings: TrainingSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped surrogate loss of ratios (of tokens or of decisions).

    Returns:
        The loss, and bool masks of where it is clipped from below and from above; all of the ratio's shape.
    """
    bounded = torch.clamp(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    loss = torch.where(advantages < 0, torch.minimum(loss, -DUAL_CLIP * advantages), loss)
    low = (ratio.detach() < 1 - settings.clip_low) & (advantages < 0)
    high = (ratio.detach() > 1 + settings.clip_high) & (advantages > 0)
    return loss, low, high


def numbered(decisions: Tensor) -> tuple[Tensor, Tensor]:
    """Number decisions from 0.

    Returns:
        int64 [tokens]: new number of each token's decision; int64 [decisions]: tokens of each decision.
    """
    _, place, sizes = torch.unique(decisions, return_inverse=True, return_counts=True)
    return place, sizes


def decision_means(values: Tensor, place: Tensor, sizes: Tensor) -> Tensor:
    """Mean of `values` over each decision's tokens, [decisions]; `place` and `sizes` as from `numbered`."""
    return values.new_zeros(len(sizes)).index_add(0, place, values) / sizes
