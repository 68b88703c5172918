"""Exact KL divergence from the base model and exact entropy over legal sets.

    KL_t = sum over a in L of pi(a) (log pi(a) - log ref(a))       H_t = - sum over a in L of pi(a) log pi(a)

Both are sums over the whole legal set L, which is small, so nothing is estimated from samples. The reference is the base model
(the policy with its adapter disabled) on the same rows and legal sets, without gradient. It is computed only if its weight is
above 0. It is not the policy that drew the tokens.
"""

import torch
from torch import Tensor


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
