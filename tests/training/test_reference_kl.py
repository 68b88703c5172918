"""Exact divergence and entropy over legal sets against plain loops, their slopes against differences; the KL controller."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch

from tests.training.loss_oracle import divergence, entropy, masked
from training.reference_kl import KlState, exact_kl, kl_weight, legal_entropy, update_kl_state
from training.settings import TrainingSettings

VOCABULARY = 12


def case(seed: int) -> tuple[list[list[float]], list[list[float]], list[list[int]]]:
    """Logits of policy and reference at some positions, and their legal sets, of different sizes."""
    dice = random.Random(seed)
    sets = [sorted(dice.sample(range(VOCABULARY), size)) for size in (2, 5, 3, 9)]
    policy, reference = ([[dice.gauss(0, 2) for _ in range(VOCABULARY)] for _ in sets] for _ in range(2))
    return policy, reference, sets


def padded(logits: torch.Tensor, sets: list[list[int]]) -> torch.Tensor:
    """Log-probabilities over the legal sets, [positions, largest], -inf beyond a set."""
    widest = max(map(len, sets))
    rows = [
        torch.cat([row[legal], row.new_full((widest - len(legal),), -math.inf)]) for row, legal in zip(logits, sets, strict=True)
    ]
    return torch.log_softmax(torch.stack(rows), dim=1)


@pytest.mark.parametrize("seed", range(3))
def test_divergence_and_entropy_are_those_of_the_loops(seed: int):
    policy, reference, sets = case(seed)
    ours, base = (padded(torch.tensor(logits, dtype=torch.float64), sets) for logits in (policy, reference))
    loops = [(masked(p, legal), masked(r, legal)) for p, r, legal in zip(policy, reference, sets, strict=True)]
    assert exact_kl(ours, base).tolist() == pytest.approx([divergence(p, r) for p, r in loops], rel=1e-9)
    assert legal_entropy(ours).tolist() == pytest.approx([entropy(p) for p, _ in loops], rel=1e-9)


@pytest.mark.parametrize("of", ["divergence", "entropy"])
def test_their_slopes_by_every_logit_are_those_of_differences(of: str):
    policy, reference, sets = case(7)
    logits = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    base = padded(torch.tensor(reference, dtype=torch.float64), sets)
    ours = padded(logits, sets)
    (exact_kl(ours, base) if of == "divergence" else legal_entropy(ours)).sum().backward()
    assert logits.grad is not None

    def loop(given: list[list[float]]) -> float:
        rows = zip(given, reference, sets, strict=True)
        return sum(divergence(masked(p, s), masked(r, s)) if of == "divergence" else entropy(masked(p, s)) for p, r, s in rows)

    for position in range(len(sets)):
        for token in range(VOCABULARY):
            ends = []
            for side in (1e-5, -1e-5):
                moved = [list(row) for row in policy]
                moved[position][token] += side
                ends.append(loop(moved))
            assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(logits.grad[position, token].item(), abs=1e-8)


def test_the_divergence_is_zero_from_itself_and_pulls_towards_the_reference():
    policy, reference, sets = case(1)
    ours = padded(torch.tensor(policy), sets)
    assert exact_kl(ours, ours).tolist() == [0.0] * len(sets)
    logits = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    base = padded(torch.tensor(reference, dtype=torch.float64), sets)
    before = exact_kl(padded(logits, sets), base).sum()
    before.backward()
    assert exact_kl(padded((logits - 0.01 * logits.grad).detach(), sets), base).sum() < before


def controlled(settings: TrainingSettings, measured: Callable[[float], float | None], steps: int) -> list[float]:
    """The weights of some steps whose divergence is a function of their weight."""
    state, weights = KlState(), []
    for _ in range(steps):
        weights.append(kl_weight(state, settings))
        state = update_kl_state(state, measured(weights[-1]), settings)
    return weights


def test_a_fixed_weight_stays_and_a_warmed_up_one_rises_to_it():
    fixed = TrainingSettings(kl_weight=0.2)
    assert controlled(fixed, lambda _: 9.0, 4) == [0.2] * 4
    warmed = fixed.model_copy(update={"kl_control": "warmup", "kl_warmup_steps": 4})
    assert controlled(warmed, lambda weight: 9.0 if weight else None, 6) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2, 0.2])


@pytest.mark.parametrize(("measured", "factor"), [(0.2, 1.5), (0.05, 1.0), (0.01, 1 / 1.5)], ids=["far", "on target", "near"])
def test_the_adaptive_weight_grows_where_the_policy_strays_and_shrinks_where_it_does_not(measured: float, factor: float):
    settings = TrainingSettings(kl_weight=0.1, kl_control="adaptive", kl_target=0.05)
    weights = controlled(settings, lambda _: measured, 4)
    assert weights == pytest.approx([0.1 * factor**step for step in range(4)])


def test_the_adaptive_weight_finds_its_target_and_never_runs_away():
    settings = TrainingSettings(kl_weight=0.1, kl_control="adaptive", kl_target=0.05)
    weights = controlled(settings, lambda weight: 0.02 / weight, 200)  # on target at 0.4
    assert all(0.15 < weight < 1.1 for weight in weights[50:])
    assert controlled(settings, lambda _: 1e9, 200)[-1] == pytest.approx(100)
    assert controlled(settings, lambda _: 0.0, 200)[-1] == pytest.approx(1e-4)


def test_one_loud_step_does_not_move_the_weight_and_a_step_without_a_figure_never_does():
    settings = TrainingSettings(kl_weight=0.1, kl_control="adaptive", kl_target=0.05)
    figures = iter([0.05, 0.05, None, 0.2, 0.05])
    assert controlled(settings, lambda _: next(figures), 5) == [0.1] * 5


def test_a_state_comes_back_from_json_bit_for_bit():
    settings = TrainingSettings(kl_weight=0.1, kl_control="adaptive", kl_target=0.05)
    state = KlState()
    for measured in (0.1 + 1e-17, 1 / 3, None, math.pi):
        state = update_kl_state(state, measured, settings)
        assert KlState(**json.loads(json.dumps(asdict(state)))) == state
