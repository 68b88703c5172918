"""The loss of an update: advantages, then policy loss, KL divergence, entropy and legal mass, each a sum divided by a constant.

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

An advantage compares a decision with the others of its advantage group: the decisions of one start group, power and phase name,
only facts known before the decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from entente.training.losses import DrawnTokens, policy_loss
from entente.training.masked_logprobs import TokenFigures
from entente.training.micro_batches import branching_counts, branching_indices, in_thought, probed
from entente.training.settings import TrainingSettings
from storage.gather import Batch
from storage.lesson_shelf import LessonBatch

_GAUGE_TYPES = {"batch_row": np.int64} | dict.fromkeys(("in_thought", "clipped_low", "clipped_high", "left_out"), np.bool_)


def advantages_of(returns: np.ndarray, groups: np.ndarray, settings: TrainingSettings) -> np.ndarray:
    """The advantage of each decision of a step, float32 [rows]: `leave_one_out`, divided by the root mean square of the step if
    `settings.advantage_scale` is 'batch' (ScaleRL: Khatri et al. 2025, arXiv 2510.13786).

    Args:
        returns: float [rows].
        groups: int [rows], as in `leave_one_out`.

    Raises:
        ValueError: a group has one member only.
    """
    found = leave_one_out(returns, groups)
    if settings.advantage_scale == "batch" and (square := float(np.square(found).mean()) if len(found) else 0.0):
        found = found / np.sqrt(square)
    return found.astype(np.float32)


def leave_one_out(returns: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return minus the mean return of the *other* members of the group: A_i = n / (n - 1) * (R_i - mean(R)).

    The baseline is unbiased, because it excludes the decision's own return (RLOO: Kool et al. 2019; Ahmadian et al. 2024,
    arXiv 2402.14740). It is not divided by the group's deviation, which would overweight near-ties (Liu et al. 2025,
    arXiv 2503.20783).

    Args:
        returns: float [rows].
        groups: int [rows], any numbering; each group needs at least 2 members.

    Returns:
        float64 [rows]; sums to 0 within each group.

    Raises:
        ValueError: a group has one member only.
    """
    _, index, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if (sizes < 2).any():
        raise ValueError("an advantage group needs at least 2 decisions")
    values = returns.astype(np.float64)
    means = np.bincount(index, weights=values) / sizes
    return (values - means[index]) * (sizes / (sizes - 1))[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """Figures of an update's branching tokens before its optimiser step. All fields have shape [tokens]."""

    batch_row: npt.NDArray[np.int64]
    """Row of the batch."""
    in_thought: npt.NDArray[np.bool_]
    """True for thought tokens."""
    log_ratio: npt.NDArray[np.float32]
    """log(pi / b), nats; b is always the policy that drew the token, also if the loss has another anchor."""
    entropy: npt.NDArray[np.float32]
    """Entropy of the policy over the legal set, nats."""
    legal_mass: npt.NDArray[np.float32]
    """Unmasked probability of the legal set; NaN if it was not probed."""
    kl: npt.NDArray[np.float32]
    """Divergence from the base model over the legal set, nats; NaN if it was not computed."""
    slope: npt.NDArray[np.float32]
    """Derivative of the update's policy loss by the token's log-probability; NaN if the update has no thought token."""
    clipped_low: npt.NDArray[np.bool_]
    """As in `TokenLoss`."""
    clipped_high: npt.NDArray[np.bool_]
    """As in `TokenLoss`."""
    left_out: npt.NDArray[np.bool_]
    """As in `TokenLoss`."""

    @staticmethod
    def join(parts: "Sequence[Gauges]") -> "Gauges":
        """Concatenate; without parts the result has no tokens."""
        joined: dict[str, Any] = {}
        for each in fields(Gauges):
            nothing = np.empty(0, _GAUGE_TYPES.get(each.name, np.float32))
            joined[each.name] = np.concatenate([nothing, *(getattr(part, each.name) for part in parts)])
        return Gauges(**joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """Results of forward and backward of one update. The gradient itself is in the parameters."""

    losses: list[float]
    """Loss of each micro-batch, already divided; their sum is the update's loss."""
    gauges: Gauges
    """Figures of the update's branching tokens."""
    unique_tokens: int
    """Tokens that the forwards compute, without padding."""
    distil: float = 0.0
    """The part of the loss that lessons have, nats per branching token of the teacher; 0 without lessons."""
    plan_s: float
    """Seconds of planning the micro-batches."""
    forward_s: float
    """Seconds of the forwards, with those of the reference, measured on the host."""
    backward_s: float
    """Seconds of the backwards, measured on the host."""

    @classmethod
    def join(cls, parts: Sequence["Accumulated"]) -> "Accumulated":
        """Join the results of several processes that worked at the same time."""
        return cls(
            losses=[loss for part in parts for loss in part.losses],
            gauges=Gauges.join([part.gauges for part in parts]),
            unique_tokens=sum(part.unique_tokens for part in parts),
            distil=sum(part.distil for part in parts),
            plan_s=max(part.plan_s for part in parts),
            forward_s=max(part.forward_s for part in parts),
            backward_s=max(part.backward_s for part in parts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Rows of which an update's gradient is wanted, or figures without a gradient; sent to every process."""

    batch: Batch
    rows: Sequence[int]
    """All rows of the update or forward."""
    advantages: np.ndarray | None = None
    """float32 [rows of the batch]; None: no gradient is wanted."""
    anchors: np.ndarray | None = None
    """As in `Updater.accumulate`."""
    lessons: LessonBatch | None = None
    """The lessons of the step; None: it has none."""
    taught: Sequence[int] = ()
    """All rows of `lessons` of the update."""


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

    @classmethod
    def of(cls, work: Work, settings: TrainingSettings) -> "Objective":
        """The loss of an update, with its constants."""
        index, place = branching_indices(work.batch, np.asarray(work.rows, np.int64))
        thought = in_thought(work.batch, index)
        lessons, taught = work.lessons, list(work.taught)
        return cls(
            settings=settings,
            branching_tokens=len(index),
            thought_tokens=int(thought.sum()),
            decisions=len(np.unique(place)),
            probed_tokens=int(probed(index[~thought]).sum()),
            teacher_tokens=0.0 if lessons is None else float(branching_counts(lessons.batch, taught) @ lessons.weights[taught]),
        )

    def add(
        self, tokens: DrawnTokens, found: TokenFigures, batch_row: np.ndarray, in_thought: np.ndarray
    ) -> tuple[Tensor, Gauges]:
        """One micro-batch's part of the loss (a scalar with gradient), and figures of its tokens.

        Args:
            batch_row: int64 [tokens], the token's row in the whole batch.
            in_thought: bool [tokens], True for thought tokens.
        """
        kind = policy_loss(self.settings.loss)
        policy = kind.of(tokens, self.settings)
        loss = policy.loss.sum() / kind.denominator(self.branching_tokens, self.decisions)
        slope = torch.full_like(found["entropy"], float("nan"))
        if self.thought_tokens:
            (slope,) = torch.autograd.grad(loss, tokens.logprobs, retain_graph=True)
        if self.settings.entropy_weight:
            loss = loss - self.settings.entropy_weight * found["entropy"].sum() / self.branching_tokens
        if "kl" in found:
            loss = loss + self.settings.kl_weight * found["kl"].sum() / self.branching_tokens
        if self.settings.legal_mass_weight and self.probed_tokens:
            surprise = -torch.log(torch.nan_to_num(found["legal_mass"], nan=1.0))
            loss = loss + self.settings.legal_mass_weight * surprise.sum() / self.probed_tokens
        kl = found.get("kl", torch.full_like(slope, float("nan")))
        figures = [tokens.logprobs - tokens.behaviour, found["entropy"], found["legal_mass"], kl, slope]
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

    def distil(self, found: TokenFigures, weights: Tensor) -> Tensor:
        """One micro-batch's part of the distillation loss, a scalar with gradient.

        Args:
            weights: float32 [tokens], the teacher's probability of the token's proposal.
        """
        return -(1 / self.teacher_tokens) * (weights * found["chosen"]).sum()
