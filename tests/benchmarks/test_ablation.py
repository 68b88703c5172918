"""The ablation: one improvement at a time, arms in turn, costs of a step of one size, medians with their spread."""

from typing import Any

import pytest

from benchmarks import ablation
from benchmarks.ablation import NAMES, arms, bench_ablation, check_wanted, cpu_a_step, medians, table
from benchmarks.kept_arms import KeptArms
from benchmarks.old_way.ways import IMPROVEMENTS, NEW, OLD
from telemetry.errors import InputError


def arm(seconds: float) -> dict[str, float]:
    return {"rolled": 1.0, "trained": 1.0, "cpu_inference": seconds}


def test_a_steps_cost_is_put_together_from_what_each_decision_costs():
    one = {"rolled": 50.0, "trained": 20.0, "cpu_inference": 5.0, "cpu_games": 5.0, "cpu_train": 8.0, "cpu_save": 2.0}
    assert cpu_a_step(one, rolled=100, trained=40) == pytest.approx(2 * 10 + 2 * 10)


def test_the_table_says_gains_over_old_and_losses_over_new():
    results = {name: arm(16.0 if name.startswith("old") else 2.0) for name in arms()}
    results |= {"old+packing": arm(8.0), "new-packing": arm(6.0)}
    found = table(results)
    assert found["ablation_speedup"] == 8 and found["gain_packing"] == 2 and found["loss_packing"] == 3
    assert found["gain_arrow"] == 1 and found["loss_arrow"] == 1
    assert "gain_prefix_cache" not in found and "loss_warm_up_by_one_seat" not in found


def test_costs_are_those_of_a_step_as_large_as_that_of_the_new_way():
    results = {"old": arm(6.0) | {"rolled": 3.0}, "new": arm(4.0) | {"rolled": 4.0}}
    assert table(results, ())["ablation_cpu_s_old"] == 8.0


def test_each_improvement_has_its_arms_and_the_divergence_is_one_of_them():
    assert {f"old+{name}" for name in IMPROVEMENTS} | {f"new-{name}" for name in IMPROVEMENTS} <= set(arms())
    assert "no_reference" in IMPROVEMENTS and not OLD.no_reference and NEW.no_reference
    assert set(arms(["packing"])) == {"old", "new", "old+packing", "new-packing"}
    assert set(arms(["prefix_cache"])) == {"old", "new", "new-prefix_cache"}


def test_a_figure_is_the_median_with_its_least_and_greatest_value():
    found = medians([{"gain_arrow": 3.0}, {"gain_arrow": 1.0}, {"gain_arrow": 1.5}])
    assert found == {"gain_arrow": 1.5, "gain_arrow_low": 1.0, "gain_arrow_high": 3.0}


def test_arms_take_turns_on_the_same_step_and_a_stored_one_is_not_measured_again(monkeypatch, tmp_path):
    measured: list[tuple[str, int]] = []

    async def measure(name: str, way: Any, setting: Any, step: int) -> dict[str, float]:
        measured.append((name, step))
        return arm(8.0 if name == "old" else 2.0)

    monkeypatch.setattr(ablation, "_measure", measure)
    setting: Any = None

    def run() -> dict[str, float]:
        kept = KeptArms(tmp_path / "arms.json", {})
        return dict(bench_ablation(only=["arrow"], rounds=2, setting=setting, kept=kept).metrics)

    first = run()
    names = ["old", "new", "old+arrow", "new-arrow"]
    assert measured == [(name, step) for step in (2, 3) for name in names]
    assert first["gain_arrow"] == 4.0 and run() == first and len(measured) == 8


@pytest.mark.parametrize(("only", "rounds", "said"), [(["speed"], 5, "'speed'"), ([], 0, "0 rounds")])
def test_an_unknown_improvement_and_no_round_are_refused(only: list[str], rounds: int, said: str):
    with pytest.raises(InputError, match=said):
        check_wanted(only, rounds)
    assert check_wanted([], 1) == NAMES
