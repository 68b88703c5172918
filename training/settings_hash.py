"""The hash of the training settings that affect the weights. Ledgers and checkpoints store it."""

import hashlib

from pydantic_core import to_json

from telemetry.setting_marks import MAY_CHANGE, change_rule
from training.settings import TrainingSettings

LAST_BITS = frozenset({"layout", "token_budget", "recompute"})
"""Settings that only change rounding. They are not part of the hash, nor are settings that a resumed run may change."""


def settings_hash(training: TrainingSettings) -> str:
    """Hash of the settings that affect the weights: 16 hex digits."""
    outside = {name for name in TrainingSettings.model_fields if change_rule(TrainingSettings, [name]) is MAY_CHANGE} | LAST_BITS
    return hashlib.sha256(to_json(training.model_dump(mode="json", exclude=outside))).hexdigest()[:16]
