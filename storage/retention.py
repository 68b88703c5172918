"""What may be deleted from a run: old shards, adapters and checkpoints, W&B folders, and unfinished or damaged files.

A pure function of facts. Unreadable files are kept, with all that they might need. Only names that Entente uses are removed;
symbolic links are neither followed nor removed. A folder is renamed before removal, so no reader sees half of it. Ledgers,
scores, metrics and settings always stay, and in a run in use everything except shards and adapters.

Shards stay while they fit `retention.shards_gb`. Beyond that the oldest go first, if all their rows exceed the staleness
budget and no ledger of the newest steps or of a step to repeat names them. A shard goes before its phases file; a kill in between
leaves phases without a shard, which the next call removes.
"""

import json
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from entente.telemetry.errors import DataError
from entente.telemetry.setting_marks import Settings
from storage.adapters import published_versions
from storage.files import Entry, entries_in, file_marks, folders_in, names_in, remove_folder
from storage.league_files import LEAGUE_EVERY, RECENT_STEPS
from storage.ledger import last_step, ledgers_after
from storage.runs import ADAPTER_NAME, CHECKPOINT_NAME, RunPaths, checkpoint_steps
from storage.settings import StorageSettings
from storage.shards import NO_ROWS, SHARD_NAME, readable_shards

WANDB_DAYS = 30.0
"""Days after which local W&B folders are removed; by then `wandb sync` has run, and metrics.jsonl has the same values."""
ASIDE_HOURS = 1.0
"""Hours after which an unfinished file counts as left by a killed process; writing takes far less time."""
DAMAGED_DAYS = 30.0
"""Days for which files set aside as damaged are kept for inspection."""
MILESTONE_EVERY = 25
"""Older adapters are kept if this divides their version, so that strength can be measured over time."""
RESTING_CHECKPOINTS = 2
"""Newest checkpoints kept of a run that is not in use: the second is for a damaged first."""
STALE_VERSIONS = RECENT_STEPS
"""Policy versions beyond the staleness budget whose rows are always kept: a league counts their forks, also in shards that no
step trained on."""
REPLAY_STEPS = 100
"""Newest steps whose rows are always kept, to look at. A replay also needs those of all steps since its checkpoint."""
GB = 1_000_000_000
_DAY_S = 86_400.0
_WANDB_RUN = re.compile(r"(offline-)?run-\d{8}_\d{6}-\w+|artifacts")
_ASIDES = (  # names from storage/files.py, entente/decoding/, telemetry/sinks.py and training/; maker: process id
    re.compile(r"\..+\.(?P<maker>\d{1,9})-[0-9a-f]{8}\.tmp"),
    re.compile(r"\.metrics\.jsonl\.tmp"),
    re.compile(r"\.step_\d{6,}\.writing"),
)
_SHARD_FILE = re.compile(r"\d{6,}(\.[0-9a-f]{8}\.phases)?\.arrow")
_DAMAGED = re.compile(r"\..+\.damaged-[0-9a-f]{8}")


class RetentionSettings(Settings):
    """How long old files of a run are kept."""

    keep_adapters: Annotated[int, Field(ge=1)] = 20
    """Newest adapters kept of each run."""
    shards_gb: Annotated[float, Field(ge=0)] = 0.0
    """Gigabytes for a run's shards; beyond that, the oldest that no step can need are removed. 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionFacts:
    adapters: frozenset[int]
    checkpoints: frozenset[int]
    replayed: frozenset[int]
    """Versions in the ledgers of steps that a resumed run may repeat: those after the oldest kept checkpoint."""
    scored: frozenset[int]
    league: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Removable:
    path: Path
    why: str
    size: int
    """Bytes on disk, without the targets of links."""
    is_folder: bool = False


def adapters_to_keep(facts: RetentionFacts, settings: RetentionSettings) -> frozenset[int]:
    """The newest versions, the milestones, those scored or in the league, and those that a resumed run may need."""
    versions = facts.adapters
    newest = frozenset(sorted(versions)[-settings.keep_adapters :])
    milestones = frozenset(version for version in versions if version % MILESTONE_EVERY == 0)
    # A resumed run publishes its checkpoint's version again and continues from there, so all versions from the oldest on stay.
    ahead = frozenset(version for version in versions if facts.checkpoints and version >= min(facts.checkpoints))
    return versions & (newest | milestones | ahead | facts.replayed | facts.scored | facts.league)


def retention_facts(paths: RunPaths, kept: Collection[int]) -> RetentionFacts:
    """The facts of a run that keeps the checkpoints `kept`; raises DataError if a ledger or score is unreadable, so needs are
    unknown."""
    oldest = min(kept, default=0)
    scores = (paths.scores, paths.track)
    published = frozenset(published_versions(paths))
    return RetentionFacts(
        adapters=published,
        checkpoints=frozenset(kept),
        replayed=frozenset(
            version for ledger in ledgers_after(paths, oldest) for version in ledger["policy_version"].to_pylist()
        ),
        scored=frozenset(
            _scored_version(folder / name) for folder in scores for name in names_in(folder) if name.endswith(".json")
        ),
        league=_league(paths, published),
    )


def removable_in_run(paths: RunPaths, settings: RetentionSettings, now: float | None = None) -> list[Removable]:
    """What may be removed from a run that is not in use; the caller holds its lock. Without `settings.keep_adapters` the run's
    own counts."""
    now = time.time() if now is None else now
    kept_checkpoints = checkpoint_steps(paths)[-RESTING_CHECKPOINTS:]
    if "keep_adapters" not in settings.model_fields_set:
        settings = settings.model_copy(update=_section(paths, "retention"))
    kept_adapters = adapters_to_keep(retention_facts(paths, kept_checkpoints), settings)
    removable = [
        *_old(entries_in(paths.adapters), ADAPTER_NAME, kept_adapters, "adapter of an old version"),
        # A folder without a manifest is left from an interrupted removal.
        *_old(entries_in(paths.checkpoints), CHECKPOINT_NAME, kept_checkpoints, "old checkpoint"),
        *_aged(paths.root / "wandb", _WANDB_RUN, WANDB_DAYS * _DAY_S, now, "W&B's local folder"),
    ]
    for folder in _own_folders(paths):
        removable += removable_asides(folder, now)
    return removable


def removable_asides(folder: Path, now: float | None = None) -> list[Removable]:
    """Unfinished files of killed processes and old damaged files, directly in `folder`."""
    now = time.time() if now is None else now
    why = "left unfinished by a killed process"
    unfinished = [each for pattern in _ASIDES for each in _aged(folder, pattern, ASIDE_HOURS * 3600, now, why)]
    return [*unfinished, *_aged(folder, _DAMAGED, DAMAGED_DAYS * _DAY_S, now, "set aside as damaged")]


def remove(removable: Removable) -> None:
    """A folder is renamed first, so a killed removal leaves no partial folder under its name."""
    if removable.is_folder:
        remove_folder(removable.path)
    else:
        removable.path.unlink(missing_ok=True)


def drop_old_adapters(paths: RunPaths, settings: RetentionSettings) -> int:
    """Remove old adapters of the run of this process; returns the bytes freed."""
    # Listed before the facts: the trainer may publish a version meanwhile, which they would not know.
    listed = entries_in(paths.adapters)
    # A run in use keeps all its checkpoints here, and what they need.
    kept = adapters_to_keep(retention_facts(paths, checkpoint_steps(paths)), settings)
    gone = list(_old(listed, ADAPTER_NAME, kept, "adapter of an old version"))
    for each in gone:
        remove(each)
    return sum(each.size for each in gone)


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder, without links; 0 without the folder."""
    return 0 if folder.is_symlink() else Entry(path=folder, is_folder=True).size()


def _removable(entry: Entry, why: str) -> Removable:
    return Removable(path=entry.path, why=why, size=entry.size(), is_folder=entry.is_folder)


def _old(entries: Iterable[Entry], pattern: re.Pattern[str], kept: Collection[int], why: str) -> Iterator[Removable]:
    for entry in entries:
        match = pattern.fullmatch(entry.path.name)
        if match and int(match[1]) not in kept and entry.is_folder:
            yield _removable(entry, why)


def _aged(folder: Path, pattern: re.Pattern[str], age_s: float, now: float, why: str) -> Iterator[Removable]:
    for entry in entries_in(folder):
        match = pattern.fullmatch(entry.path.name)
        if match is None or now - entry.touched() < age_s:
            continue
        maker = match.groupdict().get("maker")
        if maker is None or not _exists(int(maker)):
            yield _removable(entry, why)


def _exists(pid: int) -> bool:
    """Whether there is such a process, also one of another user, which /proc may hide (hidepid)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _own_folders(paths: RunPaths) -> list[Path]:
    inner = [paths.adapters, paths.checkpoints, paths.scores, paths.track, paths.matches, paths.ledger, paths.shards]
    by_producer = [folder / producer for folder in (paths.shards, paths.league) for producer in folders_in(folder)]
    return [paths.root, *inner, *by_producer]


def _scored_version(file: Path) -> int:
    try:
        return int(json.loads(file.read_bytes())["policy_version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} does not name its policy version, so it is unknown which adapters may be removed") from error


def _league(paths: RunPaths, published: frozenset[int]) -> frozenset[int]:
    names = [part.partition("*")[0].strip() for part in str(_section(paths, "rollouts").get("opponents", "")).split(",")]
    return frozenset(version for version in published if version % LEAGUE_EVERY == 0) if "league" in names else frozenset()


def _section(paths: RunPaths, name: str) -> dict[str, Any]:
    """Of the run's stored settings, also those of another release."""
    try:
        return dict(json.loads(paths.settings.read_bytes()).get(name, {}))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{paths.settings} is damaged, so it is unknown which adapters may be removed") from error


# -- shards ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAge:
    """How far a run has come, which decides the age of its rows."""

    policy_version: int
    oldest_checkpoint: int
    """Step of the oldest checkpoint from which the run may resume."""
    max_policy_lag: int
    """Largest lag of a row that a step may use, versions."""

    @classmethod
    def of(cls, paths: RunPaths, storage: StorageSettings) -> "RunAge":
        checkpoints = checkpoint_steps(paths)
        return cls(
            policy_version=max(checkpoints, default=0),
            oldest_checkpoint=min(checkpoints, default=0),
            max_policy_lag=storage.max_policy_lag,
        )


def newest_versions(paths: RunPaths) -> dict[str, int]:
    """Newest policy version of each shard, by name, without shards that have damaged metadata, so these stay."""
    return {name: shard.newest_version for name, shard in readable_shards(paths)}


def removable_shards(paths: RunPaths, newest: Mapping[str, int], age: RunAge, settings: RetentionSettings) -> list[Removable]:
    """Files of shards to remove now, oldest policy first; `newest` as from `newest_versions`."""
    if settings.shards_gb == 0:
        return []
    files = dict(_files_by_shard(paths))
    over = sum(file.size for some in files.values() for file in some) - settings.shards_gb * GB
    going = _left_alone(files)
    over -= sum(file.size for file in going)
    behind = age.policy_version - age.max_policy_lag - STALE_VERSIONS
    old = sorted((version, name) for name, version in newest.items() if NO_ROWS < version < behind and name in files)
    if over <= 0 or not old:
        return going
    before = min(last_step(paths) - REPLAY_STEPS, age.oldest_checkpoint)
    needed = {shard for ledger in ledgers_after(paths, before) for shard in ledger["shard"].unique().to_pylist()}
    for _, name in old:
        if over <= 0:
            break
        if name not in needed:
            going += files[name]
            over -= sum(file.size for file in files[name])
    return going


def retire(paths: RunPaths, newest: Mapping[str, int], age: RunAge, settings: RetentionSettings) -> int:
    """Remove `removable_shards`; returns the bytes freed. Only the process that works on the run may call this."""
    going = removable_shards(paths, newest, age, settings)
    for file in going:
        file.path.unlink(missing_ok=True)
    return sum(file.size for file in going)


def _files_by_shard(paths: RunPaths) -> Iterator[tuple[str, list[Removable]]]:
    """Each shard's name and files: the shard itself first, if present, then its phases file."""
    for producer in entries_in(paths.shards):
        by_stem: dict[str, list[Path]] = {}
        files = [entry.path for entry in entries_in(producer.path) if _SHARD_FILE.fullmatch(entry.path.name)]
        for path in sorted(files, key=lambda path: (not SHARD_NAME.fullmatch(path.name), path.name)):
            by_stem.setdefault(path.name.partition(".")[0], []).append(path)
        for stem, places in by_stem.items():
            why = "shard too old to train on"
            files_of_shard = [Removable(path=path, why=why, size=(file_marks(path) or (0, 0))[0]) for path in places]
            yield f"{producer.path.name}/{stem}.arrow", files_of_shard


def _left_alone(files: Mapping[str, list[Removable]]) -> list[Removable]:
    """Old phases files without a shard. New ones may belong to a shard that is being published."""
    without = [some for name, some in files.items() if not name.endswith(some[0].path.name)]
    return [
        replace(file, why="phases without a shard")
        for some in without
        for file in some
        if (marks := file_marks(file.path)) and time.time() - marks[1] / 1e9 > ASIDE_HOURS * 3600
    ]
