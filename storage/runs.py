"""Paths of a run's files, and the choice of a run."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from entente.telemetry.errors import InputError
from storage.files import check_writable, folders_in, make_directory

CACHE_FOLDER, MODEL_FOLDER, MATCH_FOLDER, GAMES_FOLDER = "_state_cache", "_models", "_matches", "_games"
"""Folders beside the runs: state caches, generated models, matches without a version of a run, and games in the browser."""
LATEST = "latest"
"""Means the run that last started or wrote metrics. No run has this name."""
_TAKEN = {LATEST: "the run that wrote last", "newest": "the run that trained last, and the newest refresh of a state cache"}
"""Names with a meaning of their own, which no new run takes."""
_MAX_NAME = 100  # longer file names that contain it stay within the 255 bytes of common file systems
_URL = re.compile(r"[a-z][a-z0-9+.-]*:/")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
ADAPTER_NAME, CHECKPOINT_NAME = re.compile(r"v(\d{6,})"), re.compile(r"step_(\d{6,})")
"""Names of `RunPaths.adapter` and `RunPaths.checkpoint`; group 1 is the number."""
CHECKPOINT_MANIFEST = "manifest.json"
"""The file of a checkpoint that is written last."""


class _Below:
    def __init__(self, place: str) -> None:
        self._place = place

    def __get__(self, run: "RunPaths", owner: type) -> Path:
        return run.root / self._place


@dataclass(frozen=True, slots=True)
class RunPaths:
    root: Path
    """The run's folder, runs/<name>."""

    settings = _Below("settings.json")
    shards = _Below("shards")
    ledger = _Below("ledger")
    adapters = _Below("adapters")
    checkpoints = _Below("checkpoints")
    metrics = _Below("metrics.jsonl")
    devices = _Below("devices.jsonl")
    alerts = _Below("alerts.jsonl")
    base = _Below("base.json")
    control = _Below("control.json")
    recovery = _Below("recovery.json")
    league = _Below("league")
    answers = _Below("answers.jsonl")
    scores = _Below("scores")
    track = _Below("scores/track")
    matches = _Below("scores/matches")
    summary = _Below("summary.json")
    lock = _Below(".lock")
    trainer_lock = _Below(".trainer.lock")
    environment = _Below("environment.json")
    trainer_log = _Below("trainer.log")
    vllm_log = _Below("vllm.log")

    def adapter(self, version: int) -> Path:
        return self.adapters / f"v{version:06d}"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def create(self) -> "RunPaths":
        for folder in (self.shards, self.ledger, self.adapters, self.checkpoints, self.scores):
            make_directory(folder)
        return self


def numbers_in(names: Iterable[str], pattern: re.Pattern[str]) -> list[int]:
    return sorted({int(match[1]) for name in names if (match := pattern.fullmatch(name))})


def checkpoint_steps(paths: RunPaths) -> list[int]:
    """Steps of the checkpoints that have a manifest, ascending."""
    steps = numbers_in(folders_in(paths.checkpoints), CHECKPOINT_NAME)
    return [step for step in steps if (paths.checkpoint(step) / CHECKPOINT_MANIFEST).exists()]


def hashes_file(runs_root: Path) -> Path:
    return runs_root / MODEL_FOLDER / "hashes.json"


def matches_folder(run: str, runs_root: Path) -> Path:
    """Folder of the matches of a run; with an empty `run`, of those without a run."""
    return RunPaths(runs_root / run).matches if run else runs_root / MATCH_FOLDER


def check_name(name: str, what: str) -> str:
    """Return `name` if it can name a folder inside the run; `what` is the noun for the message, e.g. "The producer"."""
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise InputError(
            f"{what} {name[:_MAX_NAME]!r} cannot name a folder; use letters, digits, '_', '-' and '.', "
            f"at most {_MAX_NAME} of them, and start with a letter or digit."
        )
    return name


def check_run_name(name: str) -> str:
    """Return `name` if a run can have it; raises InputError if it cannot name a folder, or selects another run."""
    if name in _TAKEN:
        raise InputError(f"a run cannot be named '{name}', which selects {_TAKEN[name]}: choose another name")
    return check_name(name, "run")


def check_runs_root(folder: Path, run: str = "") -> None:
    """Check that runs can be written below a folder of runs, or into the folder of one `run`."""
    if _URL.match(str(folder)):
        raise InputError(
            f"'{folder}' is a URL, but runs are stored in folders: mount the store, or copy the run, and pass that folder"
        )
    if str(folder).startswith("~"):
        raise InputError(
            f"'{folder}' would be a folder named '{folder.parts[0]}' here, because only a shell puts your home in its place: "
            "write the whole path"
        )
    check_writable(folder / run, "--runs-root")


def run_names(runs_root: Path) -> list[str]:
    return [name for name in folders_in(runs_root) if not name.startswith("_")]


def runs_in(runs_root: Path) -> list[RunPaths]:
    """The runs in `runs_root`, ordered by their last write, without folders that have no settings."""
    dated = []
    for name in run_names(runs_root):
        if (paths := RunPaths(runs_root / name)).settings.is_file():
            dated.append((last_written(paths), name, paths))
    return [paths for _, _, paths in sorted(dated, key=lambda each: each[:2])]


def last_written(paths: RunPaths) -> float:
    """Unix time at which the run last started, resumed or wrote metrics, seconds."""
    return max(file.stat().st_mtime for file in (paths.settings, paths.metrics) if file.is_file())


def last_change(paths: RunPaths) -> float:
    """Unix time of the last sign of life in a run's files, seconds; 0 without settings."""
    if not paths.settings.is_file():
        return 0.0
    parts = [paths.settings, paths.metrics, paths.scores, paths.checkpoints, paths.adapters, paths.ledger]
    parts += [paths.track, *paths.shards.glob("*")]
    return max(part.stat().st_mtime for part in parts if part.exists())


def resolve_run(runs_root: Path, run: str) -> str:
    """`run` itself, or for 'latest' the readable run that wrote last. Raises InputError if there is none, a folder is named
    'latest', or `run` cannot name a folder."""
    if run != LATEST:
        return check_name(run, "run")
    runs = runs_in(runs_root)
    if any(paths.root.name == LATEST for paths in runs):
        raise InputError(f"'{runs_root / LATEST}' has the name that selects the run that wrote last: rename that folder")
    whole = (paths.root.name for paths in reversed(runs) if _has_whole_settings(paths))
    if (name := next(whole, None)) is None:
        raise InputError(
            f"there is no run in '{runs_root}' yet: begin one with `entente train`, or name the folder with --runs-root"
        )
    return name


def _has_whole_settings(paths: RunPaths) -> bool:
    try:
        return isinstance(json.loads(paths.settings.read_bytes()), dict)
    except (OSError, ValueError):
        return False
