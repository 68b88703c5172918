"""The clipped token loss of the masked policy.

For a branching token with ratio r = pi / b (current over behaviour probability, both over the legal set) and advantage A:

    L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)          PPO, Schulman et al. 2017, arXiv 1707.06347;
                                                                  asymmetric clip: DAPO, Yu et al. 2025, arXiv 2503.14476
    for A < 0:  L = min(L, dual_clip * |A|)                        dual clip: Ye et al. 2020, arXiv 1912.09729

Tokens whose ratio left [outlier_low, outlier_high] are left out. The sum over tokens is divided by one constant for
the whole update (its branching tokens), so that cutting it into micro-batches never changes it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from training.settings import TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Loss per branching token and what the guards did; all of shape [branching tokens]."""

    loss: Tensor
    """float32; zero where a token was left out."""
    ratio: Tensor
    """float32, detached: current over behaviour probability."""
    clipped_low: Tensor
    """bool: no gradient because the ratio fell below 1 - clip_low under a negative advantage."""
    clipped_high: Tensor
    """bool: no gradient because the ratio rose above 1 + clip_high under a positive advantage."""
    left_out: Tensor
    """bool: outside the outlier bounds."""


def clipped_token_loss(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, settings: TrainingSettings) -> TokenLoss:
    """Loss of each branching token, before the division by the step's constant.

    Args:
        logprobs: float32 [tokens], of the current masked policy; carries the gradient.
        behaviour: float32 [tokens], of the masked policy that drew them.
        advantages: float32 [tokens], each token its decision's.
    """
    ratio = torch.exp(logprobs - behaviour)
    bounded = torch.clamp(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    loss = torch.where(advantages < 0, torch.minimum(loss, -settings.dual_clip * advantages), loss)
    left_out = (ratio < settings.outlier_low) | (ratio > settings.outlier_high) | ~torch.isfinite(ratio)
    detached = ratio.detach()
    return TokenLoss(
        loss=torch.where(left_out, torch.zeros_like(loss), loss),
        ratio=detached,
        clipped_low=(detached < 1 - settings.clip_low) & (advantages < 0),
        clipped_high=(detached > 1 + settings.clip_high) & (advantages > 0),
        left_out=left_out,
    )
