"""What a step says of itself, against plain loops: quantiles, shares, probed tokens, the alarm at lag 0, registered names."""

import random
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from entente.telemetry.metrics import check
from entente.training.micro_batches import PROBED_SHARE, probed
from entente.training.objective import TOKEN_FIGURES, StepFigures
from entente.training.step_metrics import (
    effective_share,
    lag_zero_metrics,
    masked_metrics,
    rate_metrics,
    selection_metrics,
    update_metrics,
)
from tests.training.batches import batch_of

VERSION = 5
VERSIONS = np.array([5, 5, 4, 3], np.int32)
"""By row of the batch."""


def batch() -> Any:
    """Four rows, of which two are of the version trained."""
    return SimpleNamespace(policy_versions=VERSIONS, input_ids=np.zeros(80), returns=np.array([1.0, 0.0, 2.0, 1.0]))


def token_figures(seed: int, rows: list[int], **given: Any) -> np.ndarray:
    rng, n = random.Random(seed), len(rows)
    figures: dict[str, Any] = {
        "batch_row": np.array(rows),
        "in_thought": np.zeros(n, bool),
        "log_ratio": np.array([rng.gauss(0, 0.01) for _ in rows], np.float32),
        "entropy": np.array([rng.random() for _ in rows], np.float32),
        "legal_mass": np.array([rng.random() if place % 2 else np.nan for place in range(n)], np.float32),
        "kl": np.full(n, np.nan, np.float32),
        "gradient": np.full(n, np.nan, np.float32),
        "clipped_low": np.array([rng.random() < 0.2 for _ in rows]),
        "clipped_high": np.array([rng.random() < 0.2 for _ in rows]),
        "outlier": np.array([rng.random() < 0.1 for _ in rows]),
    }
    columns = figures | given
    return np.array(list(zip(*(columns[name] for name in TOKEN_FIGURES.names), strict=True)), TOKEN_FIGURES)


def update(seen: np.ndarray) -> StepFigures:
    return StepFigures(losses=[0.5], tokens=seen, unique_tokens=30, plan_s=0.1, forward_s=1.0, backward_s=2.0, grad_norm=2.0)


def test_figures_are_over_the_tokens_of_all_updates():
    parts = [token_figures(1, [0, 0, 1, 2, 2, 3]), token_figures(2, [0, 1, 1, 3])]
    found = update_metrics([update(part) for part in parts])
    tokens = [(part, at) for part in parts for at in range(len(part))]
    ratios = [float(np.exp(np.float64(part["log_ratio"][at]))) for part, at in tokens]
    left = [bool(part["outlier"][at]) for part, at in tokens]
    guarded = [bool(part["outlier"][at] or part["clipped_low"][at] or part["clipped_high"][at]) for part, at in tokens]
    assert found["train/branching_tokens"] == 10 and found["train/unique_tokens"] == 60
    assert found["train/masked_share"] == pytest.approx(sum(guarded) / 10)
    kept = [0.0 if out else ratio for ratio, out in zip(ratios, left, strict=True)]
    assert found["train/ess_ratio"] == pytest.approx(sum(kept) ** 2 / (10 * sum(w * w for w in kept)))
    entropies = sorted(float(part["entropy"][at]) for part, at in tokens)
    assert entropies[0] <= found["train/entropy_p10"] <= found["train/entropy_p50"] <= entropies[-1]
    masses = [float(part["legal_mass"][at]) for part, at in tokens if part["legal_mass"][at] == part["legal_mass"][at]]
    assert found["train/legal_mass_p50"] == pytest.approx(float(np.median(masses)))
    assert "train/kl_p50" not in found, "the base was not asked"


def test_thoughts_and_orders_are_told_apart_only_where_there_are_thoughts():
    thought, kl = np.array([True, False, True]), np.array([0.1, 0.2, 0.3], np.float32)
    first = token_figures(1, [0, 0, 1], in_thought=thought, gradient=np.array([-0.1, 0.4, 0.2], np.float32), kl=kl)
    second = token_figures(2, [2, 3], gradient=np.array([0.0, -0.3], np.float32))
    found = update_metrics([update(first), update(second)])
    assert found["train/thought_tokens"] == 2 and found["train/thought_grad_share"] == pytest.approx(0.3)
    assert found["train/thought_kl_mean"] == pytest.approx(0.2) and found["train/order_kl_mean"] == pytest.approx(0.2)
    assert found["train/thought_log_ratio_mean"] == pytest.approx(np.abs(first["log_ratio"][thought]).mean())
    orders = [*first["entropy"][~thought], *second["entropy"]]
    assert found["train/order_entropy_mean"] == pytest.approx(np.mean(orders)) and found["train/branching_tokens"] == 5
    check(found)
    plain = update_metrics([update(second)])
    assert not [name for name in plain if "thought" in name or "order" in name]
    unmeasured = update_metrics([update(token_figures(1, [0, 1, 2], in_thought=thought))])
    assert "train/thought_grad_share" not in unmeasured and "train/thought_kl_mean" not in unmeasured


@pytest.mark.parametrize(("weights", "share"), [([1, 1, 1, 1], 1.0), ([1, 0, 0, 0], 0.25), ([3, 1], 0.8), ([0, 0], 0.0)])
def test_effective_samples_are_a_share_of_the_samples(weights: list[float], share: float):
    assert effective_share(np.array(weights, float)) == pytest.approx(share)


def test_lag_zero_figures_are_of_the_first_update_and_of_rows_that_the_trained_version_drew():
    first = token_figures(1, [0, 1, 2, 3], log_ratio=np.array([0.01, -0.03, 5.0, 5.0], np.float32))
    second = token_figures(2, [0], log_ratio=np.array([9.0], np.float32))
    found = lag_zero_metrics([update(first), update(second)], batch(), VERSION)
    assert found["train/log_ratio_lag0_mean"] == pytest.approx(0.02) and found["train/log_ratio_lag0_max"] == pytest.approx(0.03)
    assert lag_zero_metrics([update(first)], batch(), VERSION + 1) == {}, "nothing was drawn by that version"


def test_lags_are_told_as_a_histogram_of_rows():
    rows = pa.table({"policy_lag": [0, 0, 1, 2, 3, 7, 7, 7]})
    found = selection_metrics(rows, {"zero_std": 3}, batch())
    shares = [found[f"train/policy_lag_{name}_share"] for name in ("0", "1", "2", "more")]
    assert shares == [0.25, 0.125, 0.125, 0.5] and found["train/groups_zero_std"] == 3


def test_rates_are_tokens_over_the_seconds_of_the_updates():
    figures = {"train/update_s": 4.0, "train/tokens": 80.0, "train/unique_tokens": 20.0, "train/branching_tokens": 8.0}
    found = rate_metrics(figures)
    assert [found[f"train/{name}_per_s"] for name in ("tokens", "unique_tokens", "branching_tokens")] == [20, 5, 2]


@pytest.mark.parametrize("first", [0, 12345, 10_000_000])
@pytest.mark.parametrize("length", [50, 400, 3000])
def test_every_stretch_of_a_batch_has_its_share_of_probes(first: int, length: int):
    share = probed(np.arange(first, first + length)).mean()
    assert abs(share - PROBED_SHARE) < 3 / length + 0.01


def test_the_choice_is_that_of_exact_arithmetic():
    golden = Fraction(0.6180339887498949)
    exact = [(place * golden) % 1 < Fraction(PROBED_SHARE) for place in range(2000)]
    assert probed(np.arange(2000)).tolist() == exact


def test_the_masked_share_by_kind_is_that_of_the_tokens_of_each_order_in_every_update():
    line, end = 60, 61
    # Row 0: a hold, then a bounced move; row 1: after a thought with a line break, a support.
    answers = [[1, 2, line, 3, 4, end], [7, line, 8, 9, end]]
    whole = batch_of([([5], answers[0]), ([6], answers[1])], widest=5)
    sizes = np.array([3, 1, 1, 2, 2, 1, 4, 4, 2, 2, 1])
    whole = replace(whole, legal_ids=np.arange(sizes.sum(), dtype=np.int32), legal_offsets=np.append(0, np.cumsum(sizes)))
    outcomes = {1000: [0, 3], 1001: [4]}  # hold with effect; move without; support with effect
    first = token_figures(1, [1, 1, 1, 1], in_thought=np.array([True, True, False, False]))
    second = token_figures(2, [0, 0, 0])
    for part, masked in ((first, [1, 1, 1, 0]), (second, [0, 1, 0])):
        part["clipped_low"] = part["outlier"] = False
        part["clipped_high"] = masked
    found = masked_metrics([update(first), update(second)], whole, outcomes, {line, end})
    assert found == {
        "train/masked_hold_effect_share": 0.0,
        "train/masked_move_no_effect_share": 0.5,
        "train/masked_support_effect_share": 0.5,
    }
    check(found)
    assert masked_metrics([update(second)], whole, {}, {line, end}) == {} == masked_metrics([], whole, outcomes, {line, end})
