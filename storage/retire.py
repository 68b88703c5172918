"""Removes old shards so that a run's disk does not fill.

No shard is removed while the run's shards fit `retention.shards_gb`. Then the oldest go first, and only those whose rows all lie
beyond the staleness budget and that no ledger of a step names which may be replayed or repeated. A shard goes before its plies: a
reader that has it mapped keeps it, and a call that is killed between the two leaves plies without a shard, which the next one
removes.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from storage.files import file_marks, folders_in, names_in
from storage.ledger import last_step, read_ledger, recorded_steps
from storage.ledger_copies import checkpoint_steps
from storage.retention import ASIDE_HOURS, Removable, RetentionSettings
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.shards import NO_ROWS, SHARD_NAME, read_shard_metadata, shard_names
from telemetry.errors import DataError

STALE_VERSIONS = 8
"""Policy versions beyond the staleness budget for which rows are kept in any case, for a reader of recent rows."""
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
        checkpoints = checkpoint_steps(paths)
        return cls(
            policy_version=max(checkpoints, default=0),
            oldest_checkpoint=min(checkpoints, default=0),
            max_policy_lag=storage.max_policy_lag,
        )


def newest_versions(paths: RunPaths) -> dict[str, int]:
    """The newest policy version of each shard, by name. Those with damaged metadata are left out."""
    found = {}
    for name in shard_names(paths):
        try:
            found[name] = read_shard_metadata(paths.shards / name).newest_version
        except DataError:
            continue  # it stays
    return found


def removable_shards(
    paths: RunPaths, newest: Mapping[str, int], age: RunAge, settings: RetentionSettings, now: float | None = None
) -> list[Removable]:
    """Files of shards to remove now, those of the oldest policy first.

    Args:
        newest: see `newest_versions`.
    """
    if settings.shards_gb == 0:
        return []
    files = dict(_files_by_shard(paths))
    over = sum(file.size for some in files.values() for file in some) - settings.shards_gb * _GB
    going = _left_alone(files, time.time() if now is None else now)
    over -= sum(file.size for file in going)
    behind = age.policy_version - age.max_policy_lag - STALE_VERSIONS
    old = sorted((version, name) for name, version in newest.items() if NO_ROWS < version < behind and name in files)
    if over <= 0 or not old:
        return going
    needed = _named_after(paths, min(last_step(paths) - settings.replay_steps, age.oldest_checkpoint))
    for _, name in old:
        if over <= 0:
            break
        if name not in needed:
            going += files[name]
            over -= sum(file.size for file in files[name])
    return going


def retire(paths: RunPaths, newest: Mapping[str, int], age: RunAge, settings: RetentionSettings) -> int:
    """Remove what `removable_shards` names; returns the bytes freed. Only the process that works on the run may call this."""
    going = removable_shards(paths, newest, age, settings)
    for file in going:
        file.path.unlink(missing_ok=True)
    return sum(file.size for file in going)


def _files_by_shard(paths: RunPaths) -> Iterator[tuple[str, list[Removable]]]:
    """Each shard's name, and its files: the shard itself first, if it is there, then its plies."""
    for producer in folders_in(paths.shards):
        by_stem: dict[str, list[str]] = {}
        for name in sorted(names_in(paths.shards / producer), key=lambda name: (not SHARD_NAME.fullmatch(name), name)):
            by_stem.setdefault(name.partition(".")[0], []).append(name)
        for stem, names in by_stem.items():
            places = [paths.shards / producer / name for name in names]
            why = "shard too old to train on"
            found = [Removable(path=path, why=why, size=(file_marks(path) or (0, 0))[0]) for path in places]
            yield f"{producer}/{stem}.arrow", found


def _left_alone(files: Mapping[str, list[Removable]], now: float) -> list[Removable]:
    """Old plies without a shard. New ones may belong to a shard that is being published."""
    without = [some for name, some in files.items() if not name.endswith(some[0].path.name)]
    return [
        replace(file, why="plies without a shard")
        for some in without
        for file in some
        if (marks := file_marks(file.path)) and now - marks[1] / 1e9 > ASIDE_HOURS * 3600
    ]


def _named_after(paths: RunPaths, step: int) -> set[str]:
    """The shards that ledgers of later steps name."""
    ledgers = (read_ledger(paths, each) for each in recorded_steps(paths) if each > step)
    return {shard for ledger in ledgers if ledger is not None for shard in ledger["shard"].unique().to_pylist()}
