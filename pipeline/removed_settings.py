"""Settings of other versions: those that are constants now, each beside the code that uses it, those that were added or are
written otherwise now, and presets that were renamed.

A file, a deployment or a stored run may still contain a removed one with the constant's value. Any other value is refused.
Exception: a stored run opens with a message if its rows and weights do not depend on that setting. A stored run that lacks an
added setting behaves as it did before.
"""

from collections.abc import Mapping
from typing import Any

from rollouts.opponents import read_table, table_text
from telemetry.progress import reporter

REMOVED: Mapping[str, Any] = {
    "inference.affinity_margin": 16,
    "inference.drain_s": 20.0,
    "inference.engine_restarts": 3,
    "inference.request_attempts": 4,
    "storage.balance_powers": True,
    "storage.freshness": 0.5,
    "storage.min_spread": 0.0,
    "storage.snapshot_every_shards": 64,
    "training.mismatch_rows": 64,
    "training.outlier_high": 100.0,
    "training.outlier_low": 1e-4,
    "pipeline.backfill_max": 1.0,
    "pipeline.producer_deployment": "rollout-producer/play-rollouts",
    "pipeline.rollout_retries": 2,
    "pipeline.straggler_factor": 3.0,
    "telemetry.gpu_beat_s": 2.0,
    "telemetry.tables_every": 10,
    "alerts.lag_at_cap_steps": 5,
    "alerts.mismatch_times": 10.0,
    "alerts.no_spread_share": 0.9,
    "retention.aside_hours": 1.0,
    "retention.damaged_days": 30.0,
    "retention.wandb_days": 30.0,
}
"""Dotted name -> value of the constant."""
_ROWS_AND_WEIGHTS = frozenset(
    {"storage.balance_powers", "storage.freshness", "storage.min_spread", "training.outlier_high", "training.outlier_low"}
)
"""Removed settings on which the rows and weights of a run depend."""
ADDED: Mapping[str, Any] = {"prompts.chat": "none", "prompts.own_line": "in_place", "rollouts.last_winter": True}
"""Dotted name of a setting that was added with another default than what runs did before -> what they did."""
RENAMED_PRESETS: Mapping[str, str] = {"single-gpu": "gpu-24"}
"""Name of a preset of another version -> its name now."""


def preset_name(name: str) -> str:
    """The name of a preset in this version; says so if it had another."""
    if name not in RENAMED_PRESETS:
        return name
    reporter().say(f"the preset '{name}' is called '{RENAMED_PRESETS[name]}' now")
    return RENAMED_PRESETS[name]


def without_removed(tree: Any, *, stored: str = "") -> Any:
    """A copy of a settings tree without removed settings. A value that is no mapping is returned unchanged.

    Args:
        stored: name of the run, if the settings are those of a stored run; it then gets the added settings too.

    Raises:
        ValueError: a removed setting has another value than the constant, or a share of a frozen version is no share.
    """
    if not isinstance(tree, Mapping):
        return tree
    remaining = {section: dict(inner) if isinstance(inner, Mapping) else inner for section, inner in tree.items()}
    for name, constant in REMOVED.items():
        section, _, last = name.partition(".")
        inner = remaining.get(section)
        if not isinstance(inner, dict) or last not in inner:
            continue
        given = inner.pop(last)
        if given == constant:
            continue
        if not stored or name in _ROWS_AND_WEIGHTS:
            raise ValueError(f"{name} is no longer a setting: it is always {constant!r}, not {given!r}; leave it out")
        reporter().say(f"run '{stored}' was started with {name} {given!r}; it is always {constant!r} now")
    _move_frozen_version(remaining.get("rollouts"))
    for name, before in ADDED.items() if stored else ():
        section, _, last = name.partition(".")
        inner = remaining.setdefault(section, {})
        if isinstance(inner, dict):
            inner.setdefault(last, before)
    return remaining


def _move_frozen_version(rollouts: Any) -> None:
    """Write `frozen_share` and `frozen_version`, which are no longer settings, as weights of `opponents`; changes `rollouts`."""
    if not isinstance(rollouts, dict) or not {"frozen_share", "frozen_version"} & set(rollouts):
        return
    share, version = float(rollouts.pop("frozen_share", 0.0)), int(rollouts.pop("frozen_version", 0))
    table = read_table(rollouts.get("opponents", "random"))
    if not 0 <= share <= 1:
        raise ValueError(f"rollouts.frozen_share {share:g} is no longer a setting: write rollouts.opponents 'mover,v0'")
    if share:
        total = sum(weight for _, weight in table)
        others = [(name, weight / total * (1 - share)) for name, weight in table if share < 1]
        rollouts["opponents"] = table_text([*others, (f"v{version}", share)] if others else [(f"v{version}", 1.0)])
