"""Settings that earlier versions had and that nobody should turn: constants now, each beside the code that uses it.

A file, a deployment or a stored run may still name one with the value that is fixed now. Another value is refused in one
sentence; a run that exists opens all the same, with a sentence, where neither its rows nor its weights depend on it.
"""

from collections.abc import Mapping
from typing import Any

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
"""Dotted name -> the value that is fixed now."""
_SHAPED = frozenset(
    {"storage.balance_powers", "storage.freshness", "storage.min_spread", "training.outlier_high", "training.outlier_low"}
)
"""Those that a run's steps depend on."""


def without_removed(tree: Any, *, stored: str = "") -> Any:
    """Settings as a mapping, without those that were removed; what is no mapping stays as it is.

    Args:
        stored: the run that they are of, where they were stored with it.

    Raises:
        ValueError: one has another value than the one that is fixed now.
    """
    if not isinstance(tree, Mapping):
        return tree
    left = {section: dict(inner) if isinstance(inner, Mapping) else inner for section, inner in tree.items()}
    for name, fixed in REMOVED.items():
        section, _, last = name.partition(".")
        inner = left.get(section)
        if not isinstance(inner, dict) or last not in inner:
            continue
        given = inner.pop(last)
        if given == fixed:
            continue
        if not stored or name in _SHAPED:
            raise ValueError(f"{name} is no setting any more: it is {fixed!r} always, not {given!r}; leave it out")
        reporter().say(f"run '{stored}' was begun with {name} {given!r}, which is {fixed!r} always by now")
    return left
