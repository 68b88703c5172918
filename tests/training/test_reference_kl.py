"""The controller of the KL weight. Divergence, entropy and their slopes are held against loops in test_objective.py."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict

import pytest

from training.reference_kl import KlState, kl_weight, update_kl_state
from training.settings import TrainingSettings


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
