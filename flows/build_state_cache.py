"""Flow: play scripted games and save mid-game positions; training and held-out positions come from different games.

Returns an existing cache for equal settings, unless its sources have changed. With `run` it refreshes that run's cache:
positions that its rollouts reached replace a fraction of the training positions; held-out positions stay, so scores remain
comparable. Runs with `cache.from_run` "newest" start from the newest refresh of their settings. Removes refreshes that no run
uses once a newer one of the same settings exists.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from prefect import flow
from pydantic import ValidationError

from entente.settings.cache_version import cache_sources, newest_file, newest_refresh
from entente.settings.layers import settings_of
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError
from entente.telemetry.progress import reporter
from flows.given_parameters import PINNED, check_parameters, named_after
from state_cache.settings import NEWEST, CacheSettings
from state_cache.store import MANIFEST, SOURCES, find_cache, open_cache, version_name
from state_cache.verify import list_caches
from storage.files import folders_in, is_held, remove_folder, set_aside
from storage.json_files import kept_object, write_json
from storage.ledger import last_step, ledger_path, recorded_steps
from storage.retention import STALE_VERSIONS
from storage.runs import CACHE_FOLDER, RunPaths, check_name, run_names
from storage.shards import LOCAL_PRODUCER, first_unpublished
from tasks.artifacts import show_sentences
from tasks.preparation import freeze_positions, refresh_positions


@flow(name="build-state-cache", flow_run_name=named_after("cache", "run"), **PINNED)
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
    check_parameters(runs_root, runs=[settings.from_run, run])
    root = runs_root / CACHE_FOLDER
    name = newest_run(runs_root) if run == NEWEST else run
    if run == NEWEST and not name:
        reporter().say(f"no run in '{runs_root}' has trained a step yet, so there is no state cache to refresh")
        return None
    if name:
        settings = refreshed_settings(runs_root, name, share)
    elif settings.from_run == NEWEST:
        settings = newest_refresh(root, settings)
    existing = await asyncio.to_thread(usable_cache, root, settings, RunPaths(runs_root / name) if name else None)
    path = existing or await _made(root, settings, runs_root)
    if name:
        await asyncio.to_thread(write_json, newest_file(root, settings), settings.model_dump(mode="json"))
        await asyncio.to_thread(drop_unused, root, runs_root)
        await show_refresh(runs_root, settings)
    return path


async def show_refresh(runs_root: Path, settings: CacheSettings) -> None:
    name = version_name(settings)
    await show_sentences(f"refresh-{name}", f"State cache {name}", lambda: _describe_refresh(runs_root, settings))


def _describe_refresh(runs_root: Path, settings: CacheSettings) -> list[str]:
    cache = open_cache(runs_root / CACHE_FOLDER / version_name(settings))
    reached = sum(snapshot.source.startswith("policy:") for snapshot in cache.train)
    users = [run for run, used in caches_in_use(runs_root).items() if used == settings]
    return [
        f"{reached} of {len(cache.train)} training positions were reached by run {settings.from_run} in its first "
        f"{settings.from_groups} start groups. The {len(cache.held_out)} held-out positions are those of the scripted cache.",
        f"Runs that started from it: {', '.join(users)}." if users else "No run has started from it yet.",
    ]


async def _made(root: Path, settings: CacheSettings, runs_root: Path) -> Path:
    if not settings.from_run:
        return await freeze_positions(root, settings)
    paths = RunPaths(runs_root / settings.from_run)
    if not folders_in(paths.shards):
        raise InputError(
            f"there is no run '{settings.from_run}' in '{runs_root}' to take positions from: leave cache.from_run out"
        )
    base = usable_cache(root, settings.scripted) or await freeze_positions(root, settings.scripted)
    return await refresh_positions(root, settings, base, paths)


def usable_cache(root: Path, settings: CacheSettings, run: RunPaths | None = None) -> Path | None:
    """The published cache of these settings. Sets it aside if a source, such as the `run` whose positions are wanted, is another
    one now; raises InputError if a run uses it."""
    path = find_cache(root, settings)
    if path is None or not (changed := changed_source(path, cache_sources(settings, run))):
        return path
    users = [run for run, used in caches_in_use(root.parent).items() if settings in (used, used.scripted)]
    made = f"'{path}' was made from another {changed} than the one here"
    if users:
        raise InputError(f"{made}, and run '{users[0]}' uses it: choose another share or cache.seed")
    reporter().say(f"set aside and built again: {made}")
    set_aside(path)
    return None


def changed_source(path: Path, sources: Mapping[str, str]) -> str:
    """Name of a source that differs from that of the cache in the folder `path`, damaged or not; empty if none is known to."""
    marked = kept_object(path / MANIFEST).get(SOURCES, {})
    return next((name for name, mark in sources.items() if marked.get(name, mark) != mark), "")


def refreshed_settings(runs_root: Path, run: str, share: float) -> CacheSettings:
    """Settings of the run's cache with a fraction `share`, in the open interval (0, 1), of positions from its start groups.
    Raises InputError if there is no such run, it has not trained a step, or the share is out of range."""
    paths = RunPaths(runs_root / check_name(run, "run"))
    stored = settings_of(paths)
    groups = _published_groups(paths, stored)
    if not groups:
        raise InputError(f"run '{run}' has not trained a step with all its rollouts yet: refresh the cache once it has")
    if not 0 < share < 1:
        raise InputError(f"share {share:g} is out of range: give a number between 0 and 1, such as 0.25")
    source = {"from_run": run, "from_groups": groups, "on_policy_share": share}
    return CacheSettings.model_validate(stored.cache.scripted.model_dump() | source)


def _published_groups(paths: RunPaths, stored: RunSettings) -> int:
    """Start groups of the recorded steps, up to the first that the run may still publish: equal settings would otherwise name
    different positions later."""
    last, start_groups = last_step(paths), stored.rollouts.start_groups
    if stored.pipeline.buffer_depth <= 1 or not is_held(paths.lock):
        return last * start_groups
    # A step may be recorded before all its groups are played. A run does not play those of steps that were recorded before it
    # was resumed, which writes its settings, and it may have removed older shards.
    resumed = paths.settings.stat().st_mtime
    earlier = [step for step in recorded_steps(paths) if ledger_path(paths, step).stat().st_mtime < resumed]
    first = max([0, last - STALE_VERSIONS, *earlier]) * start_groups
    return first_unpublished(paths, LOCAL_PRODUCER, first, last * start_groups)


def newest_run(runs_root: Path) -> str:
    """Name of the run that logged a step last, by the times in the metrics, which a copy keeps; empty if none has."""
    times: dict[str, float] = {}
    for run in run_names(runs_root):
        file = RunPaths(runs_root / run).metrics
        for line in reversed(file.read_bytes().splitlines() if file.is_file() else ()):
            with suppress(ValueError, KeyError, TypeError):  # a kill cut it
                record = json.loads(line)
                if record["step"] > 0:
                    times[run] = record["time"]
                    break
    return max(times, key=lambda run: times[run], default="")


def drop_unused(root: Path, runs_root: Path) -> list[str]:
    """Remove refreshed caches that no run uses and a newer one of the same settings has replaced; returns their names. Removes
    none if a run's settings are unreadable, because it may use any version."""
    try:
        keep = {version_name(cache) for cache in caches_in_use(runs_root).values()}
    except InputError as error:
        reporter().say(f"old versions of the state cache are kept: {error}")
        return []
    replaced = (path.name for path, settings in _refreshed_versions(root) if newest_refresh(root, settings.scripted) != settings)
    unused = [name for name in replaced if name not in keep]
    for name in unused:
        remove_folder(root / name)
    return unused


def caches_in_use(runs_root: Path) -> dict[str, CacheSettings]:
    """Cache settings of each run, by name; raises InputError if the settings of a run cannot be read."""
    runs = (RunPaths(runs_root / name) for name in run_names(runs_root))
    return {paths.root.name: settings_of(paths).cache for paths in runs if paths.settings.exists()}


def _refreshed_versions(root: Path) -> Iterator[tuple[Path, CacheSettings]]:
    """Folders of refreshed versions with their settings, without damaged ones and those of another schema."""
    for path in list_caches(root):
        with suppress(ValidationError):
            settings = CacheSettings.model_validate(kept_object(path / MANIFEST).get("settings"))
            if settings.from_run:
                yield path, settings
