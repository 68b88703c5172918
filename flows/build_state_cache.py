"""Flow: play scripted games and freeze mid-game positions; training and held-out positions come from different games.

Settings that were built before return the existing cache. With `run`, the flow refreshes the cache with which that run started:
a share of its training positions is replaced by positions that the run's rollouts reached. The held-out positions stay, so scores
can be compared. Refreshed caches that no run uses are removed; others never are.
"""

import asyncio
import json
from pathlib import Path

from prefect import flow

from entente.settings.layers import settings_of
from entente.telemetry.errors import InputError
from entente.telemetry.progress import reporter
from flows.given_parameters import check_given, named_after
from state_cache.settings import CacheSettings
from state_cache.store import MANIFEST, find_cache, version_name
from state_cache.verify import list_caches
from storage.files import file_marks, folders_in, remove_folder
from storage.ledger import last_step, ledger_path, recorded_steps
from storage.runs import CACHE_FOLDER, RunPaths, check_name, run_names
from tasks.preparation import freeze_positions, refresh_positions

NEWEST = "newest"
"""Stands for the run that trained last; if there is none, nothing is built."""


@flow(name="build-state-cache", flow_run_name=named_after("cache", "run"))
async def build_state_cache(
    settings: CacheSettings | None = None, runs_root: Path = Path("runs"), run: str = "", share: float = 0.25
) -> Path | None:
    """Build or find the cache of `settings` under `runs_root`. Returns its folder, or None if no run has trained.

    Args:
        settings: Settings of the cache; default: the default of every setting.
        runs_root: Folder of all runs and caches.
        run: Run whose cache is refreshed instead, with positions that its rollouts have reached; "newest" for the one that
            trained last, empty for none.
        share: Share of the training positions that come from that run.
    """
    settings = settings or CacheSettings()
    check_given(runs_root, runs=[settings.from_run, run])
    root = runs_root / CACHE_FOLDER
    name = newest_run(runs_root) if run == NEWEST else run
    if run == NEWEST and not name:
        reporter().say(f"no run in '{runs_root}' has trained a step yet, so there is no state cache to refresh")
        return None
    if name:
        settings = refreshed_settings(runs_root, name, share)
    found = await asyncio.to_thread(find_cache, root, settings)
    path = found or await _made(root, settings, runs_root)
    if name:
        await asyncio.to_thread(drop_unused, root, runs_root, path)
    return path


async def _made(root: Path, settings: CacheSettings, runs_root: Path) -> Path:
    if not settings.from_run:
        return await freeze_positions(root, settings)
    paths = RunPaths(runs_root / settings.from_run)
    if not folders_in(paths.shards):
        raise InputError(
            f"there is no run '{settings.from_run}' in '{runs_root}' to take positions from: leave cache.from_run out"
        )
    base = find_cache(root, settings.scripted) or await freeze_positions(root, settings.scripted)
    return await refresh_positions(root, settings, base, paths)


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
