"""Muon is its formula, written out with singular values, and about torch's own, which rounds to bfloat16."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from entente.training.imitation.muon import MuonAndAdamW

RATE, DECAY, STEPS = 3e-3, 0.01, 4


class Net(torch.nn.Module):
    """With a tall, a wide and a square matrix, a bias, and an embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(7, 8)
        self.blocks = torch.nn.Sequential(
            torch.nn.Linear(8, 20), torch.nn.Tanh(), torch.nn.Linear(20, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
        )

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.embedding(ids)) @ self.embedding.weight.T


def trained(net: Any, step: Callable[[int], None]) -> dict[str, torch.Tensor]:
    """Weights after STEPS losses of a fixed batch each."""
    for number in range(STEPS):
        ids = torch.from_numpy(np.random.default_rng(number).integers(0, 7, 16))
        net.zero_grad()
        torch.nn.functional.cross_entropy(net(ids), (ids + 1) % 7).backward()
        step(number)
    return {name: weight.detach().clone() for name, weight in net.named_parameters()}


def is_matrix(name: str, weight: torch.Tensor) -> bool:
    return name != "embedding.weight" and weight.ndim == 2


def spread(matrix: np.ndarray) -> np.ndarray:
    """The quintic, five times, of the singular values."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


def test_a_step_is_the_formula_s():
    net, plain = Net(), Net()
    momenta: dict[str, np.ndarray] = {}
    others = [weight for name, weight in plain.named_parameters() if not is_matrix(name, weight)]
    adamw = torch.optim.AdamW(others, lr=RATE, weight_decay=DECAY, betas=(0.9, 0.95))

    def by_hand(_: int) -> None:
        adamw.step()
        for name, weight in plain.named_parameters():
            if is_matrix(name, weight):
                assert weight.grad is not None
                gradient = weight.grad.double().numpy()
                momenta[name] = 0.95 * momenta.get(name, 0.0) + gradient
                update = 0.2 * max(weight.shape) ** 0.5 * spread(gradient + 0.95 * momenta[name])
                weight.data = ((1 - RATE * DECAY) * weight.data.double() - RATE * torch.from_numpy(update)).float()

    optimiser = MuonAndAdamW(net, rate=RATE, decay=DECAY)
    found, expected = trained(net, lambda _: optimiser.step()), trained(plain, by_hand)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=2e-5, rtol=0, msg=name)


def test_it_is_about_torch_s():
    net, other = Net(), Net()
    matrices = [weight for name, weight in other.named_parameters() if is_matrix(name, weight)]
    rest = [weight for name, weight in other.named_parameters() if not is_matrix(name, weight)]
    muon = torch.optim.Muon(matrices, lr=RATE, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=RATE, weight_decay=DECAY, betas=(0.9, 0.95))
    optimiser, first = MuonAndAdamW(net, rate=RATE, decay=DECAY), copy.deepcopy(dict(net.named_parameters()))
    found = trained(net, lambda _: optimiser.step())
    expected = trained(other, lambda _: (muon.step(), adamw.step())[0])
    for name, weight in expected.items():
        moved = (weight - first[name]).norm()
        assert (found[name] - weight).norm() < 0.2 * moved, name  # of it 0.12 is rounding


def test_it_goes_on_from_its_stored_state():
    whole, cut = Net(), Net()
    optimiser, before = MuonAndAdamW(whole, rate=RATE, decay=DECAY), MuonAndAdamW(cut, rate=RATE, decay=DECAY)
    after = MuonAndAdamW(cut, rate=RATE, decay=DECAY)

    def with_a_break(number: int) -> None:
        if number == STEPS // 2:
            after.load_state_dict(copy.deepcopy(before.state_dict()))
        (before if number < STEPS // 2 else after).step()

    expected, found = trained(whole, lambda _: optimiser.step()), trained(cut, with_a_break)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
