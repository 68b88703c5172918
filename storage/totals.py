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


@dataclass(frozen=True, slots=True, kw_only=True)
class Eligible:
    """How much a step could train on."""

    start_groups: int
    """Start groups with an eligible advantage group."""
    advantage_groups: int
    expired: int
    """Advantage groups of the whole run that became too old untrained, though their returns had spread."""
