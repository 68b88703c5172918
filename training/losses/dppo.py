"""Divergence-masked token loss (DPPO, arXiv 2602.04879, as prime-rl has it by default).

    L = -r A,  but 0 where  A > 0 and p - q > divergence,  or  A < 0 and p - q < -divergence

with p and q the current and the anchor's probability of the token over its legal set, r = p / q. The bound is one of probability,
not of ratio: a rare token may grow many times over before it moved the policy by as much as a likely one does with a small ratio.
"""

import torch

from training.losses.token_loss import DrawnTokens, TokenLoss, log_importance, log_ratio, outliers, truncated
from training.settings import TrainingSettings


def dppo_loss(tokens: DrawnTokens, settings: TrainingSettings) -> TokenLoss:
    """Loss of each branching token, before the division by the update's constant."""
    left_out = outliers(tokens, settings)
    against = tokens.behaviour if tokens.anchor is None else tokens.anchor
    moved = torch.exp(tokens.logprobs.detach()) - torch.exp(against)
    low = (moved < -settings.divergence) & (tokens.advantages < 0)
    high = (moved > settings.divergence) & (tokens.advantages > 0)
    loss = -torch.exp(log_ratio(tokens, left_out)) * tokens.advantages * truncated(log_importance(tokens), settings)
    loss = torch.where(left_out | low | high, torch.zeros_like(loss), loss)
    return TokenLoss(loss=loss, clipped_low=low, clipped_high=high, left_out=left_out)
