"""What a run says: one line a step, stages at their end, and only to whoever looks on."""

import logging

import pytest

from entente.telemetry import progress
from entente.telemetry.progress import Reporter, step_line

FIGURES = {
    "train/reward": -0.345,
    "train/decisions": 16.0,
    "train/policy_lag_max": 1.0,
    "rollout/tokens_per_s": 263.7,
    "time/rollout_s": 0.52,
    "time/train_s": 12.0,
}


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log, every line of it."""
    caplog.set_level(logging.INFO, logger="entente")
    return caplog


def test_a_step_is_one_line_with_the_figures_that_it_has_and_their_units(said: pytest.LogCaptureFixture):
    line = "step 3/20  return -0.34  decisions 16  lag 1  264 tokens/s  rollout 0.5 s  train 12.0 s"
    assert step_line(3, 20, FIGURES) == line
    Reporter().step(3, 20, FIGURES)
    assert said.messages == [line]
    assert step_line(2, 2, {"train/decisions": 0.0, "time/train_s": 1.0}) == "step 2/2  decisions 0  train 1.0 s", (
        "what is missing is left out"
    )


def test_a_long_stage_is_said_every_ten_seconds_and_stages_do_not_hush_each_other(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    now = 0.0

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now

    monkeypatch.setattr(progress, "time", Clock)
    onlooker = Reporter()
    for done in range(25):
        now = float(done)
        onlooker.stage("imitation", done, 100)
        if done == 20:
            onlooker.stage("games", 1, 2)
    assert said.messages == ["imitation: 10 of 100", "imitation: 20 of 100"]
