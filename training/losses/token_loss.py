"""What every policy loss is given and what it gives back.

Promise: a loss is a value per branching token, and nothing is averaged here: the caller adds the values up and divides once by a
constant of the whole update (`choose.py`), so that cutting an update into micro-batches never changes it. The tokens of a
decision are never split between two micro-batches: losses over whole decisions rely on it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from training.settings import OUTLIER_HIGH, OUTLIER_LOW, TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTokens:
    """The branching tokens of a micro-batch; all of shape [tokens], nats where they are logarithms."""

    logprobs: Tensor
    """float32, of the current masked policy; carries the gradient."""
    behaviour: Tensor
    """float32, of the masked policy that drew the tokens."""
    advantages: Tensor
    """float32, each token its decision's."""
    decisions: Tensor
    """int64: the decision that each token belongs to, by any numbering."""
    anchor: Tensor | None = None
    """float32, detached: of the policy that the ratio is taken against; None: of the one that drew the tokens. Where it is
    another, importance weights make up for the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Loss per branching token and what the guards did; all of shape [tokens]."""

    loss: Tensor
    """float32; zero where a token was left out."""
    clipped_low: Tensor
    """bool: no gradient because the token became rarer under a negative advantage, beyond the bound."""
    clipped_high: Tensor
    """bool: no gradient because the token became likelier under a positive advantage, beyond the bound."""
    left_out: Tensor
    """bool: its ratio to the policy that drew it was outside the outlier bounds, or no number."""


def log_ratio(tokens: DrawnTokens, left_out: Tensor) -> Tensor:
    """log(pi / anchor), with the gradient; 0 where left out, since what is no number would pass `where` as a gradient."""
    against = tokens.behaviour if tokens.anchor is None else tokens.anchor
    return torch.where(left_out, torch.zeros_like(against), tokens.logprobs - against)


def outliers(tokens: DrawnTokens, settings: TrainingSettings) -> Tensor:
    """bool: pi / b is outside [OUTLIER_LOW, OUTLIER_HIGH], or no number."""
    ratio = torch.exp((tokens.logprobs - tokens.behaviour).detach())
    return (ratio < OUTLIER_LOW) | (ratio > OUTLIER_HIGH) | ~torch.isfinite(ratio)


def log_importance(tokens: DrawnTokens) -> Tensor:
    """log(anchor / b), detached: 0 where the ratio is taken against b itself."""
    return torch.zeros_like(tokens.behaviour) if tokens.anchor is None else tokens.anchor - tokens.behaviour


def truncated(log_weights: Tensor, settings: TrainingSettings) -> Tensor:
    """min(weight, importance_cap): truncated importance sampling, as in IMPALA (Espeholt et al. 2018, arXiv 1802.01561)."""
    return torch.exp(log_weights).clamp(max=settings.importance_cap) if settings.importance_cap else torch.exp(log_weights)


def clipped(ratio: Tensor, advantages: Tensor, settings: TrainingSettings) -> tuple[Tensor, Tensor, Tensor]:
    """The clipped surrogate of a ratio, be it a token's or a decision's; and where it is clipped from below and from above."""
    bounded = torch.clamp(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    loss = torch.where(advantages < 0, torch.minimum(loss, -settings.dual_clip * advantages), loss)
    low = (ratio.detach() < 1 - settings.clip_low) & (advantages < 0)
    high = (ratio.detach() > 1 + settings.clip_high) & (advantages > 0)
    return loss, low, high


def numbered(decisions: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's place among the decisions that occur, and how many tokens each of these has (int64 [tokens], [decisions])."""
    _, place, sizes = torch.unique(decisions, return_inverse=True, return_counts=True)
    return place, sizes


def decision_means(values: Tensor, place: Tensor, sizes: Tensor) -> Tensor:
    """Mean of each decision's tokens, [decisions]."""
    return values.new_zeros(len(sizes)).index_add(0, place, values) / sizes
