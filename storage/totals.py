"""What a run has done so far, in three figures. Apart from the index that counts them, so that a process which only passes
them on need not load DuckDB.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a run has done so far, by its files."""

    decisions: int
    orders_rejected: int
    max_policy_lag: int
    """Over all rows that were trained on."""
