"""Counts over a run. Separate from the index, so that a process that only passes them on does not load DuckDB."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts over the rows of a run."""

    decisions: int
    orders_rejected: int
    max_policy_lag: int
    """Maximum over all rows that were trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eligible:
    """How much a step could train on."""

    start_groups: int
    """Start groups with an eligible advantage group."""
    advantage_groups: int
    expired: int
    """Advantage groups of the whole run that had spread and became too old before they were used."""
