"""The figures of `bench e2e` compare like with like: decisions, start groups, seconds and steps."""

from typing import Any

import pytest

from benchmarks.end_to_end import TARGETS, figures, outcome_of
from benchmarks.entente_run import RunFigures
from cli.main import run
from pipeline.run_settings import layered_settings


def new_way() -> RunFigures:
    step = {
        "time/step_s": 2.0, "time/train_s": 1.0, "time/orchestration_s": 0.1, "train/decisions": 100.0,
        "rollout/decisions": 150.0, "rollout/start_groups": 8.0,
    }  # fmt: skip
    return RunFigures(steps=[{"time/step_s": 90.0}, step, step], cpu_s=[50.0, 53.0, 56.0], summary={}, lags=[0, 1, 1, 2])


def old_way(steps: int = 2) -> list[dict[str, Any]]:
    one = {"wall_s": 40.0, "cpu_s": 60.0, "train_s": 10.0, "trained": 200}
    return [one | {"step": step} for step in range(1, steps + 1)]


def test_a_step_of_old_is_scaled_to_as_many_trained_decisions_or_start_groups():
    found = figures([(new_way(), old_way())], 8)
    assert found["steps_per_hour"] == 1800 and found["speedup"] == pytest.approx(10.0)
    assert found["steps_per_hour_old_way"] == pytest.approx(180.0) and found["speedup_cpu"] == pytest.approx(10.0)
    assert (found["speedup_start_groups"], found["speedup_cpu_start_groups"]) == (20.0, 20.0)
    assert found["trainer_idle_share"] == pytest.approx(0.5) and found["orchestration_share"] == pytest.approx(0.05)
    assert found["policy_lag_max"] == 2.0
    assert figures([(new_way(), old_way(20)), (new_way(), old_way(6))], 8)["old_steps_measured"] == 5


def test_figures_of_other_rollouts_are_not_judged_as_those_of_the_preset():
    preset, metrics = layered_settings("laptop").rollouts, dict.fromkeys(TARGETS, 9.0)
    laptop = outcome_of(metrics, preset, preset)
    assert laptop.benchmark == "e2e" and set(laptop.targets) == set(metrics)
    other = outcome_of(metrics, preset.model_copy(update={"horizon_years": 4, "policy_powers": "all"}), preset)
    assert other.benchmark == "e2e, horizon_years 4, policy_powers all" and not other.targets


@pytest.mark.parametrize("words", [("--rounds", "0"), ("--steps", "2")], ids=["rounds", "steps"])
def test_nothing_to_measure_is_refused_before_anything_is_made(words: tuple[str, str], capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cli.environment.prepare_environment", lambda **how: None)
    assert run(["bench", "e2e", *words]) == 2 and "measure nothing" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
