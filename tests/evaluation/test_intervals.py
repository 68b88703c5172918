"""Intervals have their nominal coverage, and there is none with too few clusters."""

import re
from pathlib import Path

import numpy as np
import pytest

from entente.evaluation.intervals import FEWEST_CLUSTERS, Estimate, estimate, format_count

ROOT = Path(__file__).resolve().parents[2]


def width(found: Estimate) -> float:
    assert found.interval is not None
    return found.interval[1] - found.interval[0]


def test_the_interval_resamples_whole_clusters():
    """Ten copies of a position contain the information of one, so the interval must not become narrower."""
    values, clusters = np.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.0]), np.arange(6)
    once = estimate(values, clusters, 0)
    copied = estimate(np.repeat(values, 10), np.repeat(clusters, 10), 0)
    assert width(copied) == pytest.approx(width(once), abs=0.05) and copied.clusters == once.clusters == 6
    assert width(estimate(np.repeat(values, 10), np.arange(60), 0)) < 0.5 * width(once)


def test_the_interval_of_a_known_spread():
    values = np.random.default_rng(0).normal(2.0, 1.0, 400)
    found = estimate(values, np.arange(400), 1)
    assert width(found) == pytest.approx(2 * 1.96 / 20, rel=0.15)
    assert found.interval is not None and found.interval[0] < found.mean < found.interval[1]


@pytest.mark.parametrize("count", [1, FEWEST_CLUSTERS - 1])
def test_too_few_clusters_have_no_interval_and_the_sentence_says_how_many_it_takes(count: int):
    found = estimate(np.repeat(np.arange(count), 3), np.repeat(np.arange(count), 3), 0)
    assert (found.interval, found.rounded(), found.clusters) == (None, None, count)
    assert (
        found.describe("+.2f", "source games") == f"no interval: {format_count(count, 'source games')}, and an interval takes 6"
    )
    share = estimate(np.zeros(count), np.arange(count), 0, share=True)
    assert share.interval is None, "there is no Wilson interval either"


def test_a_share_equal_in_all_clusters_gets_wilsons_interval():
    none, all_of_them = (estimate(np.full(8, value), np.arange(8), 0, share=True) for value in (0.0, 1.0))
    assert none.interval == pytest.approx((0, 0.3244), abs=1e-4), "Wilson's interval of 0 of 8"
    assert all_of_them.interval == pytest.approx((1 - 0.3244, 1), abs=1e-4)


def test_only_the_intervals_module_resamples():
    """Only `entente.evaluation.intervals` resamples, so all intervals of the project are of one kind."""
    owner = ROOT / "entente" / "evaluation" / "intervals.py"
    folders = ("benchmarks", "entente", "flows", "storage", "tasks")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py") if file != owner]
    resampling = re.compile(r"default_rng\([^)]*\)\.(integers|choice)\(|1\.96|bootstrap\(")
    assert len(files) > 100 and [str(file) for file in files if resampling.search(file.read_text())] == []


def samples(kind: str, clusters: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, float]:
    """Values and clusters of one experiment, and the true mean."""
    sizes = generator.integers(1, 8, clusters)  # source games give one position or several
    names = np.repeat(np.arange(clusters), sizes)
    if kind == "gains":  # centres gained: whole numbers, correlated within a game
        values = np.rint(np.repeat(generator.normal(0.6, 1.0, clusters), sizes) + generator.normal(0, 1.2, len(names)))
        return values, names, 0.6
    shares = generator.beta(2, 4, clusters)  # share of draws that solve a position
    return shares, np.arange(clusters), 1 / 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gains", "shares"])
@pytest.mark.parametrize("clusters", [6, 28])
def test_an_interval_covers_the_mean_in_about_95_of_100_cases(kind: str, clusters: int):
    generator, experiments, covered = np.random.default_rng(clusters), 2000, 0
    for number in range(experiments):
        values, names, mean = samples(kind, clusters, generator)
        found = estimate(values, names, number, share=kind == "shares").interval
        assert found is not None
        covered += found[0] <= mean <= found[1]
    assert 0.92 <= covered / experiments <= 0.98
