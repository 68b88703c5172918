"""What the benchmark of branching rollouts computes: noise and signal of known gradients, and which decisions are late."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.branching import Drawn as Batch
from benchmarks.branching import _figures, _is_late, _late, _noise_and_signal
from cli import main


def test_noise_and_signal_of_gradients_that_are_drawn_around_a_known_one():
    rng, true = np.random.default_rng(0), np.array([3.0, -4.0, 0.0])
    gradients = [true + rng.normal(0, 2, 3) for _ in range(4000)]
    noise, signal = _noise_and_signal(gradients)
    assert noise == pytest.approx(3 * 4, rel=0.05) and signal == pytest.approx(25, rel=0.05)


def test_without_a_signal_the_estimate_is_around_zero_and_the_figure_left_out():
    rng = np.random.default_rng(1)
    signals = [_noise_and_signal([rng.normal(0, 1, 50) for _ in range(6)])[1] for _ in range(300)]
    assert abs(np.mean(signals)) < 0.3
    flat = [Batch(whole=np.array([x]), late=np.array([x]), decisions=4, late_decisions=2, spread_share=1.0) for x in (1.0, -1.0)]
    assert "decisions_a_signal" not in _figures(flat)


def test_noise_is_told_per_decision():
    found = [
        Batch(whole=np.array([x]), late=np.array([2 * x]), decisions=10, late_decisions=4, spread_share=0.5) for x in (4.0, 6.0)
    ]
    figures = _figures(found)
    assert figures["noise_a_decision"] == pytest.approx(2 * 10) and figures["late_noise_a_decision"] == pytest.approx(8 * 4)
    assert figures["decisions_a_signal"] == pytest.approx(10 * 2 / (25 - 1))


def test_late_is_the_first_movement_phase_after_the_start_and_in_branches_their_first_ply():
    plies = [(0, "F1902M"), (1, "F1902R"), (2, "S1903M"), (3, "F1903M")]
    played: Any = SimpleNamespace(plies=[SimpleNamespace(start_group=0, fork=1, ply=ply, phase=phase) for ply, phase in plies])
    late = _late(played)
    assert late == {(0, 1): 2}
    assert [_is_late((0, 1, ply), late, False) for ply in range(4)] == [False, False, True, False]
    assert [_is_late((group, 1, ply), late, True) for group, ply in ((0, 2), (1, 0), (1, 1))] == [False, True, False]


def test_one_batch_has_no_variance(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("cli.environment.prepare_environment", lambda **how: None)
    assert main.run(["bench", "branching", "--batches", "1", "--runs-root", str(tmp_path)]) == 2
    assert "There is no variance over 1 batches" in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_measurement_runs_to_its_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("cli.environment.prepare_environment", lambda **how: None)
    assert main.run(["bench", "branching", "--batches", "2", "--groups", "2", "--runs-root", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["metrics"]["late_noise_a_decision_ratio"] > 0 and found["metrics"]["plain_decisions_a_batch"] > 10
