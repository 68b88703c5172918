"""Exact divergence from the base model and exact entropy over legal sets, and the weight that the divergence has.

    KL_t = sum over a in L of pi(a) (log pi(a) - log ref(a))       H_t = - sum over a in L of pi(a) log pi(a)

No samples stand for either: a legal set has a handful of tokens. The reference is the base model itself, the adapter switched
off, on the same rows and legal sets, without a gradient; it is asked only while its weight is above 0. It is never the policy
that drew the tokens.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from training.settings import TrainingSettings

_MEAN_KEEPS = 0.9
_BAND = (0.5, 1.5)
_STEP = 1.5
_RANGE = (1e-3, 1e3)


def _expected(values: Tensor, logprobs: Tensor) -> Tensor:
    """Mean of `values` under the policy, of each position; what is beyond a legal set counts nothing, in the gradient too."""
    legal = torch.isfinite(logprobs)
    return (torch.where(legal, logprobs, 0.0).exp() * torch.where(legal, values, 0.0) * legal).sum(dim=1)


def legal_entropy(logprobs: Tensor) -> Tensor:
    """Entropy of each position, nats, from its legal log-probabilities [positions, largest set], -inf beyond a set."""
    return _expected(-torch.where(torch.isfinite(logprobs), logprobs, 0.0), logprobs)


def exact_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Divergence of each position from the reference, nats; both as in `legal_entropy`, over the same sets."""
    legal = torch.isfinite(logprobs)
    gap = torch.where(legal, logprobs, 0.0) - torch.where(legal, reference, 0.0)
    return _expected(gap, logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class KlState:
    """Where the weight of the divergence stands; goes into checkpoints."""

    steps: int = 0
    """Steps that it saw."""
    mean: float | None = None
    """Moving mean of the measured divergence, nats per branching token; None before any was measured."""
    factor: float = 1.0
    """What kl_control adaptive multiplies kl_weight with."""


def kl_weight(state: KlState, settings: TrainingSettings) -> float:
    """The weight of the step that begins in `state`."""
    if settings.kl_control == "warmup":
        return settings.kl_weight * min(1.0, state.steps / settings.kl_warmup_steps)
    return settings.kl_weight * (state.factor if settings.kl_control == "adaptive" else 1.0)


def update_kl_state(state: KlState, measured: float | None, settings: TrainingSettings) -> KlState:
    """The state after a step that measured this mean divergence; None if it measured none.

    The adaptive weight grows by half where the moving mean is more than half above the target, and shrinks by a third where it
    is less than half of it (Schulman et al. 2017, arXiv 1707.06347, section 4, with a gentler factor), within a thousandth and a
    thousandfold of kl_weight.
    """
    state = replace(state, steps=state.steps + 1)
    if measured is None:
        return state
    mean = measured if state.mean is None else _MEAN_KEEPS * state.mean + (1 - _MEAN_KEEPS) * measured
    factor = state.factor
    if settings.kl_control == "adaptive":
        if mean > _BAND[1] * settings.kl_target:
            factor *= _STEP
        elif mean < _BAND[0] * settings.kl_target:
            factor /= _STEP
    return replace(state, mean=mean, factor=min(max(factor, _RANGE[0]), _RANGE[1]))
