"""What a run may lose again: which old adapters, checkpoints, W&B folders and left-over asides, and their removal.

Promises: the rule is pure and looks at facts alone; what cannot be read counts as needed; only names that Entente itself gives
are ever removed; a symbolic link is neither followed nor removed; a removed folder loses its name at once, so no reader meets
half of it.
Never: touch a shard (storage/retire.py may), a ledger, a score, a metric or a setting, or a run that a process is at work on.
"""

import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from storage.adapters import published_versions
from storage.files import name_aside
from storage.ledger import STEP_NAME, read_ledger_file
from storage.runs import RunPaths
from telemetry.errors import DataError

WANDB_DAYS = 30.0
"""Days after which a run's local W&B folders go: `wandb sync` has had its time, and metrics.jsonl holds the same figures."""
ASIDE_HOURS = 1.0
"""Hours after which an unfinished file counts as left behind by a killed process; nothing takes nearly so long to write."""
DAMAGED_DAYS = 30.0
"""Days after which files that were set aside as damaged go; until then someone may look at them."""
_DAY_S = 86_400.0
_CHECKPOINT = re.compile(r"step_(\d{6,})")
_ADAPTER = re.compile(r"v(\d{6,})")
_WANDB_RUN = re.compile(r"(offline-)?run-\d{8}_\d{6}-\w+|artifacts")
_ASIDES = (  # as storage/runs.py, telemetry/sinks.py, training/ and state_cache/ name them; a number is the maker's process
    re.compile(r"\..+\.(?P<maker>\d+)-[0-9a-f]{8}\.tmp"),
    re.compile(r"\.metrics\.jsonl\.tmp"),
    re.compile(r"\.step_\d{6,}\.writing"),
    re.compile(r"\.v-[0-9a-f]{12}-[0-9a-f]{8}"),
    re.compile(r"\.tiny-[0-9a-f]+\.(?P<maker>\d+)"),
)
_DAMAGED = re.compile(r"\..+\.damaged-[0-9a-f]{8}")


class RetentionSettings(BaseModel):
    """How long what grows is kept."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    keep_adapters: Annotated[int, Field(ge=1)] = 20
    """Newest adapters kept of each run; more than any engine serves at once, and a view of the last steps."""
    keep_adapter_every: Annotated[int, Field(ge=0)] = 25
    """Of the others, versions divisible by this keep their adapter, so that a curve of strength can be measured; 0: none."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept of a run that rests: one to go on from, one in case that it is damaged. A run at work keeps
    training.keep_checkpoints by itself."""
    shards_gb: Annotated[float, Field(ge=0)] = 0.0
    """Gigabytes that a run's shards may take; beyond that the oldest are given up, as far as the next three settings allow.
    0: all stay."""
    stale_versions: Annotated[int, Field(ge=0)] = 8
    """Versions beyond the staleness budget for which rows stay, whatever room they take."""
    replay_steps: Annotated[int, Field(ge=0)] = 100
    """Newest steps whose rows stay, whatever room they take, so that these steps can be replayed."""
    archive_shards: bool = False
    """Keep what is given up as compressed Parquet in `archive/`; without that the facts of its rows stay, and their tokens go."""
    shard_grace_hours: Annotated[float, Field(ge=0)] = 1.0
    """Hours between giving up a shard and removing it; somebody may still read it, over a network file system too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionFacts:
    """The facts of one run that the rule looks at."""

    adapters: frozenset[int]
    """Published versions."""
    checkpoints: frozenset[int]
    """Steps of whole checkpoints."""
    replayed: frozenset[int]
    """Versions in the rows of steps that a resumed run may repeat: those after the oldest checkpoint that is kept."""
    scored: frozenset[int]
    """Versions that a score of the run tells of."""
    frozen: frozenset[int] = frozenset()
    """The version that rollouts play against, where they play against one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removable:
    """Something that may go."""

    path: Path
    why: str
    """What it is, in a few words."""
    size: int
    """Bytes on disk, links not followed."""


def checkpoints_to_keep(steps: Collection[int], settings: RetentionSettings) -> frozenset[int]:
    """The newest ones."""
    return frozenset(sorted(steps)[-settings.keep_checkpoints :])


def adapters_to_keep(facts: RetentionFacts, settings: RetentionSettings) -> frozenset[int]:
    """The newest, the milestones, every version scored or played against, and whatever a resumed run may need."""
    versions = facts.adapters
    newest = frozenset(sorted(versions)[-settings.keep_adapters :])
    every = settings.keep_adapter_every
    milestones = frozenset(version for version in versions if every and version % every == 0)
    kept_checkpoints = checkpoints_to_keep(facts.checkpoints, settings)
    # A resumed run publishes its checkpoint's version again and trains on from there: all from the oldest one on stay.
    ahead = frozenset(version for version in versions if kept_checkpoints and version >= min(kept_checkpoints))
    return versions & (newest | milestones | ahead | facts.replayed | facts.scored | facts.frozen)


def whole_checkpoints(paths: RunPaths) -> list[int]:
    """Steps of the checkpoints that have a manifest, rising."""
    return sorted(_numbers(paths.checkpoints, _CHECKPOINT, whole="manifest.json"))


def retention_facts(paths: RunPaths, settings: RetentionSettings) -> RetentionFacts:
    """The facts of a run, read from its files.

    Raises:
        DataError: a ledger or score that says what is needed cannot be read; nobody can then say what may go.
    """
    checkpoints = frozenset(whole_checkpoints(paths))
    kept = checkpoints_to_keep(checkpoints, settings)
    oldest = min(kept, default=0)
    scores = (paths.scores, paths.scores / "track")
    return RetentionFacts(
        adapters=frozenset(published_versions(paths)),
        checkpoints=checkpoints,
        replayed=frozenset(version for ledger in _ledgers(paths, after=oldest) for version in _versions_in(ledger)),
        scored=frozenset(_scored_version(file) for folder in scores for file in _entries(folder) if file.suffix == ".json"),
        frozen=_frozen_version(paths),
    )


def removable_in_run(paths: RunPaths, settings: RetentionSettings, now: float | None = None) -> list[Removable]:
    """All that may go of a run which no process is at work on (the caller holds its lock).

    Raises:
        DataError: see `retention_facts`.
    """
    now = time.time() if now is None else now
    facts = retention_facts(paths, settings)
    kept_adapters, kept_checkpoints = adapters_to_keep(facts, settings), checkpoints_to_keep(facts.checkpoints, settings)
    found = [
        *_old(paths.adapters, _ADAPTER, kept_adapters, "adapter of an old version"),
        # Without its manifest it is no checkpoint: a kill came while it was removed.
        *_old(paths.checkpoints, _CHECKPOINT, kept_checkpoints, "old checkpoint"),
        *_aged(paths.root / "wandb", _WANDB_RUN, WANDB_DAYS * _DAY_S, now, "W&B's local folder"),
    ]
    for folder in _own_folders(paths):
        found += removable_asides(folder, settings, now)
    return found


def removable_asides(folder: Path, settings: RetentionSettings, now: float | None = None) -> list[Removable]:
    """What killed processes left unfinished directly in `folder`, and what was set aside there as damaged long ago."""
    now = time.time() if now is None else now
    why = "left unfinished by a killed process"
    unfinished = [found for pattern in _ASIDES for found in _aged(folder, pattern, ASIDE_HOURS * 3600, now, why)]
    return [*unfinished, *_aged(folder, _DAMAGED, DAMAGED_DAYS * _DAY_S, now, "set aside as damaged")]


def remove(found: Removable) -> None:
    """Remove it; it loses its name first, so that a kill meanwhile leaves an aside and never half of something whole."""
    path = found.path
    if _kind(path) == "file":
        path.unlink()
    elif _kind(path) == "folder":
        aside = name_aside(path)
        os.rename(path, aside)
        shutil.rmtree(aside)


def drop_old_adapters(paths: RunPaths, settings: RetentionSettings | None = None) -> int:
    """Apply the rule for adapters alone, for a run that is at work and whose process calls this; bytes that were freed.

    Raises:
        DataError: see `retention_facts`.
    """
    # All its checkpoints stay, so what any of them may need stays.
    settings = (settings or RetentionSettings()).model_copy(update={"keep_checkpoints": sys.maxsize})
    kept = adapters_to_keep(retention_facts(paths, settings), settings)
    gone = list(_old(paths.adapters, _ADAPTER, kept, "adapter of an old version"))
    for found in gone:
        remove(found)
    return sum(found.size for found in gone)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links count as nothing."""
    kind = _kind(path)
    if kind == "file":
        return path.lstat().st_size
    return sum(size_of(entry) for entry in _entries(path)) if kind == "folder" else 0


def is_folder(path: Path) -> bool:
    """It is a folder itself, and no link to one."""
    return _kind(path) == "folder"


def _old(folder: Path, pattern: re.Pattern[str], kept: Collection[int], why: str) -> Iterator[Removable]:
    for entry in _entries(folder):
        match = pattern.fullmatch(entry.name)
        if match and int(match[1]) not in kept and is_folder(entry):
            yield Removable(path=entry, why=why, size=size_of(entry))


def _aged(folder: Path, pattern: re.Pattern[str], age_s: float, now: float, why: str) -> Iterator[Removable]:
    for entry in _entries(folder):
        match = pattern.fullmatch(entry.name)
        if match is None or _kind(entry) == "other" or now - _last_touched(entry) < age_s:
            continue
        maker = match.groupdict().get("maker")
        if maker is None or not _lives(int(maker)):
            yield Removable(path=entry, why=why, size=size_of(entry))


def _own_folders(paths: RunPaths) -> list[Path]:
    """Folders of a run in which Entente writes under names of its own."""
    inner = [paths.adapters, paths.checkpoints, paths.scores, paths.index, paths.retired, paths.archive]
    deeper = [entry for folder in (paths.shards, paths.ledger, paths.archive) for entry in _entries(folder) if is_folder(entry)]
    return [paths.root, *inner, paths.shards, paths.ledger, *deeper]


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder; nothing where it is absent, or a link."""
    return sorted(folder.iterdir()) if is_folder(folder) else []


def _numbers(folder: Path, pattern: re.Pattern[str], whole: str) -> Iterator[int]:
    for entry in _entries(folder):
        match = pattern.fullmatch(entry.name)
        if match and (entry / whole).is_file():
            yield int(match[1])


def _ledgers(paths: RunPaths, after: int) -> Iterator[Path]:
    for lineage in _entries(paths.ledger):
        for entry in _entries(lineage):
            match = STEP_NAME.fullmatch(entry.name)
            if match and int(match[1]) > after:
                yield entry


def _versions_in(ledger: Path) -> set[int]:
    return set(read_ledger_file(ledger)["policy_version"].to_pylist())


def _scored_version(file: Path) -> int:
    try:
        return int(json.loads(file.read_bytes())["policy_version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} does not say which policy version it is of, so nobody knows which adapters may go") from error


def _frozen_version(paths: RunPaths) -> frozenset[int]:
    try:
        rollouts = json.loads(paths.settings.read_bytes()).get("rollouts", {})
    except FileNotFoundError:
        return frozenset()
    except (ValueError, AttributeError) as error:
        raise DataError(f"{paths.settings} is damaged, so nobody knows which adapters may go") from error
    return frozenset({int(rollouts["frozen_version"])} if rollouts.get("frozen_share") else ())


def _kind(path: Path) -> str:
    """ "file", "folder", or "other" for links, for what is special, and for what is absent."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return "other"
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def _last_touched(path: Path) -> float:
    """When it, or anything below it, was last written."""
    own = path.lstat().st_mtime
    return max([own, *(_last_touched(entry) for entry in _entries(path))])


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
