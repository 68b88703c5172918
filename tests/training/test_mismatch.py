"""Trainer and engine may differ by what the shorter of their number formats rounds, and no more."""

import numpy as np
import pytest

from entente.reports import sentences
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
def test_the_limits_are_those_of_the_shorter_format_in_the_check_and_in_the_report(trainer: str, engine: str, rounded: bool):
    noise = Mismatch.of(np.full(100, 0.01), trainer, engine)
    report = sentences.mismatch(type("Facts", (), {"mismatch": noise.metrics()})())  # type: ignore[arg-type]
    assert ("99th percentile" in report) is rounded is noise.rounded
    if rounded:
        check_mismatch(noise, 0)
    else:
        with pytest.raises(TrainingError, match=f"does not compute in {engine}"):
            check_mismatch(noise, 0)
    for gap in (0.2, np.nan):
        with pytest.raises(TrainingError, match="disagree on version 3"):
            check_mismatch(Mismatch.of(np.full(100, gap), trainer, engine), 3)
