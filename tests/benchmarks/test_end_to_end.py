"""The figures of `bench e2e` compare like with like: decisions, start groups, seconds, steps, objectives and bases."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import end_to_end
from benchmarks.arithmetic_floor import Weights, floor_s, matrix_flops_per_s, weights_of
from benchmarks.end_to_end import (
    FULL,
    QUICK,
    as_kept,
    bench_e2e,
    figures,
    floor_figures,
    old_way_for,
    outcome_of,
    run_old,
    score_figures,
    threads_of,
    wanted_of,
)
from benchmarks.entente_run import RunFigures
from benchmarks.old_way.run import MEASURED_AT_LEAST, may_end, newest_within
from benchmarks.old_way.ways import OLD
from cli.bench_dry_run import check_e2e
from cli.bench_setting import arguments_of, rollouts_of
from inference.settings import InferenceSettings
from pipeline.run_settings import layered_settings
from telemetry.errors import InputError
from training.settings import TrainingSettings

LAPTOP = layered_settings("laptop").rollouts


def new_way(**others: Any) -> dict[str, Any]:
    return {
        "step_s": [2.0, 2.0], "train_s": [1.0, 1.0], "orchestration_s": [0.1, 0.1], "span_s": 60.0,
        "train/decisions": [100.0, 100.0], "rollout/decisions": [150.0, 150.0], "rollout/start_groups": [8.0, 8.0],
        "cpu_a_step": 3.0, "lags": [0, 1, 1, 2], "base_score": 0.25, "trained_score": 1.25, "trained_ci": (1.0, 1.5),
    } | others  # fmt: skip


def old_way(steps: int = 2, **others: Any) -> dict[str, Any]:
    one = {"wall_s": 40.0, "cpu_s": 60.0, "train_s": 10.0, "trained": 200, "start_groups": 8}
    return {"steps": [one | {"step": step, "ended_s": 40.0 * step} for step in range(1, steps + 1)]} | others


def test_a_step_of_old_is_scaled_to_as_many_trained_decisions_or_start_groups():
    found = figures([new_way()], [old_way()])
    assert found["steps_per_hour"] == 1800 and found["speedup"] == pytest.approx(10.0)
    assert found["steps_per_hour_old_way"] == pytest.approx(180.0) and found["speedup_cpu"] == pytest.approx(10.0)
    assert (found["speedup_start_groups"], found["speedup_cpu_start_groups"]) == (20.0, 20.0)
    assert found["trainer_idle_share"] == pytest.approx(0.5) and found["orchestration_share"] == pytest.approx(0.05)
    assert (found["policy_lag_p50"], found["policy_lag_max"]) == (1.0, 2.0)


def test_the_old_steps_measured_are_those_of_the_round_with_the_fewest_and_not_the_first():
    found = figures([new_way(), new_way()], [old_way(20), old_way(6)])
    assert found["old_steps_measured"] == 5


@pytest.mark.parametrize(
    ("step", "spent_s", "scored_step", "may"),
    [(6, 30.0, 0, True), (5, 30.0, 0, False), (6, 10.0, 0, False), (19, 500.0, 20, False), (20, 500.0, 20, True)],
    ids=["enough", "too few steps", "too few seconds", "before the scored step", "at the scored step"],
)
def test_the_old_way_has_five_measured_steps_whatever_the_budget(step: int, spent_s: float, scored_step: int, may: bool):
    assert MEASURED_AT_LEAST == 5
    assert may_end(step, spent_s, budget_s=22.0, scored_step=scored_step) is may


def test_the_equal_span_holds_the_first_step_of_both_ways():
    summary = {"base_score": 0.3, "trained_score": 1.2, "trained_ci": None}
    steps = [{"time/step_s": seconds, "time/train_s": 1.0} for seconds in (9.0, 2.0, 3.0)]
    kept = as_kept(RunFigures(steps=steps, cpu_s=[1.0, 2.0, 3.0], summary=summary, lags=[]))
    assert kept["span_s"] == 14.0 and kept["step_s"] == [2.0, 3.0]
    ended = [(13.0, "first"), (14.0, "second"), (14.1, "third")]
    assert newest_within(kept["span_s"], ended) == "second"
    assert newest_within(12.9, ended) is None


def test_scores_are_after_the_equal_span_and_after_equal_steps_each_with_the_gain_over_its_own_base():
    base, span, later = {"mean": 0.5, "ci": (0.4, 0.6)}, {"mean": 0.5, "ci": None}, {"mean": 0.75, "ci": (0.5, 1.0)}
    found = score_figures(new_way(), old_way(3, base=base, span=span, steps_scored=later), 20)
    assert (found["score_equal_span"], found["score_20_steps"]) == (1.25, 1.25)
    assert (found["score_equal_span_old_way"], found["score_20_steps_old_way"]) == (0.5, 0.75)
    assert (found["score_gain_20_steps"], found["score_gain_20_steps_old_way"]) == (1.0, 0.25)
    assert found["score_gain_equal_span_old_way"] == 0.0 and found["score_20_steps_old_way_high"] == 1.0
    assert "score_equal_span_old_way_low" not in found, "too few source games"
    assert (found["span_s"], found["old_steps_in_span"]) == (60.0, 1.0)


@pytest.mark.parametrize(("weight", "without"), [(0.0, True), (0.05, False)], ids=["off", "on"])
def test_both_ways_have_a_divergence_from_the_base_or_neither(weight: float, without: bool):
    way = old_way_for(SimpleNamespace(training=TrainingSettings(kl_weight=weight)))  # type: ignore[arg-type]
    assert way == dataclasses.replace(OLD, no_reference=without)


@pytest.mark.parametrize(("depth", "planned"), [(2, (4, 4)), (0, (8, 8))], ids=["overlap", "in turn"])
def test_the_old_way_has_the_threads_that_a_run_plans(depth: int, planned: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(end_to_end, "usable_cores", lambda: 8)
    setting: Any = SimpleNamespace(inference=InferenceSettings(), training=TrainingSettings())
    assert threads_of(setting, depth) == planned


def test_the_threads_reach_the_old_ways_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho '{\"threads\": '$OMP_NUM_THREADS'}'\n")
    program.chmod(0o755)
    monkeypatch.setattr(end_to_end.sys, "executable", str(program))
    assert run_old(tmp_path / "spec.json", engine_threads=3) == [{"threads": 3}]


METRICS = {"speedup": 9.0, "speedup_start_groups": 8.0, "score_20_steps": 1.2}


def test_figures_of_other_rollouts_are_not_taken_for_those_of_the_preset():
    laptop = outcome_of(METRICS, LAPTOP, LAPTOP, 20)
    assert laptop.benchmark == "e2e" and set(laptop.targets) == set(METRICS)
    with_range = METRICS | {"speedup_lowest": 7.0, "speedup_highest": 10.0}
    four = outcome_of(with_range, LAPTOP.model_copy(update=rollouts_of(4, "all", None)), LAPTOP, 8)
    assert four.benchmark == "e2e, start_groups 2, horizon_years 4, policy_powers all"
    names = {"speedup": "speedup_four_years", "speedup_lowest": "speedup_four_years_lowest"}
    names |= {"speedup_highest": "speedup_four_years_highest"}
    assert dict(four.metrics) == {names.get(name, name): value for name, value in with_range.items()}
    assert set(four.targets) == {"speedup_four_years"}
    for given in (rollouts_of(4, None, 3), rollouts_of(4, "all", 3)):
        other = outcome_of(METRICS, LAPTOP.model_copy(update=given), LAPTOP, 20)
        assert other.benchmark.startswith("e2e, start_groups 3, horizon_years 4")
        assert dict(other.metrics) == METRICS and not other.targets


def test_fewer_steps_than_the_full_number_are_not_judged_except_those_of_four_years():
    assert set(outcome_of(METRICS, LAPTOP, LAPTOP, 8).scaled_down) == set(METRICS)
    assert not outcome_of(METRICS, LAPTOP, LAPTOP, 20).scaled_down
    assert not outcome_of(METRICS, LAPTOP.model_copy(update=rollouts_of(4, "all", None)), LAPTOP, 8).scaled_down


def test_years_and_powers_reach_both_ways():
    given = rollouts_of(4, "all", None)
    words = arguments_of([Path("a.toml")], given)
    assert words[:2] == ["--config", "a.toml"]
    assert dict(zip(words[2::2], words[3::2], strict=True)) == {
        "--rollouts.horizon-years": "4", "--rollouts.policy-powers": "all", "--rollouts.start-groups": "2"}  # fmt: skip
    assert rollouts_of(None, None, None) == {} and arguments_of(None, {}) == []


@pytest.mark.parametrize(("rounds", "steps"), [(0, None), (None, 2)], ids=["rounds", "steps"])
def test_nothing_to_measure_is_refused_before_anything_is_made(rounds: int | None, steps: int | None):
    given = {"quick": True, "years": None, "powers": None, "start_groups": None, "rounds": rounds, "steps": steps}
    with pytest.raises(InputError, match="measure nothing"):
        check_e2e(given | {"config": None, "runs_root": Path("runs"), "seed": 0})


def test_the_amount_of_work_is_the_short_or_the_full_one_unless_a_number_is_given():
    assert wanted_of(short=True, rounds=None, steps=None) == QUICK
    assert wanted_of(short=False, rounds=None, steps=5) == dataclasses.replace(FULL, steps=5)


# -- the floor ---------------------------------------------------------------------------------------------------------------


def test_the_floor_counts_each_tokens_products_once():
    weights, nothing = Weights(base=1000, head=100, adapter=10), dict.fromkeys(TOKEN_NAMES, 0.0)
    trained = nothing | {"train/unique_tokens": 7.0, "train/branching_tokens": 3.0}
    assert floor_s(trained, weights, 1.0) == 7 * (4000 + 60) + 3 * 400
    rolled = nothing | {"rollout/prompt_tokens": 50.0, "rollout/cached_tokens": 20.0}
    assert floor_s(rolled, weights, 1.0) == 30 * 2000
    drawn = nothing | {"rollout/completion_tokens": 10.0, "rollout/forced_share": 0.6}
    assert floor_s(drawn, weights, 2.0) == pytest.approx((10 * 2000 + 4 * 200) / 2)


TOKEN_NAMES = ("train/unique_tokens", "train/branching_tokens", "rollout/prompt_tokens", "rollout/cached_tokens",
               "rollout/completion_tokens", "rollout/forced_share")  # fmt: skip


def test_a_step_over_its_floor_is_the_mean_step_over_the_mean_floor_and_the_median_over_rounds():
    tokens = {key: [0.0, 0.0, 0.0] for key in TOKEN_NAMES} | {"train/unique_tokens": [1.0, 2.0, 3.0]}
    new = {"step_s": [1.0, 2.0, 9.0]} | tokens
    rounds = [new, new | {"step_s": [3.0, 3.0, 3.0]}, new | {"step_s": [90.0, 90.0, 90.0]}]
    found = floor_figures(rounds, Weights(base=250, head=0, adapter=0), 4000.0)
    assert found == {"step_over_floor": 8.0, "step_floor_s": 0.5, "matrix_gflops_per_s": 4e-6}


def test_a_benchmark_whose_arms_are_stored_measures_nothing_again_not_even_the_matrix_rate(model: Path):
    ours = new_way(**{name: [1.0, 1.0] for name in TOKEN_NAMES})
    arms = {"new way, round 1": ours, "old way, round 1": old_way(), "matrix rate": 1e9}
    kept: Any = SimpleNamespace(once=lambda arm, measure: arms[arm.removeprefix("e2e: the ")])
    settings = {"rollouts": LAPTOP, "training": TrainingSettings(), "inference": InferenceSettings()}
    setting: Any = SimpleNamespace(compact_model=model, **settings)
    nothing: Any = None
    outcome = bench_e2e(wanted=QUICK, setting=setting, preset=LAPTOP, cache=Path(), evaluation=nothing, runs_root=Path(),
                        arguments=(), depth=2, kept=kept)  # fmt: skip
    assert outcome.metrics["matrix_gflops_per_s"] == 1.0 and set(outcome.scaled_down) == {"speedup", "speedup_start_groups"}


def test_weights_and_rate_are_those_of_the_model(model: Path):
    import torch
    from transformers import AutoModelForCausalLM

    from training.policy import Policy

    weights, settings = weights_of(model, TrainingSettings(device="cpu")), TrainingSettings(device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(model)
    linear = [each for name, each in plain.named_modules() if isinstance(each, torch.nn.Linear) and name != "lm_head"]
    assert weights.base == sum(each.weight.numel() for each in linear) and weights.head == plain.lm_head.weight.numel()
    assert weights.adapter == sum(each.numel() for each in Policy(model, settings).parameters())
    threads = torch.get_num_threads()
    assert 1e8 < matrix_flops_per_s(model) < 1e14 and torch.get_num_threads() == threads
