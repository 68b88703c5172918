"""Which shards a run gives up so that its disk does not fill, and how: a rule (``retirable.sql``), archive, tombstone, removal.

Promise: nothing goes while the run's shards fit their budget; then the oldest go first, and only those whose rows lie beyond the
staleness budget and its grace and that no ledger in the replay window names. Their facts stay in a tombstone; with an archive all
of them stays. A crash anywhere loses nothing that was to stay, and the next call goes on.
Never: touch a ledger, or a shard that cannot be read.
"""

from dataclasses import dataclass
from pathlib import Path

from storage.archive import archive_shard
from storage.index import Index
from storage.retention import Removable, RetentionSettings, whole_checkpoints
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.snapshots import CoveredShard
from storage.tombstones import bury, bytes_of, due, files_of, publish_tombstone, shard_bytes
from telemetry.errors import DataError

_SQL = Path(__file__).with_name("retirable.sql").read_text()
_GB = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAge:
    """How far a run has come: what its old rows are old against."""

    policy_version: int
    """The version that its trainer holds."""
    oldest_checkpoint: int
    """Step of the oldest checkpoint that it may go on from."""
    max_policy_lag: int
    """The furthest that a step may reach back, versions."""

    @classmethod
    def of(cls, paths: RunPaths, storage: StorageSettings) -> "RunAge":
        """Of a run as its checkpoints stand."""
        checkpoints = whole_checkpoints(paths)
        return cls(
            policy_version=max(checkpoints, default=0),
            oldest_checkpoint=min(checkpoints, default=0),
            max_policy_lag=max(storage.max_policy_lag, storage.hard_policy_lag),
        )


def retirable(paths: RunPaths, index: Index, age: RunAge, settings: RetentionSettings) -> list[CoveredShard]:
    """Shards that are to go now, oldest first; ``index`` is up to date."""
    if settings.shards_gb == 0:
        return []
    over = shard_bytes(paths) - bytes_of(files_of(paths, index.retired())) - settings.shards_gb * _GB
    ((newest,),) = index.answers("SELECT coalesce(max(step), 0) FROM batches")
    values = {
        "policy_version": age.policy_version,
        "behind": age.max_policy_lag + settings.stale_versions,
        "replay_from": min(int(newest) - settings.replay_steps, age.oldest_checkpoint),
    }
    going = []
    for (name,) in index.answers(_SQL, values):
        if over <= 0:
            break
        if (shard := index.holds(name)) is not None:
            going.append(shard)
            over -= bytes_of(files_of(paths, [shard]))
    return going


def to_be_given_up(
    paths: RunPaths, storage: StorageSettings, settings: RetentionSettings
) -> tuple[list[Removable], list[Removable]]:
    """What `retire` would do now with a run at rest: files that would go, and those of shards to be given up, that go later."""
    now = [Removable(path=path, why="shard given up before", size=bytes_of([path])) for path in due(paths, _grace_s(settings))]
    if settings.shards_gb == 0:
        return now, []
    index = Index(paths)
    index.refresh()
    shards = retirable(paths, index, RunAge.of(paths, storage), settings)
    why = "shard too old to train on"
    files = [Removable(path=path, why=why, size=bytes_of([path])) for path in files_of(paths, shards)]
    return ([*now, *files], []) if settings.shard_grace_hours == 0 else (now, files)


def retire(paths: RunPaths, index: Index, age: RunAge, settings: RetentionSettings) -> int:
    """Give up what has to go, and remove what was given up long enough ago; bytes that were freed.

    For the one process that is at work on the run.
    """
    index.refresh()
    going = []
    for shard in retirable(paths, index, age, settings):
        try:
            if settings.archive_shards:
                archive_shard(paths, shard.name)
        except DataError:
            continue  # damaged: it stays until somebody has looked at it
        going.append(shard)
    if going:
        publish_tombstone(paths, index.facts_of(going))
        index.refresh()
    return bury(paths, _grace_s(settings))


def _grace_s(settings: RetentionSettings) -> float:
    return settings.shard_grace_hours * 3600
