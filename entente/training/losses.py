"""Policy losses: input and output, shared parts, a function NAME_loss for each, and the lookup by `training.loss`.

docs/training.md has the formulas. A loss returns one value per branching token and averages nothing. The caller adds the values
and divides once by a constant of the whole update, so the loss does not depend on how an update is split into micro-batches. All
tokens of a decision are in one micro-batch; losses over whole decisions need this.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from entente.telemetry.extensions import Misfit, check_arguments, check_named, load_part
from entente.training.settings import DUAL_CLIP, LOSSES, OUTLIER_HIGH, OUTLIER_LOW, TrainingSettings

DIVERGENCE = 0.2
"""dppo: largest change of a token's probability that still gives a gradient, as in prime-rl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """The branching tokens of a micro-batch. All fields have shape [tokens]; log-probabilities are in nats."""

    logprobs: Tensor
    """float32: log-probabilities of the current masked policy, with gradient."""
    behaviour: Tensor
    """float32: log-probabilities of the masked policy that sampled the tokens."""
    advantages: Tensor
    """float32: advantage of the token's decision."""
    decisions: Tensor
    """int64: number of the token's decision, in any numbering."""
    proximal: Tensor | None = None
    """float32, detached: log-probabilities of the policy in the ratio's denominator; importance weights correct for its
    difference from the behaviour policy. None: the behaviour policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Loss per branching token, and which tokens were clipped or left out. All fields have shape [tokens]."""

    loss: Tensor
    """float32; 0 for tokens that are left out."""
    clipped_low: Tensor
    """bool: no gradient, because the advantage is negative and the token is already rarer than the bound allows."""
    clipped_high: Tensor
    """bool: no gradient, because the token is already likelier than the bound of a positive advantage, or the dual clip's of a
    negative one, allows."""
    outlier: Tensor
    """bool: the token's ratio to the policy that sampled it is outside the outlier bounds, or NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    of: Callable[[SampledTokens, TrainingSettings], TokenLoss]
    """Loss of each branching token of a micro-batch, before the division."""
    per_decision: bool
    """True: divide the sum by the decisions that have a branching token. False: by the branching tokens."""

    def denominator(self, branching_tokens: int, decisions: int) -> int:
        return decisions if self.per_decision else branching_tokens


def log_ratio(tokens: SampledTokens, outlier: Tensor) -> Tensor:
    """log(pi / proximal) with gradient, [tokens]; 0 for tokens that are left out, because `torch.where` lets a NaN gradient
    through."""
    proximal = tokens.behaviour if tokens.proximal is None else tokens.proximal
    return torch.where(outlier, torch.zeros_like(proximal), tokens.logprobs - proximal)


def outliers(tokens: SampledTokens, settings: TrainingSettings) -> Tensor:
    """bool [tokens]: pi / b is outside [OUTLIER_LOW, OUTLIER_HIGH], or NaN."""
    ratio = torch.exp((tokens.logprobs - tokens.behaviour).detach())
    return (ratio < OUTLIER_LOW) | (ratio > OUTLIER_HIGH) | ~torch.isfinite(ratio)


def log_importance(tokens: SampledTokens) -> Tensor:
    """log(proximal / b), detached, [tokens]; 0 without a proximal policy."""
    return torch.zeros_like(tokens.behaviour) if tokens.proximal is None else tokens.proximal - tokens.behaviour


def truncated(log_weights: Tensor, settings: TrainingSettings) -> Tensor:
    """min(weight, importance_cap): truncated importance sampling, as in IMPALA (Espeholt et al. 2018, arXiv 1802.01561)."""
    return torch.exp(log_weights).clamp(max=settings.importance_cap) if settings.importance_cap else torch.exp(log_weights)


def clipped(ratio: Tensor, advantages: Tensor, settings: TrainingSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped surrogate loss of ratios (of tokens or of decisions), and bool masks of where it is clipped from below and from
    above."""
    bounded = torch.clamp(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    loss = torch.where(advantages < 0, torch.minimum(loss, -DUAL_CLIP * advantages), loss)
    low = (ratio.detach() < 1 - settings.clip_low) & (advantages < 0)
    high = (ratio.detach() > 1 + settings.clip_high) & (advantages > 0) | (ratio.detach() > DUAL_CLIP) & (advantages < 0)
    return loss, low, high


def numbered(decisions: Tensor) -> tuple[Tensor, Tensor]:
    """Number decisions from 0: int64 [tokens], each token's decision, and int64 [decisions], its number of tokens."""
    _, place, sizes = torch.unique(decisions, return_inverse=True, return_counts=True)
    return place, sizes


def decision_means(values: Tensor, place: Tensor, sizes: Tensor) -> Tensor:
    """Mean of `values` over each decision's tokens, [decisions]; `place` and `sizes` as from `numbered`."""
    return values.new_zeros(len(sizes)).index_add(0, place, values) / sizes


def clipped_loss(tokens: SampledTokens, settings: TrainingSettings) -> TokenLoss:
    """Clipped token loss.

    For a branching token with ratio r = pi / b (current over behaviour probability, both over the legal set) and advantage A:

        L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)          PPO, Schulman et al. 2017, arXiv 1707.06347;
                                                                      asymmetric clip: DAPO, Yu et al. 2025, arXiv 2503.14476
        for A < 0:  L = min(L, DUAL_CLIP * |A|)                        dual clip: Ye et al. 2020, arXiv 1912.09729
    """
    outlier = outliers(tokens, settings)
    loss, low, high = clipped(torch.exp(log_ratio(tokens, outlier)), tokens.advantages, settings)
    loss = torch.where(outlier, torch.zeros_like(loss), loss * truncated(log_importance(tokens), settings))
    return TokenLoss(loss=loss, clipped_low=low, clipped_high=high, outlier=outlier)


def sequence_mean_loss(tokens: SampledTokens, settings: TrainingSettings) -> TokenLoss:
    """Sequence-mean token loss: each decision counts the same, however many branching tokens it has.

        L_t = clipped token loss / |o_i|        GRPO as first published: Shao et al. 2024, arXiv 2402.03300

    |o_i| is the number of branching tokens of the decision. A token of a long decision has a smaller weight than one of a short
    decision. Because of that bias the token mean is the default (Liu et al. 2025, arXiv 2503.20783).
    """
    token_loss = clipped_loss(tokens, settings)
    place, sizes = numbered(tokens.decisions)
    return replace(token_loss, loss=token_loss.loss / sizes[place])


def cispo_loss(tokens: SampledTokens, settings: TrainingSettings) -> TokenLoss:
    """Clipped importance weights (CISPO: MiniMax-M1, 2025, arXiv 2506.13585; ScaleRL's loss, arXiv 2510.13786).

        L = -sg(min(r, 1 + clip_high)) A log pi        sg: no gradient passes through the weight

    The weight of a token is bounded from above, and no token loses its gradient: `clip_low` and the dual clip have no effect.
    ScaleRL tries upper bounds of 4 to 8, which is a clip_high of 3 to 7.
    """
    outlier = outliers(tokens, settings)
    weight = torch.exp(log_ratio(tokens, outlier).detach()).clamp(max=1 + settings.clip_high)
    weight = weight * truncated(log_importance(tokens), settings)
    logprobs = torch.where(outlier, torch.zeros_like(tokens.logprobs), tokens.logprobs)
    never = torch.zeros_like(outlier)
    return TokenLoss(loss=-weight * tokens.advantages * logprobs, clipped_low=never, clipped_high=never, outlier=outlier)


def dppo_loss(tokens: SampledTokens, settings: TrainingSettings) -> TokenLoss:
    """Divergence-masked token loss (DPPO, arXiv 2602.04879; prime-rl's default).

        L = -r A,  but 0 where  A > 0 and p - q > DIVERGENCE,  or  A < 0 and p - q < -DIVERGENCE

    p and q are the current and the proximal policy's probability of the token over its legal set, and r = p / q. The bound limits
    the difference of probabilities, not the ratio: that of a rare token may become large while its probability changes little.
    """
    outlier = outliers(tokens, settings)
    proximal = tokens.behaviour if tokens.proximal is None else tokens.proximal
    change = torch.exp(tokens.logprobs.detach()) - torch.exp(proximal)
    low = (change < -DIVERGENCE) & (tokens.advantages < 0)
    high = (change > DIVERGENCE) & (tokens.advantages > 0)
    loss = -torch.exp(log_ratio(tokens, outlier)) * tokens.advantages * truncated(log_importance(tokens), settings)
    loss = torch.where(outlier | low | high, torch.zeros_like(loss), loss)
    return TokenLoss(loss=loss, clipped_low=low, clipped_high=high, outlier=outlier)


def gspo_loss(tokens: SampledTokens, settings: TrainingSettings) -> TokenLoss:
    """Group sequence policy optimisation: one ratio for the whole decision (Zheng et al. 2025, arXiv 2507.18071).

        s_i = exp(mean over the decision's branching tokens of log(pi / b))
        L_i = the clipped surrogate of s_i, spread evenly over its tokens

    A decision with an outlier token is left out completely. The paper's bounds (3e-4 and 4e-4) are for means over thousands of
    tokens. A decision has about ten tokens, so this loss uses clip_low and clip_high, like the other losses.
    """
    place, sizes = numbered(tokens.decisions)
    outlier = decision_means(outliers(tokens, settings).float(), place, sizes)[place] > 0
    ratio = torch.exp(decision_means(log_ratio(tokens, outlier), place, sizes))[place]
    loss, low, high = clipped(ratio, tokens.advantages, settings)
    weight = truncated(decision_means(log_importance(tokens), place, sizes), settings)[place]
    loss = torch.where(outlier, torch.zeros_like(loss), loss * weight / sizes[place])
    return TokenLoss(loss=loss, clipped_low=low, clipped_high=high, outlier=outlier)


@cache
def policy_loss(name: str) -> PolicyLoss:
    """The loss of that name, built-in or a user's `module:attribute` (docs/extending.md). Raises InputError if there is no
    such loss, or it cannot be used."""
    check_named("loss", name, LOSSES)
    if name in LOSSES:
        return PolicyLoss(of=globals()[f"{name}_loss"], per_decision=LOSSES[name])
    return load_part("loss", name, _accept)


def _accept(loss: PolicyLoss, _: str) -> PolicyLoss:
    if not isinstance(loss, PolicyLoss):
        raise Misfit("it is not an entente.losses.PolicyLoss")
    check_arguments(loss.of, "tokens", "settings")
    logprobs = torch.tensor([-0.1, -0.5, -1.0, -2.0], requires_grad=True)
    tokens = SampledTokens(
        logprobs=logprobs,
        behaviour=torch.tensor([-0.2, -0.4, -1.5, -1.5]),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        decisions=torch.tensor([0, 0, 1, 1]),
    )
    tried = loss.of(tokens, TrainingSettings())
    if not isinstance(tried, TokenLoss):
        raise Misfit(f"it returns a {type(tried).__name__}, not an entente.losses.TokenLoss")
    for field, kind in (
        ("loss", torch.float32),
        ("clipped_low", torch.bool),
        ("clipped_high", torch.bool),
        ("outlier", torch.bool),
    ):
        value = getattr(tried, field)
        if not isinstance(value, torch.Tensor) or value.shape != logprobs.shape or value.dtype != kind:
            raise Misfit(f"it returns a `{field}` that is not {kind} with one value per token")
    if not tried.loss.requires_grad or not bool(torch.isfinite(tried.loss).all()):
        raise Misfit("it returns a loss without a gradient, or one that is not finite")
    return loss
