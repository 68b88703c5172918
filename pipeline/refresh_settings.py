"""What a refreshed state cache is made of, and which of its versions may go.

Promises: a refreshed version rests on the cache that its run was begun with, so the held-out positions stay and scores can be
compared; a version goes only when no run's settings name it. Never touches a version that no refresh made.
"""

import json
import shutil
from pathlib import Path

from pipeline.run_settings import settings_of
from state_cache.settings import CacheSettings
from state_cache.store import MANIFEST, version_name
from state_cache.verify import list_caches
from storage.lineages import last_step
from storage.runs import RunPaths, check_name, set_aside
from telemetry.errors import InputError
from telemetry.progress import reporter


def refreshed_settings(runs_root: Path, run: str, share: float) -> CacheSettings:
    """Settings of the run's cache with this share from the start groups that the run has played by now.

    Raises:
        InputError: there is no such run, it has not trained a step, or the share is none.
    """
    paths = RunPaths(runs_root / check_name(run, "run"))
    stored = settings_of(paths)
    # The rollouts of a step that has a ledger are all published; those of later ones may come in any order.
    groups = last_step(paths) * stored.rollouts.start_groups
    if not groups:
        raise InputError(f"run '{run}' has not trained a step yet: refresh the cache once it has")
    if not 0 < share < 1:
        raise InputError(f"share {share:g} is no share: give a number between 0 and 1, such as 0.25")
    given = {"from_run": run, "from_groups": groups, "on_policy_share": share}
    return CacheSettings.model_validate(stored.cache.scripted.model_dump() | given)


def newest_run(runs_root: Path) -> str:
    """Name of the run that recorded a trainer step last; empty if none did."""
    steps = [
        step for step in runs_root.glob("*/ledger/*/step-*.arrow") if not step.relative_to(runs_root).parts[0].startswith("_")
    ]
    return max(steps, key=lambda step: step.stat().st_mtime).relative_to(runs_root).parts[0] if steps else ""


def drop_unused(root: Path, runs_root: Path, newest: Path) -> list[str]:
    """Remove refreshed versions under `root` that no run names, but for the `newest`; the names of what went.

    A run whose settings cannot be read may name any of them: then all stay.
    """
    keep = {newest.name}
    try:
        for settings in runs_root.glob("*/settings.json"):
            keep.add(version_name(settings_of(RunPaths(settings.parent)).cache))
    except InputError as error:
        reporter().say(f"old versions of the state cache stay: {error}")
        return []
    gone = [path for path in list_caches(root) if path.name not in keep and _is_refreshed(path)]
    for path in gone:
        shutil.rmtree(set_aside(path))  # it loses its name first: whoever looks finds a whole version or none
    return [path.name for path in gone]


def _is_refreshed(path: Path) -> bool:
    try:
        return bool(json.loads((path / MANIFEST).read_bytes())["settings"]["from_run"])
    except (OSError, ValueError, KeyError, TypeError):
        return False  # older, or damaged: not ours to judge
