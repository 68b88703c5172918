"""A policy loss: a value for each sampled token, and the divisor of their sum. Settings name one as `module:attribute`."""

from entente.training.losses import PolicyLoss, SampledTokens, TokenLoss, clipped, decision_means, log_ratio, numbered, outliers
from entente.training.settings import TrainingSettings

__all__ = [
    "PolicyLoss",
    "SampledTokens",
    "TokenLoss",
    "TrainingSettings",
    "clipped",
    "decision_means",
    "log_ratio",
    "numbered",
    "outliers",
]
