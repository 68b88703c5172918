"""`entente bench` as typed: all of it beside stored figures, and rollouts and training beside the old way."""

import json
from pathlib import Path

import pytest


def stored(folder: Path, **figures: float) -> str:
    """A file of figures of `bench game`, each with a target."""
    outcome = {"metrics": figures, "targets": {name: {"at_least": 1.0} for name in figures}}
    (folder / "then.json").write_text(json.dumps({"benchmarks": {"game": outcome}}))
    return "then.json"


@pytest.mark.slow
@pytest.mark.parametrize(("then", "code"), [(1e9, 1), (1e-9, 0)], ids=["worse", "better"])
def test_a_figure_beyond_tolerance_is_exit_code_1_and_figures_are_kept(workplace, then: float, code: int):
    file = stored(workplace.folder, fork_vs_deepcopy=then)
    done = workplace.process("bench", "all", "--only", "game", "--compare", file, "--out", "now.json", "--json")
    assert done.returncode == code, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["worse"] == (["game.fork_vs_deepcopy"] if code else [])
    kept = json.loads((workplace.folder / "now.json").read_text())["benchmarks"]["game"]["metrics"]
    assert kept["fork_vs_deepcopy"] > 0


@pytest.mark.slow
@pytest.mark.vllm
def test_rollouts_are_measured_beside_the_old_ways(workplace):
    done = workplace.process("bench", "rollout", "--rounds", "1", "--config", "small.toml", "--json")
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout.splitlines()[-1])["metrics"]
    assert metrics["speedup"] > 1 and metrics["decisions_per_s"] > metrics["decisions_per_s_old_way"] > 0
    assert metrics["uncached_tokens_per_decision_old_way"] > metrics["uncached_tokens_per_decision"] > 0


@pytest.mark.slow
@pytest.mark.vllm
def test_training_is_measured_beside_the_old_way(workplace):
    words = ("bench", "e2e", "--rounds", "1", "--steps", "3", "--config", "small.toml")
    done = workplace.process(*words, "--json")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    metrics = outcome["metrics"]
    assert metrics["speedup"] > 1 and metrics["steps_per_hour"] > metrics["steps_per_hour_old_way"] > 0
    assert 0 <= metrics["orchestration_share"] < 1 and metrics["policy_lag_max"] == 0
    assert outcome["benchmark"].startswith("e2e, start_groups 2") and not outcome["targets"], "no laptop's figures"
    assert metrics["old_steps_measured"] >= 5
    assert "score_3_steps_old_way" in metrics and "score_3_steps_old_way_low" not in metrics, "too few source games"
