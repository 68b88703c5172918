"""Exact KL divergence from the base model and exact entropy over legal sets, and the weight of the divergence.

    KL_t = sum over a in L of pi(a) (log pi(a) - log ref(a))       H_t = - sum over a in L of pi(a) log pi(a)

Both are sums over the whole legal set L, which is small, so nothing is estimated from samples. The reference is the base model
(the policy with its adapter disabled) on the same rows and legal sets, without gradient. It is computed only while its weight is
above 0. It is not the policy that drew the tokens.
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
    """Expectation of `values` under the policy at each position, [positions]; padding adds 0, to the gradient too."""
    legal = torch.isfinite(logprobs)
    return (torch.where(legal, logprobs, 0.0).exp() * torch.where(legal, values, 0.0) * legal).sum(dim=1)


def legal_entropy(logprobs: Tensor) -> Tensor:
    """Entropy of each position, nats [positions].

    Args:
        logprobs: [positions, largest legal set], -inf as padding.
    """
    return _expected(-torch.where(torch.isfinite(logprobs), logprobs, 0.0), logprobs)


def exact_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """KL divergence of each position from the reference, nats [positions]; both arguments as in `legal_entropy`."""
    legal = torch.isfinite(logprobs)
    gap = torch.where(legal, logprobs, 0.0) - torch.where(legal, reference, 0.0)
    return _expected(gap, logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class KlState:
    """State from which the weight of the divergence is computed; saved in checkpoints."""

    steps: int = 0
    """Steps done."""
    mean: float | None = None
    """Moving mean of the measured divergence, nats per branching token; None before the first measurement."""
    factor: float = 1.0
    """Factor on kl_weight when kl_control is 'adaptive'."""


def kl_weight(state: KlState, settings: TrainingSettings) -> float:
    """The weight of the divergence in the step that begins with `state`."""
    if settings.kl_control == "warmup":
        return settings.kl_weight * min(1.0, state.steps / settings.kl_warmup_steps)
    return settings.kl_weight * (state.factor if settings.kl_control == "adaptive" else 1.0)


def update_kl_state(state: KlState, measured: float | None, settings: TrainingSettings) -> KlState:
    """The state after a step.

    The adaptive weight is multiplied by 1.5 if the moving mean is above 1.5 times the target, and divided by 1.5 if it is below
    half the target (Schulman et al. 2017, arXiv 1707.06347, section 4, which uses the factor 2). It stays within 0.001 and 1,000
    times kl_weight.

    Args:
        measured: mean divergence of the step, nats per branching token; None if the step did not measure it.
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
