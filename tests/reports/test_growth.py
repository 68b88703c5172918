"""A cost's growth: exponents against known laws, and the plot of them."""

import math
from pathlib import Path

import pytest

from reports.growth import Growth, exponent
from reports.growth_plot import check_plot, growth_plot
from telemetry.errors import InputError


def law(axis: str = "rows", **powers: float) -> Growth:
    """Figures that are 3 times a power of the size."""
    points = {size: {name: 3 * size**power for name, power in powers.items()} for size in (10, 100, 1000)}
    return Growth(axis=axis, figures={name: f"{name} of it, s" for name in powers}, points=points)


@pytest.mark.parametrize("power", [0, 0.5, 1, 2, -1])
def test_the_exponent_of_a_power_law_is_its_power(power: float):
    assert exponent((size, 7 * size**power) for size in (4, 8, 16, 64)) == pytest.approx(power)


def test_between_the_points_the_exponent_is_the_least_squares_slope():
    """By hand: logs 0, 1, 2 against 0, 1, 1 give 1/2."""
    assert exponent([(1, 1), (math.e, math.e), (math.e**2, math.e)]) == pytest.approx(0.5)


def test_one_size_has_no_exponent_and_zeros_are_left_out():
    growth = Growth(axis="steps", figures={"mb": "MB", "s": "s"}, points={20: {"mb": 0.0, "s": 2.0}, 200: {"mb": 5.0}})
    assert growth.exponents() == {}
    assert growth.metrics() == {"steps_20_mb": 0.0, "steps_20_s": 2.0, "steps_200_mb": 5.0}, "what was not counted is absent"


def test_metrics_have_every_value_and_exponent():
    metrics = law(s=1, mb=0).metrics()
    assert metrics["rows_100_s"] == 300 and metrics["rows_s_exponent"] == pytest.approx(1)
    assert metrics["rows_1000_mb"] == 3 and metrics["rows_mb_exponent"] == pytest.approx(0)
    assert len(metrics) == 3 * 2 + 2


def test_the_plot_has_a_panel_for_each_axis_and_an_exponent_for_each_line():
    growths = [law("rows", s=1, mb=0.5), law("steps", s=0), law("forks", s=2)]
    svg = growth_plot(growths, ".svg").decode()
    for words in ("rows", "steps", "forks", "s of it (1.00)", "mb of it (0.50)", "s of it (2.00)", "linear (1.00)", "1,000"):
        assert words in svg, words
    assert growth_plot(growths[:1], ".png").startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "why"), [("growth.jpg", r"neither \.png nor \.svg"), ("none/growth.png", "make the folder")])
def test_a_plot_that_could_not_be_written_is_refused_beforehand(tmp_path: Path, name: str, why: str):
    with pytest.raises(InputError, match=why):
        check_plot(tmp_path / name)
