"""`entente bench rollout` and `e2e` as typed: rollouts and training beside the old way."""

import json

import pytest


@pytest.mark.slow
def test_rollouts_are_measured_beside_the_old_ways(workplace):
    done = workplace.process("bench", "rollout", "--rounds", "1", "--config", "small.toml", "--json")
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout.splitlines()[-1])["metrics"]
    assert metrics["speedup"] > 1 and metrics["decisions_per_s"] > metrics["decisions_per_s_old_way"] > 0
    assert metrics["uncached_tokens_per_decision_old_way"] > metrics["uncached_tokens_per_decision"] > 0


@pytest.mark.slow
def test_training_is_measured_beside_the_old_way(workplace):
    done = workplace.process("bench", "e2e", "--rounds", "1", "--steps", "3", "--config", "small.toml", "--json")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    metrics = outcome["metrics"]
    assert metrics["speedup"] > 1 and metrics["steps_per_hour"] > metrics["steps_per_hour_old_way"] > 0
    assert 0 <= metrics["orchestration_share"] < 1 and metrics["policy_lag_max"] == 0
    assert outcome["benchmark"].startswith("e2e, start_groups 2") and not outcome["targets"], "no laptop's figures"
    assert metrics["old_steps_measured"] >= 5
