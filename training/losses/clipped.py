"""Clipped token loss.

For a branching token with ratio r = pi / b (current over behaviour probability, both over the legal set) and advantage A:

    L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)          PPO, Schulman et al. 2017, arXiv 1707.06347;
                                                                  asymmetric clip: DAPO, Yu et al. 2025, arXiv 2503.14476
    for A < 0:  L = min(L, DUAL_CLIP * |A|)                        dual clip: Ye et al. 2020, arXiv 1912.09729
"""

import torch

from training.losses.token_loss import DrawnTokens, TokenLoss, clipped, log_importance, log_ratio, outliers, truncated
from training.settings import TrainingSettings


def clipped_loss(tokens: DrawnTokens, settings: TrainingSettings) -> TokenLoss:
    """Loss of each branching token, before division by the update's branching tokens."""
    left_out = outliers(tokens, settings)
    loss, low, high = clipped(torch.exp(log_ratio(tokens, left_out)), tokens.advantages, settings)
    loss = torch.where(left_out, torch.zeros_like(loss), loss * truncated(log_importance(tokens), settings))
    return TokenLoss(loss=loss, clipped_low=low, clipped_high=high, left_out=left_out)
