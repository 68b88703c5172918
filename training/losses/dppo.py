"""Divergence-masked token loss (DPPO, arXiv 2602.04879; prime-rl's default).

    L = -r A,  but 0 where  A > 0 and p - q > DIVERGENCE,  or  A < 0 and p - q < -DIVERGENCE

p and q are the current and the anchor's probability of the token over its legal set, and r = p / q. The bound limits the
difference of probabilities, not the ratio: the ratio of a rare token may become large while its probability changes little.
"""

import torch

from training.losses.token_loss import DrawnTokens, TokenLoss, log_importance, log_ratio, outliers, truncated
from training.settings import TrainingSettings

DIVERGENCE = 0.2
"""Largest change of a token's probability that still gives a gradient, as in prime-rl."""


def dppo_loss(tokens: DrawnTokens, settings: TrainingSettings) -> TokenLoss:
    """Loss of each branching token, before division by the update's branching tokens."""
    left_out = outliers(tokens, settings)
    anchor = tokens.behaviour if tokens.anchor is None else tokens.anchor
    change = torch.exp(tokens.logprobs.detach()) - torch.exp(anchor)
    low = (change < -DIVERGENCE) & (tokens.advantages < 0)
    high = (change > DIVERGENCE) & (tokens.advantages > 0)
    loss = -torch.exp(log_ratio(tokens, left_out)) * tokens.advantages * truncated(log_importance(tokens), settings)
    loss = torch.where(left_out | low | high, torch.zeros_like(loss), loss)
    return TokenLoss(loss=loss, clipped_low=low, clipped_high=high, left_out=left_out)
