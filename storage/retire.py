"""Retires old shards so that a run's disk does not fill: choose (`retirable`), publish a tombstone, remove.

No shard is retired while the run's shards fit `retention.shards_gb`. Then the oldest come first, and only those with rows
beyond the staleness budget and its grace that no ledger in the replay window names. The facts of their rows stay in a
tombstone. After a crash at any point the next call continues, and nothing that should stay is
lost.
"""

from dataclasses import dataclass

from storage.index import Index, open_index
from storage.ledger import read_ledger, recorded_steps
from storage.retention import Removable, RetentionSettings, whole_checkpoints
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.snapshots import NO_ROWS, CoveredShard
from storage.tombstones import bytes_of, files_of, files_to_remove, publish_tombstone, remove_retired_files, shard_bytes

STALE_VERSIONS = 8
"""Policy versions beyond the staleness budget for which rows are kept in any case, for a reader of recent rows."""
GRACE_HOURS = 1.0
"""Hours between the decision to remove a shard and its removal: a reader may still use it."""
_GB = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAge:
    """How far a run has come, to judge the age of its rows."""

    policy_version: int
    """The version that its trainer holds."""
    oldest_checkpoint: int
    """Step of the oldest checkpoint from which it may resume."""
    max_policy_lag: int
    """Largest lag of a row that a step may use, versions."""

    @classmethod
    def of(cls, paths: RunPaths, storage: StorageSettings) -> "RunAge":
        """The age of a run by its checkpoints."""
        checkpoints = whole_checkpoints(paths)
        return cls(
            policy_version=max(checkpoints, default=0),
            oldest_checkpoint=min(checkpoints, default=0),
            max_policy_lag=storage.max_policy_lag,
        )


def retirable(paths: RunPaths, index: Index, age: RunAge, settings: RetentionSettings) -> list[CoveredShard]:
    """Shards to retire now, those of the oldest policy first; `index` must be up to date.

    Only shards whose rows are not needed any more: all of them lie behind the staleness budget and its grace, and no ledger
    names one of a step that may be replayed or repeated.
    """
    if settings.shards_gb == 0:
        return []
    over = shard_bytes(paths) - bytes_of(files_of(paths, index.retired())) - settings.shards_gb * _GB
    behind = age.policy_version - age.max_policy_lag - STALE_VERSIONS
    old = [shard for shard in index.live() if NO_ROWS < shard.newest_version < behind]
    if over <= 0 or not old:
        return []
    needed = _named_after(paths, min(index.newest_step() - settings.replay_steps, age.oldest_checkpoint))
    going = []
    for shard in sorted(old, key=lambda shard: (shard.newest_version, min(shard.start_groups), shard.name)):
        if over <= 0:
            break
        if shard.name not in needed:
            going.append(shard)
            over -= bytes_of(files_of(paths, [shard]))
    return going


def _named_after(paths: RunPaths, step: int) -> set[str]:
    """The shards that ledgers of later steps name."""
    ledgers = (read_ledger(paths, each) for each in recorded_steps(paths) if each > step)
    return {shard for ledger in ledgers if ledger is not None for shard in ledger["shard"].unique().to_pylist()}


def preview_retirement(
    paths: RunPaths, storage: StorageSettings, settings: RetentionSettings
) -> tuple[list[Removable], list[Removable]]:
    """What `retire` would do now: (files to remove now, files of shards to retire, which are removed later).

    For a run that is not in use.
    """
    retired = files_to_remove(paths, GRACE_HOURS * 3600)
    now = [Removable(path=path, why="shard retired before", size=bytes_of([path])) for path in retired]
    if settings.shards_gb == 0:
        return now, []
    index = open_index(paths)
    shards = retirable(paths, index, RunAge.of(paths, storage), settings)
    why = "shard too old to train on"
    files = [Removable(path=path, why=why, size=bytes_of([path])) for path in files_of(paths, shards)]
    return now, files


def retire(paths: RunPaths, index: Index, age: RunAge, settings: RetentionSettings) -> int:
    """Retire shards if necessary, and remove those retired long enough ago; returns the bytes freed.

    Only the process that works on the run may call this.
    """
    index.refresh()
    going = retirable(paths, index, age, settings)
    if going and (facts := index.snapshot_of(going)).shards:
        publish_tombstone(paths, facts)
        index.refresh()
    return remove_retired_files(paths, GRACE_HOURS * 3600)
