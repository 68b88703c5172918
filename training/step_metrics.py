"""What a step reports of itself: figures over its branching tokens, and over the rows that it was given.

Never: compute a loss, or touch a weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from storage.gather import Batch
from storage.outcome import UpdateOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimiser update."""

    outcome: UpdateOutcome
    skipped: bool
    """Its loss or gradient was not finite, and the weights stayed as they were."""
    gauges: np.ndarray
    """float32 [6, branching tokens]: ratio, clipped low, clipped high, left out, entropy, legal mass."""


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Quantiles and shares over the branching tokens of all updates."""
    if not updates:
        return {"train/skipped": 1.0, "train/branching_tokens": 0.0}
    gauges = np.concatenate([update.gauges for update in updates], axis=1)
    ratio, low, high, left_out, entropy, mass = gauges.astype(np.float64)
    off = np.abs(ratio - 1)
    return {
        "train/loss": float(np.mean([update.outcome.loss for update in updates])),
        "train/gradient_norm": float(np.max([update.outcome.gradient_norm for update in updates])),
        "train/skipped": float(np.mean([update.skipped for update in updates])),
        "train/branching_tokens": float(ratio.size),
        "train/ratio_off_p50": float(np.quantile(off, 0.5)),
        "train/ratio_off_p99": float(np.quantile(off, 0.99)),
        "train/ratio_off_max": float(off.max()),
        "train/clipped_low_share": float(low.mean()),
        "train/clipped_high_share": float(high.mean()),
        "train/left_out_share": float(left_out.mean()),
        "train/entropy": float(entropy.mean()),
        "train/legal_mass_p10": float(np.quantile(mass, 0.1)),
        "train/legal_mass_p50": float(np.quantile(mass, 0.5)),
    }


def selection_metrics(rows: pa.Table, counts: dict[str, int], batch: Batch) -> dict[str, float]:
    """Figures of the rows that a step uses; `counts` are those of the selection, none where it is repeated."""
    lag = np.asarray(rows.column("policy_lag"))
    return {
        "train/decisions": float(rows.num_rows),
        "train/tokens": float(len(batch.input_ids)),
        "train/return_mean": float(batch.returns.mean()) if len(batch.returns) else 0.0,
        "train/policy_lag_p50": float(np.quantile(lag, 0.5)) if len(lag) else 0.0,
        "train/policy_lag_max": float(lag.max()) if len(lag) else 0.0,
    } | {f"train/groups_{name}": float(count) for name, count in counts.items()}
