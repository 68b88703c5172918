"""The ratio of spread rollouts to those of one process is that of rates in rounds of the same number."""

import pytest

from benchmarks.spread import TARGETS, spread_figures


def rounds(*figures: tuple[float, float, float]) -> list[dict[str, float]]:
    return [dict(zip(("decisions", "wall_s", "cpu_s"), each, strict=True)) for each in figures]


def test_ratios_are_medians_over_rounds_and_a_slow_round_of_both_arms_changes_none():
    one = rounds((100, 1.0, 2.0), (100, 10.0, 2.0), (100, 1.0, 2.0))
    spread = rounds((90, 1.0, 2.0), (95, 10.0, 2.5), (80, 1.0, 2.0))
    found = spread_figures({"one": one, "spread": spread})
    assert found["spread_over_one"] == pytest.approx(0.9) and TARGETS["spread_over_one"].holds(found["spread_over_one"])
    assert found["spread_over_one_cpu"] == pytest.approx(0.8)
    assert found["decisions_per_s_one"] == pytest.approx(100) and found["decisions_per_s_spread"] == pytest.approx(80)
    assert found["cpu_ms_per_decision_one"] == pytest.approx(20)
