"""Clipped importance weights (CISPO: MiniMax-M1, 2025, arXiv 2506.13585; ScaleRL's loss, arXiv 2510.13786).

    L = -sg(min(r, 1 + clip_high)) A log pi        sg: no gradient passes through the weight

The weight of a token is bounded from above, and no token loses its gradient: `clip_low` and the dual clip have no effect. ScaleRL
tries upper bounds of 4 to 8, which is a clip_high of 3 to 7.
"""

import torch

from training.losses.token_loss import DrawnTokens, TokenLoss, log_importance, log_ratio, outliers, truncated
from training.settings import TrainingSettings


def cispo_loss(tokens: DrawnTokens, settings: TrainingSettings) -> TokenLoss:
    """Loss of each branching token, before division by the update's branching tokens."""
    left_out = outliers(tokens, settings)
    weight = torch.exp(log_ratio(tokens, left_out).detach()).clamp(max=1 + settings.clip_high)
    weight = weight * truncated(log_importance(tokens), settings)
    logprobs = torch.where(left_out, torch.zeros_like(tokens.logprobs), tokens.logprobs)
    never = torch.zeros_like(left_out)
    return TokenLoss(loss=-weight * tokens.advantages * logprobs, clipped_low=never, clipped_high=never, left_out=left_out)
