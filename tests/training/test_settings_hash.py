"""Whatever enters the weights changes the hash of the settings."""

import pytest

from training.settings import TrainingSettings
from training.settings_hash import LAST_BITS, settings_hash


@pytest.mark.parametrize(
    "change",
    [{"loss": "gspo"}, {"kl_weight": 0.1}, {"importance_cap": 2.0}, {"advantage_scale": "batch"}, {"clip_low": 0.1}],
    ids=lambda change: next(iter(change)),
)
def test_what_enters_the_weights_changes_the_hash(change: dict):
    assert settings_hash(TrainingSettings(**change)) != settings_hash(TrainingSettings())


def test_what_a_resumed_run_may_change_does_not():
    assert settings_hash(TrainingSettings(threads=3, layout="padded")) == settings_hash(TrainingSettings())


def test_the_list_names_settings_that_exist():
    assert set(TrainingSettings.model_fields) >= LAST_BITS
