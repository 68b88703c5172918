"""Resolves "newest" in the state-cache settings to a version, and names the sources of a cache. A refresh records its settings in
a file next to the caches, so the newest one does not depend on clocks or file times."""

from pathlib import Path

from pydantic import ValidationError

from entente.settings.layers import settings_of
from entente.settings.run_settings import RunSettings
from state_cache.settings import NEWEST, CacheSettings
from state_cache.store import find_cache, version_name
from storage.arrow_files import metadata_of
from storage.control import bot_sources
from storage.json_files import kept_object
from storage.ledger import read_ledger
from storage.runs import CACHE_FOLDER, RunPaths


def with_cache_version(settings: RunSettings, *, resume: bool = False) -> RunSettings:
    """Replace "newest" by a version of the state cache. A resumed run keeps its version."""
    cache = settings.cache
    if cache.from_run != NEWEST:
        return settings
    stored = settings_of(settings.paths).cache if resume else None
    if stored is None or stored.scripted != cache.scripted:
        stored = newest_refresh(settings.runs_root / CACHE_FOLDER, cache)
    return settings.model_copy(update={"cache": stored})


def newest_refresh(root: Path, settings: CacheSettings) -> CacheSettings:
    """Settings of the newest published refresh with the same scripted settings; without one, the scripted settings."""
    try:
        newest = CacheSettings.model_validate(kept_object(newest_file(root, settings)))
    except ValidationError:  # damaged, or of another release: the next refresh rewrites it
        return settings.scripted
    usable = newest.scripted == settings.scripted and find_cache(root, newest) is not None
    return newest if usable else settings.scripted


def newest_file(root: Path, settings: CacheSettings) -> Path:
    return root / f"newest-{version_name(settings.scripted)}.json"


def cache_sources(settings: CacheSettings, run: RunPaths | None = None) -> dict[str, str]:
    """What a cache depends on beside its settings, name -> mark: the packages of users' bots, and with `run`, which may be
    deleted and made again under its name, the last ledger of the start groups that count. Raises DataError if it is damaged."""
    sources = {f"package '{name}'": source for name, source in bot_sources(settings.players).items()}
    if run is not None and run.settings.exists():
        step = max(1, settings.from_groups // settings_of(run).rollouts.start_groups)
        if (rows := read_ledger(run, step)) is not None:
            sources[f"run '{settings.from_run}'"] = metadata_of(rows)["content_crc32"]
    return sources
