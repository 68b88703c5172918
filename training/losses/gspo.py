"""Group sequence policy optimisation: one ratio for the whole decision (Zheng et al. 2025, arXiv 2507.18071).

    s_i = exp(mean over the decision's branching tokens of log(pi / b))
    L_i = the clipped surrogate of s_i, spread evenly over its tokens

A decision with an outlier token is left out completely. The paper's bounds (3e-4 and 4e-4) are for means over thousands of
tokens. A decision has about ten tokens, so this loss uses clip_low and clip_high, like the other losses.
"""

import torch

from training.losses.token_loss import (
    DrawnTokens,
    TokenLoss,
    clipped,
    decision_means,
    log_importance,
    log_ratio,
    numbered,
    outliers,
    truncated,
)
from training.settings import TrainingSettings


def gspo_loss(tokens: DrawnTokens, settings: TrainingSettings) -> TokenLoss:
    """Loss of each branching token, before division by the update's decisions."""
    place, sizes = numbered(tokens.decisions)
    left_out = decision_means(outliers(tokens, settings).float(), place, sizes)[place] > 0
    ratio = torch.exp(decision_means(log_ratio(tokens, left_out), place, sizes))[place]
    loss, low, high = clipped(ratio, tokens.advantages, settings)
    weight = truncated(decision_means(log_importance(tokens), place, sizes), settings)[place]
    loss = torch.where(left_out, torch.zeros_like(loss), loss * weight / sizes[place])
    return TokenLoss(loss=loss, clipped_low=low, clipped_high=high, left_out=left_out)
