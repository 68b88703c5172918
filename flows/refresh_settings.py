"""Settings of a refreshed state cache, and removal of refreshed versions that no run uses.

A refreshed version is made from the cache with which its run started. Its held-out positions are the same, so scores can be
compared. Only refreshed versions are ever removed.
"""

import json
from pathlib import Path

from entente.settings.run_settings import settings_of
from entente.telemetry.errors import InputError
from entente.telemetry.progress import reporter
from state_cache.settings import CacheSettings
from state_cache.store import MANIFEST, version_name
from state_cache.verify import list_caches
from storage.files import file_marks, remove_folder
from storage.ledger import last_step, ledger_path, recorded_steps
from storage.runs import RunPaths, check_name, run_names


def refreshed_settings(runs_root: Path, run: str, share: float) -> CacheSettings:
    """Settings of the run's cache with a share of positions from the start groups that the run has played.

    Args:
        share: between 0 and 1, both excluded.

    Raises:
        InputError: there is no such run, it has not trained a step, or the share is out of range.
    """
    paths = RunPaths(runs_root / check_name(run, "run"))
    stored = settings_of(paths)
    # All rollouts of a step with a ledger are published. Rollouts of later steps may be published in any order.
    groups = last_step(paths) * stored.rollouts.start_groups
    if not groups:
        raise InputError(f"run '{run}' has not trained a step yet: refresh the cache once it has")
    if not 0 < share < 1:
        raise InputError(f"share {share:g} is out of range: give a number between 0 and 1, such as 0.25")
    given = {"from_run": run, "from_groups": groups, "on_policy_share": share}
    return CacheSettings.model_validate(stored.cache.scripted.model_dump() | given)


def newest_run(runs_root: Path) -> str:
    """Name of the run with the newest ledger; empty if there is no ledger."""
    written: dict[str, int] = {}
    for run in run_names(runs_root):
        paths = RunPaths(runs_root / run)
        for step in recorded_steps(paths):
            if (marks := file_marks(ledger_path(paths, step))) is not None:
                written[run] = max(written.get(run, 0), marks[1])
    return max(written, key=lambda run: written[run], default="")


def drop_unused(root: Path, runs_root: Path, newest: Path) -> list[str]:
    """Remove refreshed versions under `root` that no run uses, except `newest`. Returns the names of removed versions.

    If the settings of a run cannot be read, it may use any version. Then nothing is removed.
    """
    keep = {newest.name}
    try:
        for paths in (RunPaths(runs_root / name) for name in run_names(runs_root)):
            if paths.settings.exists():
                keep.add(version_name(settings_of(paths).cache))
    except InputError as error:
        reporter().say(f"old versions of the state cache are kept: {error}")
        return []
    unused = [path for path in list_caches(root) if path.name not in keep and _is_refreshed(path)]
    for path in unused:
        remove_folder(path)
    return [path.name for path in unused]


def _is_refreshed(path: Path) -> bool:
    try:
        return bool(json.loads((path / MANIFEST).read_bytes())["settings"]["from_run"])
    except (OSError, ValueError, KeyError, TypeError):
        return False  # damaged: keep it
