"""Only what is registered may be logged, and what is registered says its unit and meaning."""

import re

import pytest

from entente.reports.newest import _CURVES
from entente.telemetry.metrics import METRICS, check


@pytest.mark.parametrize("value", [-0.01, float("inf")])
def test_a_share_outside_0_to_1_is_refused(value: float):
    with pytest.raises(ValueError, match=r"'rollout/prefix_hit_share' is a share and lies between 0 and 1, not at"):
        check({"train/loss": 9.0, "rollout/prefix_hit_share": value})


def test_a_share_at_its_ends_is_logged_whatever_float32_makes_of_it():
    check({"rollout/prefix_hit_share": 1.0000001, "train/legal_mass_p50": -1e-7, "rollout/forced_share": 0.0})


def test_a_metric_has_a_room_a_plain_name_and_a_meaning():
    assert len(METRICS) > 80 and len(_CURVES) > 5
    assert [name for name, metric in METRICS.items() if not (re.fullmatch(r"[a-z]+/[a-z0-9_]+", name) and metric.meaning)] == []
    assert [name for _, name, _ in _CURVES if name not in METRICS] == [], "the screen of `entente watch`"


@pytest.mark.parametrize(("ending", "unit"), [("_s", "s"), ("_mib", "MiB"), ("_share", "share"), ("_w", "W")])
def test_a_name_that_ends_in_a_unit_is_measured_in_it(ending: str, unit: str):
    measured = {name: metric.unit for name, metric in METRICS.items() if name.endswith(ending) and "_per_" not in name}
    assert measured and set(measured.values()) == {unit}
