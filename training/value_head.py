"""The value head: what a power's squares and centres will be at the end, from the hidden state of its prompt's last token.

`records/value_head.py` has the formula and the file. The head computes in float32. An untrained head says the average of seven
powers, because its output weights are 0. The loss of a decision is the mean squared error of its two figures,

    L = 1/2 sum_k (v_k - y_k)^2        y: the figures at the end of the decision's game or fork

so what is learned is their expectation (Sutton & Barto 2018, section 9.2). Decisions with one prompt each count.
"""

from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor, nn

from records.value_head import AVERAGES, HeadWeights


class ValueHead(nn.Module):
    """Layer norm and one linear layer."""

    def __init__(self, width: int) -> None:
        """An untrained head for hidden states of `width`."""
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, 2)
        nn.init.zeros_(self.linear.weight)
        with torch.no_grad():
            self.linear.bias.copy_(torch.tensor(AVERAGES))

    def forward(self, hidden: Tensor) -> Tensor:
        """Values float32 [n, 2] of hidden states [n, width]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.linear(self.norm(hidden.to(self.linear.weight.dtype)))

    def weights(self) -> HeadWeights:
        """A copy of the weights."""
        return HeadWeights(**{name: weight.detach().cpu().numpy().copy() for name, weight in self._named().items()})

    def load(self, weights: HeadWeights) -> None:
        """Take over weights of the same width."""
        with torch.no_grad():
            for name, value in asdict(weights).items():
                self._named()[name].copy_(torch.from_numpy(np.ascontiguousarray(value)))

    def _named(self) -> dict[str, Tensor]:
        return {
            "norm_weight": self.norm.weight,
            "norm_bias": self.norm.bias,
            "weight": self.linear.weight,
            "bias": self.linear.bias,
        }


def squared_errors(values: Tensor, ends: Tensor) -> Tensor:
    """L summed over decisions: values and ends, both [n, 2]."""
    return (values - ends).square().sum() / 2
