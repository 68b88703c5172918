"""The loss of an update: policy loss, KL divergence, entropy and legal mass, each a sum divided by a constant of the update.

    loss = 1 / D sum L_t  +  1 / N sum (kl_weight KL_t - entropy_weight H_t)  +  1 / P legal_mass_weight sum -log M_t

L is the policy loss, D its denominator (branching tokens or decisions), N the branching tokens, and P the branching tokens whose
legal mass M is probed. An update with lessons adds the cross-entropy with the teacher's distribution q over its proposals o,
which is learned on positions that the student reaches (DAgger: Ross et al. 2011, arXiv 1011.0686; expert iteration: Anthony et
al. 2017, arXiv 1705.08439):

    + 1 / E sum over lessons and proposals of q(o) sum -log pi(o_t),    E = the same sum of q(o) |o|

|o| counts the branching tokens of a proposal, so E is the expected number of the teacher's branching tokens, and the term is in
nats per branching token, like the policy loss.

All divisors are counted over the whole update before its first forward. So the loss does not depend on how the update is split
into micro-batches.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from entente.training.choose_loss import policy_loss
from entente.training.losses import DrawnTokens
from entente.training.masked_logprobs import MaskedLogprobs
from entente.training.results import Gauges
from entente.training.settings import TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The loss of one update."""

    settings: TrainingSettings
    branching_tokens: int
    """N."""
    thought_tokens: int
    """Those of N that are thought tokens."""
    decisions: int
    """Decisions of the update that have a branching token."""
    probed_tokens: int
    """P."""
    teacher_tokens: float = 0.0
    """E; 0 without lessons."""

    def add(
        self, tokens: DrawnTokens, found: MaskedLogprobs, batch_row: np.ndarray, in_thought: np.ndarray
    ) -> tuple[Tensor, Gauges]:
        """One micro-batch's part of the loss (a scalar with gradient), and figures of its tokens.

        Args:
            batch_row: int64 [tokens], the token's row in the whole batch.
            in_thought: bool [tokens], True for thought tokens.
        """
        kind = policy_loss(self.settings.loss)
        policy = kind.of(tokens, self.settings)
        loss = policy.loss.sum() / kind.denominator(self.branching_tokens, self.decisions)
        slope = torch.full_like(found.entropy, float("nan"))
        if self.thought_tokens:
            (slope,) = torch.autograd.grad(loss, tokens.logprobs, retain_graph=True)
        if self.settings.entropy_weight:
            loss = loss - self.settings.entropy_weight * found.entropy.sum() / self.branching_tokens
        if found.kl is not None:
            loss = loss + self.settings.kl_weight * found.kl.sum() / self.branching_tokens
        if self.settings.legal_mass_weight and self.probed_tokens:
            probed = torch.isfinite(found.legal_mass)
            surprise = -torch.log(torch.where(probed, found.legal_mass, 1.0))
            loss = loss + self.settings.legal_mass_weight * surprise.sum() / self.probed_tokens
        kl = torch.full_like(slope, float("nan")) if found.kl is None else found.kl
        figures = [tokens.logprobs - tokens.behaviour, found.entropy, found.legal_mass, kl, slope]
        guards = [policy.clipped_low, policy.clipped_high, policy.left_out]
        # Stacked, so that the device is read once instead of eight times.
        seen = torch.stack([figure.detach().float() for figure in (*figures, *guards)]).cpu().numpy()
        return loss, Gauges(
            batch_row=batch_row,
            in_thought=in_thought,
            log_ratio=seen[0],
            entropy=seen[1],
            legal_mass=seen[2],
            kl=seen[3],
            slope=seen[4],
            clipped_low=seen[5] > 0,
            clipped_high=seen[6] > 0,
            left_out=seen[7] > 0,
        )

    def distil(self, found: MaskedLogprobs, weights: Tensor) -> Tensor:
        """One micro-batch's part of the distillation loss, a scalar with gradient.

        Args:
            weights: float32 [tokens], the teacher's probability of the token's proposal.
        """
        return -(1 / self.teacher_tokens) * (weights * found.chosen).sum()
