"""The hash of the training settings that enter the weights: ledgers and checkpoints carry it, and a run keeps it.

Promise: a run made before a setting existed goes on under the hash that it has, since a setting that came later enters only where
it is not at its default, and defaults of such settings mean "as before". So those defaults never change.
"""

import hashlib
from typing import Any

from pydantic_core import to_json

from telemetry.setting_marks import MAY_CHANGE, change_rule
from training.settings import OUTLIER_HIGH, OUTLIER_LOW, TrainingSettings

LAST_BITS = frozenset({"processes", "layout", "token_budget", "recompute", "compile"})
"""Settings that enter the weights no further than the last bits of a sum; those that a resumed run may change never enter."""
FROM_THE_FIRST = frozenset(
    {
        "lora_rank",
        "lora_alpha",
        "learning_rate",
        "updates_per_step",
        "max_gradient_norm",
        "clip_low",
        "clip_high",
        "dual_clip",
        "micro_batch_rows",
        "dtype",
        "device",
        "seed",
    }
)
"""Settings that always were, and enter whatever they are."""


def settings_hash(training: TrainingSettings) -> str:
    """Hash of the settings that enter the weights."""
    outside = {name for name in TrainingSettings.model_fields if change_rule(TrainingSettings, [name]) is MAY_CHANGE} | LAST_BITS
    later = {
        name
        for name, field in TrainingSettings.model_fields.items()
        if name not in FROM_THE_FIRST and getattr(training, name) == field.get_default(call_default_factory=True)
    }
    told: dict[str, Any] = {}
    for name, value in training.model_dump(mode="json", exclude=outside | later).items():
        told[name] = value
        if name == "dual_clip":  # where these stood while they were settings
            told |= {"outlier_low": OUTLIER_LOW, "outlier_high": OUTLIER_HIGH}
    return hashlib.sha256(to_json(told)).hexdigest()[:16]
