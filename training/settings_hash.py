"""The hash of the training settings that affect the weights. Ledgers and checkpoints store it.

A new release must not change the hash of an existing run. So a setting that was added later enters the hash only if it is not at
its default, its default means the behaviour before it was added, and that default must never change.
"""

import hashlib
from typing import Any

from pydantic_core import to_json

from telemetry.setting_marks import MAY_CHANGE, change_rule
from training.settings import OUTLIER_HIGH, OUTLIER_LOW, TrainingSettings

LAST_BITS = frozenset({"layout", "token_budget", "recompute", "compile"})
"""Settings that only change rounding. They are not part of the hash, nor are settings that a resumed run may change."""
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
"""Settings of the first release. They are part of the hash at any value."""


def settings_hash(training: TrainingSettings) -> str:
    """Hash of the settings that affect the weights: 16 hex digits."""
    outside = {name for name in TrainingSettings.model_fields if change_rule(TrainingSettings, [name]) is MAY_CHANGE} | LAST_BITS
    later = {
        name
        for name, field in TrainingSettings.model_fields.items()
        if name not in FROM_THE_FIRST and getattr(training, name) == field.get_default(call_default_factory=True)
    }
    hashed: dict[str, Any] = {}
    for name, value in training.model_dump(mode="json", exclude=outside | later).items():
        hashed[name] = value
        if name == "dual_clip":  # the outlier bounds were settings once, and followed dual_clip
            hashed |= {"outlier_low": OUTLIER_LOW, "outlier_high": OUTLIER_HIGH}
    return hashlib.sha256(to_json(hashed)).hexdigest()[:16]
