"""A run made before a setting existed keeps its hash; whatever enters the weights changes it."""

import pytest

from training.settings import TrainingSettings
from training.settings_hash import FROM_THE_FIRST, LAST_BITS, settings_hash

BEFORE_THERE_WAS_A_CHOICE_OF_LOSS = {
    "45fb34167dc95c7d": TrainingSettings(),
    "b95e1ac7b208f839": TrainingSettings(learning_rate=3e-3, updates_per_step=2, seed=3),
}
"""Hashes as checkpoints of earlier versions have them."""


@pytest.mark.parametrize("recorded", BEFORE_THERE_WAS_A_CHOICE_OF_LOSS)
def test_a_run_of_an_earlier_version_still_has_its_hash(recorded: str):
    assert settings_hash(BEFORE_THERE_WAS_A_CHOICE_OF_LOSS[recorded]) == recorded


@pytest.mark.parametrize(
    "change",
    [{"loss": "gspo"}, {"kl_weight": 0.1}, {"importance_cap": 2.0}, {"advantage_scale": "running"}, {"clip_low": 0.1}],
    ids=lambda change: next(iter(change)),
)
def test_what_enters_the_weights_changes_the_hash(change: dict):
    assert settings_hash(TrainingSettings(**change)) != settings_hash(TrainingSettings())


def test_what_a_resumed_run_may_change_does_not():
    assert settings_hash(TrainingSettings(keep_checkpoints=9, threads=3, mismatch_every=5)) == settings_hash(TrainingSettings())


def test_the_lists_name_settings_that_exist():
    assert set(TrainingSettings.model_fields) >= FROM_THE_FIRST | LAST_BITS
