"""The loss of an update: advantages, then policy loss, KL divergence, entropy and legal mass, each a sum divided by a constant.

    loss = 1 / D sum L_t  +  1 / N sum (kl_weight KL_t - entropy_weight H_t)  +  1 / P legal_mass_weight sum -log M_t

L: policy loss; D: branching tokens or decisions; N: branching tokens; P: those whose legal mass M is probed.

Divisors are counted over the whole update before its first forward pass, so micro-batching does not matter. An advantage
group is the decisions of one start group, power and phase name, all known before the decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from entente.training.losses import SampledTokens, policy_loss
from entente.training.masked_logprobs import TokenFigures
from entente.training.micro_batches import MicroBatch, branching_indices, in_thought, probed
from entente.training.settings import TrainingSettings
from storage.gather import Batch

TOKEN_FIGURES = np.dtype(
    [
        ("batch_row", np.int64),  # row of the batch
        ("in_thought", np.bool_),
        ("log_ratio", np.float32),  # log(pi / b), nats; b is the behaviour policy, also if the loss has a proximal policy
        ("entropy", np.float32),  # of the policy over the legal set, nats
        ("legal_mass", np.float32),  # unmasked probability of the legal set; NaN if it was not probed
        ("kl", np.float32),  # divergence from the base model over the legal set, nats; NaN if it was not computed
        ("gradient", np.float32),  # d(policy loss of the update) / d(log-probability); NaN if the update has no thought token
        ("clipped_low", np.bool_),  # these three as in `TokenLoss`
        ("clipped_high", np.bool_),
        ("outlier", np.bool_),
    ]
)
"""Per branching token, before the optimiser step."""
_COMPUTED = TOKEN_FIGURES.names[2:] if TOKEN_FIGURES.names else ()
"""Those that the device computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    losses: Sequence[float]
    """Per micro-batch, already normalised; they add up to the step's loss."""
    tokens: np.ndarray
    """TOKEN_FIGURES [tokens]."""
    unique_tokens: int
    plan_s: float
    forward_s: float
    """Forward passes, including the reference model's, measured on the host."""
    backward_s: float
    grad_norm: float = float("nan")
    """Before clipping; NaN until the optimiser step."""
    skipped: bool = False
    """Loss or gradient was not finite: the weights did not change."""

    @property
    def loss(self) -> float:
        return sum(self.losses)

    @classmethod
    def join(cls, parts: Sequence["StepFigures"]) -> "StepFigures":
        return cls(
            losses=[loss for part in parts for loss in part.losses],
            tokens=join_tokens([part.tokens for part in parts]),
            unique_tokens=sum(part.unique_tokens for part in parts),
            plan_s=max(part.plan_s for part in parts),
            forward_s=max(part.forward_s for part in parts),
            backward_s=max(part.backward_s for part in parts),
        )


def token_figures(micro: MicroBatch, computed: Tensor) -> np.ndarray:
    """TOKEN_FIGURES [tokens] of a micro-batch; waits until the device has computed them."""
    figures = np.empty(len(micro.batch_row), TOKEN_FIGURES)
    figures["batch_row"], figures["in_thought"] = micro.batch_row, micro.in_thought
    for name, values in zip(_COMPUTED, computed.cpu().numpy(), strict=True):
        figures[name] = values
    return figures


def join_tokens(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, TOKEN_FIGURES), *parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Rows and divisors of one update. Every process gets it."""

    settings: TrainingSettings
    batch: Batch
    rows: Sequence[int]
    advantages: np.ndarray | None = None
    """float32 [rows of the batch]; None: compute only log-probabilities, without gradient."""
    proximal: np.ndarray | None = None
    """float32 [completion positions]: log-probabilities in the ratio's denominator; NaN: current policy. None: behaviour."""
    branching_tokens: int
    """N."""
    thought_tokens: int
    decisions: int
    """Decisions with a branching token."""
    probed_tokens: int
    """P."""

    @classmethod
    def of(
        cls,
        settings: TrainingSettings,
        batch: Batch,
        rows: Sequence[int],
        advantages: np.ndarray | None = None,
        proximal: np.ndarray | None = None,
    ) -> "Objective":
        index, place = branching_indices(batch, np.asarray(rows, np.int64))
        thought = in_thought(batch, index)
        return cls(
            settings=settings,
            batch=batch,
            rows=rows,
            advantages=advantages,
            proximal=proximal,
            branching_tokens=len(index),
            thought_tokens=int(thought.sum()),
            decisions=len(np.unique(place)),
            probed_tokens=int(probed(index[~thought]).sum()),
        )

    def loss(self, micro: MicroBatch, forward: TokenFigures) -> tuple[Tensor, Tensor]:
        """A micro-batch's part of the loss, with gradient, and what `token_figures` reads: float32 [figures, tokens], left on the
        device, because a copy would make the host wait for the forward."""
        tokens, kind = self._sampled(micro, forward["chosen"]), policy_loss(self.settings.loss)
        log_ratio = tokens.logprobs.detach() - tokens.behaviour  # now, because a user's loss may write into its tokens
        policy = kind.of(tokens, self.settings)
        loss = policy.loss.sum() / kind.denominator(self.branching_tokens, self.decisions)
        gradient = torch.full_like(forward["entropy"], float("nan"))
        if self.thought_tokens:
            (gradient,) = torch.autograd.grad(loss, tokens.logprobs, retain_graph=True)
        if self.settings.entropy_weight:
            loss = loss - self.settings.entropy_weight * forward["entropy"].sum() / self.branching_tokens
        if "kl" in forward:
            loss = loss + self.settings.kl_weight * forward["kl"].sum() / self.branching_tokens
        if self.settings.legal_mass_weight and self.probed_tokens:
            surprise = -torch.log(torch.nan_to_num(forward["legal_mass"], nan=1.0))
            loss = loss + self.settings.legal_mass_weight * surprise.sum() / self.probed_tokens
        seen = {
            "log_ratio": log_ratio,
            "entropy": forward["entropy"],
            "legal_mass": forward["legal_mass"],
            "kl": forward.get("kl", torch.full_like(gradient, float("nan"))),
            "gradient": gradient,
            "clipped_low": policy.clipped_low,
            "clipped_high": policy.clipped_high,
            "outlier": policy.outlier,
        }
        return loss, torch.stack([seen[name].detach().float() for name in _COMPUTED])

    def _sampled(self, micro: MicroBatch, chosen: Tensor) -> SampledTokens:
        assert self.advantages is not None
        device, proximal = chosen.device, None
        if self.proximal is not None:
            stored = torch.from_numpy(self.proximal[micro.completion_index]).to(device)
            proximal = torch.where(torch.isfinite(stored), stored, chosen.detach())
        return SampledTokens(
            logprobs=chosen,
            behaviour=torch.from_numpy(micro.behaviour).to(device),
            advantages=torch.from_numpy(self.advantages[micro.batch_row]).to(device),
            decisions=torch.tensor(micro.batch_row, device=device),  # a copy: the figures need the rows
            proximal=proximal,
        )
