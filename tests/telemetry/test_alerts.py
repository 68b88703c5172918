"""Alerts: each rule begins to hold once, ends, and begins again."""

from pathlib import Path

import pytest

from entente.telemetry import alerts
from entente.telemetry.alerts import Watch

CALM = {
    "train/skipped": 0.0,
    "train/reward": 0.1,
    "train/policy_lag_p50": 1.0,
    "train/log_ratio_lag0_p99": 0.002,
    "train/entropy": 0.8,
    "train/groups_zero_std": 2.0,
    "train/groups_in_budget": 20.0,
    "engine/ejections": 0.0,
}


@pytest.fixture(autouse=True)
def _bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "NO_PROGRESS_STEPS", 4)
    monkeypatch.setattr(alerts, "DISK_FREE_GIB", 0.0)


def watch(tmp_path: Path) -> Watch:
    return Watch("mine", max_policy_lag=2, folders=[tmp_path])


@pytest.mark.parametrize(
    ("name", "wrong", "steps", "said"),
    [
        ("not_finite", {"train/skipped": 1.0}, 1, "an update was skipped"),
        ("lag_at_cap", {"train/policy_lag_p50": 2.0}, 5, "for 5 steps half the rows were 2 versions old"),
        ("mismatch", {"train/log_ratio_lag0_p99": 0.03}, 1, "differ by 0.03 nats (99th percentile at lag 0), usually by 0.002"),
        ("mismatch", {"train/log_ratio_lag0_mean": 0.06}, 1, "differ by 0.06 nats on average at lag 0"),
        ("mismatch", {"train/log_ratio_lag0_mean": float("nan")}, 1, "differ by nan nats on average at lag 0"),
        ("ratio", {"train/ratio_deviation_p99": 3.1, "train/learning_rate": 3e-3}, 1, "lower training.learning_rate, now 0.003"),
        ("ratio", {"train/masked_share": 0.3}, 1, "30% of the tokens are clipped"),
        ("zero_std", {"train/groups_zero_std": 18.0}, 1, "90% of fresh groups have equal returns"),
        ("entropy", {"train/entropy": 0.01}, 1, "entropy is 0.010 nats, under 0.02"),
    ],
)
def test_an_alert_is_raised_when_its_rule_begins_to_hold_and_again_after_it_was_over(
    tmp_path: Path, name: str, wrong: dict[str, float], steps: int, said: str
):
    looking, number = watch(tmp_path), 0

    def some(figures: dict[str, float], count: int) -> list[list[str]]:
        nonlocal number
        raised = []
        for _ in range(count):
            number += 1
            # Returns rise, so that a long calm is progress.
            found = looking.step(number, CALM | {"train/reward": 0.1 * number} | figures)
            assert all(alert.run == "mine" and alert.step == number for alert in found)
            raised.append([alert.name for alert in found])
            if found:
                assert said in found[0].sentence and f"mine, step {number}" in found[0].sentence
        return raised

    assert some({}, 8) == [[]] * 8
    assert some(wrong, steps + 1) == [[]] * (steps - 1) + [[name], []], "once, when it begins"
    assert some({}, 1) == [[]]
    assert some(wrong, steps)[-1] == [name], "over for a step, it may begin again"


def test_no_progress_is_a_mean_that_did_not_rise(tmp_path: Path):
    looking = watch(tmp_path)
    flat = [looking.step(step, CALM | {"train/reward": 0.5}) for step in range(1, 10)]
    assert [alert.name for found in flat for alert in found] == ["no_progress"] and flat[7], "after twice four steps"
    rising = watch(tmp_path)
    assert not any(rising.step(step, CALM | {"train/reward": 0.01 * step}) for step in range(1, 20))


def test_a_run_is_stalled_once_and_no_longer_after_a_step(tmp_path: Path):
    looking = watch(tmp_path)
    assert looking.quiet(29 * 60) == []
    (alert,) = looking.quiet(31 * 60)
    assert alert.name == "stalled" and "no step was finished for 31 minutes" in alert.sentence
    assert looking.quiet(32 * 60) == []
    looking.step(1, CALM)
    assert looking.quiet(0) == [] and [alert.name for alert in looking.quiet(40 * 60)] == ["stalled"]


def test_a_folder_that_is_away_stops_neither_the_run_nor_the_other_alerts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    away = Watch("mine", max_policy_lag=2, folders=[tmp_path / "removed"])
    assert away.step(1, CALM) == away.quiet(5.0) == []
    monkeypatch.setattr(alerts, "DISK_FREE_GIB", 1e9)
    (alert,) = Watch("mine", max_policy_lag=2, folders=[tmp_path / "removed", tmp_path]).quiet(5.0)
    assert f"under '{tmp_path}'" in alert.sentence


def test_a_filling_disk_is_said_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(alerts, "DISK_FREE_GIB", 2.0)
    free = {tmp_path: 5.0, tmp_path / "prefect": 5.0}
    monkeypatch.setattr(alerts.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": free[folder] * 2**30}))
    for fills in free:
        looking = Watch("mine", max_policy_lag=2, folders=[*free])
        assert looking.step(1, CALM) == looking.quiet(5.0) == []
        free[fills] = 1.5
        (alert,) = looking.quiet(5.0)
        assert alert.name == "disk" and f"1.5 GiB are free under '{fills}'" in alert.sentence
        assert looking.step(2, CALM) == [], "it was said"
        free[fills] = 5.0
