"""The loss of an update: policy loss, KL divergence, entropy and legal mass, each a sum divided by a constant of the update.

    loss = 1 / D sum L_t  +  1 / N sum (kl_weight KL_t - entropy_weight H_t)  +  1 / P legal_mass_weight sum -log M_t

L is the policy loss, D its denominator (branching tokens or decisions), N the branching tokens, and P the branching tokens whose
legal mass M is probed. D, N and P are counted over the whole update before its first forward. So the loss does not depend on how
the update is split into micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from training.losses.choose import policy_loss
from training.losses.token_loss import DrawnTokens, TokenLoss
from training.masked_logprobs import MaskedLogprobs
from training.reference_kl import exact_kl, legal_entropy
from training.settings import TrainingSettings
from training.step_metrics import Gauges


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The loss of one update."""

    settings: TrainingSettings
    kl_weight: float
    """Weight of the divergence in this step; at 0 the reference is not computed."""
    branching_tokens: int
    """N."""
    decisions: int
    """Decisions of the update that have a branching token."""
    probed_tokens: int
    """P."""

    def add(
        self, tokens: DrawnTokens, found: MaskedLogprobs, reference: Tensor | None, batch_row: np.ndarray
    ) -> tuple[Tensor, Gauges]:
        """One micro-batch's part of the loss (a scalar with gradient), and figures of its tokens.

        Args:
            reference: log-probabilities of the base model, shaped as `found.legal`; None if `kl_weight` is 0.
            batch_row: int64 [tokens], the token's row in the whole batch.
        """
        kind = policy_loss(self.settings.loss)
        policy = kind.of(tokens, self.settings)
        loss = policy.loss.sum() / kind.denominator(self.branching_tokens, self.decisions)
        entropy = legal_entropy(found.legal if self.settings.entropy_weight else found.legal.detach())
        if self.settings.entropy_weight:
            loss = loss - self.settings.entropy_weight * entropy.sum() / self.branching_tokens
        kl = None
        if reference is not None:
            kl = exact_kl(found.legal, reference)
            loss = loss + self.kl_weight * kl.sum() / self.branching_tokens
        if self.settings.legal_mass_weight and self.probed_tokens:
            probed = torch.isfinite(found.legal_mass)
            surprise = -torch.log(torch.where(probed, found.legal_mass, 1.0))
            loss = loss + self.settings.legal_mass_weight * surprise.sum() / self.probed_tokens
        return loss, _gauges(tokens, policy, found, entropy, kl, batch_row)


def _gauges(
    tokens: DrawnTokens, policy: TokenLoss, found: MaskedLogprobs, entropy: Tensor, kl: Tensor | None, batch_row: np.ndarray
) -> Gauges:
    figures: Sequence[Tensor] = [tokens.logprobs - tokens.behaviour, entropy, found.legal_mass]
    figures = [*figures, torch.full_like(entropy, float("nan")) if kl is None else kl]
    guards = [policy.clipped_low, policy.clipped_high, policy.left_out]
    # Stacked, so that the device is read once instead of seven times.
    seen = torch.stack([figure.detach().float() for figure in (*figures, *guards)]).cpu().numpy()
    return Gauges(
        batch_row=batch_row,
        log_ratio=seen[0],
        entropy=seen[1],
        legal_mass=seen[2],
        kl=seen[3],
        clipped_low=seen[4] > 0,
        clipped_high=seen[5] > 0,
        left_out=seen[6] > 0,
    )
