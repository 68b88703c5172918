"""The figures of `bench e2e` compare like with like: decisions, start groups, seconds, steps, threads and bases."""

from typing import Any

import pytest

from benchmarks.end_to_end import figures, outcome_of, score_figures, wanted_of
from cli.main import run
from pipeline.run_settings import layered_settings
from telemetry.errors import InputError

LAPTOP = layered_settings("laptop")
METRICS = {"speedup": 9.0, "speedup_start_groups": 8.0, "score_20_steps": 1.2}


def new_way(**others: Any) -> dict[str, Any]:
    return {
        "step_s": [2.0, 2.0], "train_s": [1.0, 1.0], "orchestration_s": [0.1, 0.1], "span_s": 60.0,
        "train/decisions": [100.0, 100.0], "rollout/decisions": [150.0, 150.0], "rollout/start_groups": [8.0, 8.0],
        "cpu_a_step": 3.0, "lags": [0, 1, 1, 2], "base_score": 0.25, "trained_score": 1.25, "trained_ci": (1.0, 1.5),
    } | others  # fmt: skip


def old_way(steps: int = 2, **others: Any) -> dict[str, Any]:
    one = {"wall_s": 40.0, "cpu_s": 60.0, "train_s": 10.0, "trained": 200}
    return {"steps": [one | {"step": step, "ended_s": 40.0 * step} for step in range(1, steps + 1)]} | others


def test_a_step_of_old_is_scaled_to_as_many_trained_decisions_or_start_groups():
    found = figures([new_way()], [old_way()], 8)
    assert found["steps_per_hour"] == 1800 and found["speedup"] == pytest.approx(10.0)
    assert found["steps_per_hour_old_way"] == pytest.approx(180.0) and found["speedup_cpu"] == pytest.approx(10.0)
    assert (found["speedup_start_groups"], found["speedup_cpu_start_groups"]) == (20.0, 20.0)
    assert found["trainer_idle_share"] == pytest.approx(0.5) and found["orchestration_share"] == pytest.approx(0.05)
    assert (found["policy_lag_p50"], found["policy_lag_max"]) == (1.0, 2.0)
    assert figures([new_way(), new_way()], [old_way(20), old_way(6)], 8)["old_steps_measured"] == 5


def test_scores_are_after_the_equal_span_and_after_equal_steps_each_with_the_gain_over_its_own_base():
    base, span, later = {"mean": 0.5, "ci": (0.4, 0.6)}, {"mean": 0.5, "ci": None}, {"mean": 0.75, "ci": (0.5, 1.0)}
    found = score_figures(new_way(), old_way(3, base=base, span=span, steps_scored=later), 20)
    assert (found["score_equal_span"], found["score_20_steps"]) == (1.25, 1.25)
    assert (found["score_equal_span_old_way"], found["score_20_steps_old_way"]) == (0.5, 0.75)
    assert (found["score_gain_20_steps"], found["score_gain_20_steps_old_way"]) == (1.0, 0.25)
    assert found["score_gain_equal_span_old_way"] == 0.0 and found["score_20_steps_old_way_high"] == 1.0
    assert "score_equal_span_old_way_low" not in found, "too few source games"
    assert (found["span_s"], found["old_steps_in_span"]) == (60.0, 1.0)


def test_figures_of_other_rollouts_or_of_fewer_steps_are_not_judged_as_those_of_the_preset():
    preset = LAPTOP.rollouts
    laptop = outcome_of(METRICS, preset, preset, 20)
    assert laptop.benchmark == "e2e" and set(laptop.targets) == set(METRICS) and not laptop.scaled_down
    assert set(outcome_of(METRICS, preset, preset, 8).scaled_down) == set(METRICS)
    other = outcome_of(METRICS, preset.model_copy(update={"horizon_years": 4, "policy_powers": "all"}), preset, 20)
    assert other.benchmark == "e2e, horizon_years 4, policy_powers all" and not other.targets


@pytest.mark.parametrize("words", [("--rounds", "0"), ("--steps", "2")], ids=["rounds", "steps"])
def test_nothing_to_measure_is_refused_before_anything_is_made(words: tuple[str, str], capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cli.environment.prepare_environment", lambda **how: None)
    assert run(["bench", "e2e", "--quick", *words]) == 2 and "measure nothing" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="measure nothing"):
        wanted_of(short=False, rounds=None, steps=2)
