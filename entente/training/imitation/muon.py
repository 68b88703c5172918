"""Muon for the matrices of the blocks and AdamW for embedding and norms, as one optimiser with one learning rate.

Muon (https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum by an almost orthogonal one:

    B <- mu B + G        W <- (1 - lr decay) W - lr 0.2 sqrt(max(rows, columns)) O(G + mu B)

O maps all singular values near 1. The factor gives an entry the size of an AdamW update, so both share a rate (arXiv 2502.16982).
`torch.optim.Muon` iterates in bfloat16, which takes 20 times longer on processors without it.
"""

import math
from typing import Any

import torch
from torch import Tensor

_MOMENTUM, _ITERATIONS = 0.95, 5
_QUINTIC = 3.4445, -4.7750, 2.0315
"""Coefficients of x, x³ and x⁵: five iterations bring any singular value from 0.0015 to 1 to between 0.68 and 1.21."""
_ADAMW = {"betas": (0.9, 0.95), "fused": True}


class MuonAndAdamW(torch.optim.Optimizer):
    """Group 0 has the matrices, group 1 all else."""

    def __init__(self, model: Any, *, rate: float, decay: float) -> None:
        embedding = model.get_input_embeddings().weight  # tied to the head
        matrices = [each for each in model.parameters() if each.ndim == 2 and each is not embedding]
        others = [each for each in model.parameters() if each.ndim != 2 or each is embedding]
        self._adamw = torch.optim.AdamW(others, lr=rate, weight_decay=decay, **_ADAMW)
        super().__init__([{"params": matrices, "weight_decay": decay}, *self._adamw.param_groups], {"lr": rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        group, others = self.param_groups
        for weight in group["params"]:
            if weight.grad is not None:
                state = self.state[weight]
                momentum = state["momentum"] = _MOMENTUM * state.get("momentum", 0.0) + weight.grad
                size = 0.2 * math.sqrt(max(weight.shape))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(orthogonal(weight.grad + _MOMENTUM * momentum), alpha=group["lr"] * size)
        self._adamw.state, self._adamw.param_groups = self.state, [others]  # a restored state is a new object
        self._adamw.step()


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly, by Newton and Schulz's iteration; float32."""
    first, third, fifth = _QUINTIC
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        square = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(square, square, square, beta=third, alpha=fifth), wide, beta=first)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T
