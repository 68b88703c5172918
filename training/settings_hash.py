"""The hash of the training settings that enter the weights: ledgers and checkpoints carry it, and a run keeps it.

Promise: a run made before a setting existed goes on under the hash that it has, since a setting that came later enters only where
it is not at its default, and defaults of such settings mean "as before". So those defaults never change.
"""

import hashlib

from telemetry.setting_marks import MAY_CHANGE, change_rule
from training.settings import TrainingSettings

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
        "outlier_low",
        "outlier_high",
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
    return hashlib.sha256(training.model_dump_json(exclude=outside | later).encode()).hexdigest()[:16]
