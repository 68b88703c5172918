"""Trainer and engine may differ by what the shorter of their number formats rounds, and no more."""

from pathlib import Path

import numpy as np
import pytest

from entente.reports import sentences
from entente.telemetry.alerts import Watch
from entente.telemetry.errors import TrainingError
from entente.training.mismatch import Mismatch, check_mismatch

MIXES = [
    ("float32", "float32", False),
    ("float32", "float64", False),
    ("float32", "bfloat16", True),
    ("bfloat16", "float32", True),
    ("bfloat16", "bfloat16", True),
    ("float32", "float16", True),
    ("bfloat16", "float16", True),
]


@pytest.mark.parametrize(("trainer", "engine", "rounded"), MIXES)
def test_the_limit_is_that_of_the_shorter_format_in_the_check_and_in_the_report(trainer: str, engine: str, rounded: bool):
    noise = Mismatch.of(np.full(100, 0.01), trainer, engine)
    report = sentences.mismatch(type("Facts", (), {"mismatch": noise.metrics(), "steps": {}})())  # type: ignore[arg-type]
    assert ("99th percentile" in report) is rounded is noise.rounded
    if rounded:
        check_mismatch(noise, 0)
    else:
        with pytest.raises(TrainingError, match=f"does not compute in {engine}"):
            check_mismatch(noise, 0)
    for gap in (0.2, np.nan):
        with pytest.raises(TrainingError, match="disagree on version 3"):
            check_mismatch(Mismatch.of(np.full(100, gap), trainer, engine), 3)


def test_a_correct_pair_of_16_bits_is_never_refused_and_a_wrong_one_always():
    """A correct pair: mean 0.0194, 99th percentile 0.171 over 485 tokens, as bfloat16 on both sides has shown."""
    for seed in range(50):
        gap = np.random.default_rng(seed).exponential(0.0194 / 0.9, 485) * np.random.default_rng(seed + 50).choice(
            [0.7, 3.0], 485, p=[0.9, 0.1]
        )
        check_mismatch(Mismatch.of(gap, "bfloat16", "bfloat16"), 0)
        with pytest.raises(TrainingError):
            check_mismatch(Mismatch.of(gap + 0.05, "bfloat16", "bfloat16"), 0)


@pytest.mark.parametrize(
    ("gap", "trainer", "sentence"),
    [
        (np.full(100, 0.06), "bfloat16", "0.06 nats on average"),
        (np.repeat([0.0, 0.4], [95, 5]), "bfloat16", "0.4 nats (99th"),
        (np.full(100, 2e-4), "float32", "both in 32 bits"),
        (np.full(100, 0.02), "bfloat16", ""),
        (np.full(100, 1e-5), "float32", ""),
    ],
)
def test_after_the_first_step_a_mismatch_raises_an_alert_and_the_run_continues(gap: np.ndarray, trainer: str, sentence: str):
    alerts = Watch("run", max_policy_lag=4, folders=[Path()]).step(20, Mismatch.of(gap, trainer, trainer).metrics())
    assert [alert.name for alert in alerts] == (["mismatch"] if sentence else [])
    assert sentence in "".join(alert.sentence for alert in alerts)
