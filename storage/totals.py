"""Counts over a run, from the metadata of its shards and from its ledgers. Nothing here loads DuckDB."""

from dataclasses import dataclass

from entente.telemetry.errors import DataError
from storage.ledger import ledger_path, read_ledger_file, recorded_steps
from storage.runs import RunPaths
from storage.shards import read_shard_metadata, shard_names


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
    """Advantage groups that had spread and became too old before they were used, since the index was opened."""


def count_run(paths: RunPaths) -> Totals:
    """Counts over the shards that are there and over all ledgers. A shard with damaged metadata counts nothing."""
    decisions = orders_rejected = lag = 0
    for name in shard_names(paths):
        try:
            shard = read_shard_metadata(paths.shards / name)
        except DataError:
            continue
        decisions, orders_rejected = decisions + shard.decisions, orders_rejected + shard.orders_rejected
    for step in recorded_steps(paths):
        lag = max(lag, int(read_ledger_file(ledger_path(paths, step))["policy_lag"].to_numpy().max(initial=0)))
    return Totals(decisions=decisions, orders_rejected=orders_rejected, max_policy_lag=lag)
