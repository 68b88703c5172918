"""Sequence-mean token loss: each decision counts the same, however many branching tokens it has.

    L_t = clipped token loss / |o_i|        GRPO as first published: Shao et al. 2024, arXiv 2402.03300

|o_i| is the number of branching tokens of the decision. A token of a long decision has a smaller weight than one of a short
decision. Because of that bias the token mean is the default (Liu et al. 2025, arXiv 2503.20783).
"""

from dataclasses import replace

from training.losses.clipped import clipped_loss
from training.losses.token_loss import DrawnTokens, TokenLoss, numbered
from training.settings import TrainingSettings


def sequence_mean_loss(tokens: DrawnTokens, settings: TrainingSettings) -> TokenLoss:
    """Loss of each branching token, before division by the update's decisions."""
    found = clipped_loss(tokens, settings)
    place, sizes = numbered(tokens.decisions)
    return replace(found, loss=found.loss / sizes[place])
